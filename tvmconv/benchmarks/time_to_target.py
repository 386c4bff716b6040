r"""Make a table of how soon searches reach the speed of a library, and nearly their best speed, from their logs.

    tvmconv bench time-to-target with.jsonl without.jsonl \
        --comparisons tuning_logs/nvidia-h200/yolov8s/yolov8s-tuned.json
    tvmconv bench time-to-target tuning_logs/searches/*.gz --comparisons tuning_logs/*/*/*-tuned.json \
        --update-page docs/time-to-target.md

A log is a complete one of `tvmconv tune` or `tvmconv bench tune-suite`, possibly packed by `scripts/pack_logs.py`. A
comparison is a file NAME-tuned.json of `tvmconv bench tune-suite`.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tvmconv.benchmarks.common import show
from tvmconv.cli import options
from tvmconv.experiments.sweep import Sweep
from tvmconv.logs.record import Record
from tvmconv.reports.tables import Table, format_optional
from tvmconv.training import read_valid_records
from tvmconv.workloads import Workload

NEAR_BEST_FRACTION = 0.95  # of the speed of the fastest config of all searches
SECTION = "reach"
LEGEND = (
    "Seconds from the start of a layer's search to the first record of the target speed: median over all layers, and "
    "maximum over those that reach it. The best is the fastest config of all searches, and "
    f"{NEAR_BEST_FRACTION:.0%} is a fraction of its speed. *Seconds a layer*: mean time of the last record."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the benchmark."""
    parser.add_argument("logs", nargs="+", type=Path, metavar="LOG", help="Logs of searches, also .gz and .xz.")
    text = "Files NAME-tuned.json to compare with"
    former = "--beside"
    options.add_option(parser, "--comparisons", "FILE", text, former=former, nargs="+", required=True, type=Path)
    options.add_option(parser, "--library", "L", "Library whose speed is the target", default="cudnn")
    options.add_page(parser)


def run(args: argparse.Namespace) -> int:
    """Read logs and comparisons, print the table and write it into a page."""
    searches = {log.name.partition(".")[0]: list(read_valid_records(log)) for log in args.logs}
    table = make_time_to_target_table(searches, [Sweep.read(file) for file in args.comparisons], args.library)
    show(table, args, SECTION, LEGEND)
    return 0


def make_time_to_target_table(
    searches: Mapping[str, Iterable[Record]], comparisons: Sequence[Sweep], library: str = "cudnn"
) -> Table:
    """Return a table with one row per search and goal: how many layers reach the goal, and after how many seconds. A
    record's seconds count from the command for the first layer, and from the end of the previous layer for the others.
    The library's best time in the comparisons counts; layers without one are left out.
    """
    library_seconds: dict[Workload, float] = {}
    for result in (result for sweep in comparisons for result in sweep.results):
        if seconds := result.seconds.get(library):
            library_seconds[result.workload] = min(seconds, library_seconds.get(result.workload, math.inf))
    near_best_seconds = dict.fromkeys(library_seconds, math.inf)
    layers_by_search: dict[str, dict[Workload, list[Record]]] = {}
    for name, records in searches.items():
        layers: defaultdict[Workload, list[Record]] = defaultdict(list)
        for record in records:
            if record.elapsed is not None and record.ok and record.workload in library_seconds:
                layers[record.workload].append(record)
                near_best = min(near_best_seconds[record.workload], record.cost / NEAR_BEST_FRACTION)
                near_best_seconds[record.workload] = near_best
        layers_by_search[name] = layers
    goals = {f"{library}'s speed": library_seconds, f"{NEAR_BEST_FRACTION:.0%} of the best": near_best_seconds}
    headers = ("goal", "search", "layers", "reached", "median [s]", "worst [s]", "seconds per layer")
    rows = [
        (goal, name, *_format_row(layers, target_seconds))
        for goal, target_seconds in goals.items()
        for name, layers in layers_by_search.items()
    ]
    return Table(headers, rows, {"goal", "search"})


def _format_row(layers: Mapping[Workload, Sequence[Record]], target_seconds: Mapping[Workload, float]) -> list[str]:
    """Return the numbers of layers and of those at the goal, median and latest time of that, and mean duration."""
    first_seconds = [
        min((record.elapsed or 0 for record in records if record.cost <= target_seconds[workload]), default=math.inf)
        for workload, records in layers.items()
    ]
    reached_seconds = [seconds for seconds in first_seconds if seconds < math.inf]
    median = statistics.median(first_seconds) if first_seconds else math.inf
    durations = [max(record.elapsed or 0 for record in records) for records in layers.values()]
    seconds = (
        median if median < math.inf else None,
        max(reached_seconds, default=None),
        statistics.fmean(durations) if durations else None,
    )
    return [str(len(layers)), str(len(reached_seconds)), *map(format_optional, seconds)]
