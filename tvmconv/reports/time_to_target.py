"""The time that a search takes to reach a library's speed, and to nearly reach its best."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from tvmconv.experiments.sweep import Sweep
from tvmconv.logs.record import Record
from tvmconv.reports.tables import Table, format_optional
from tvmconv.workloads import Workload

NEAR_BEST_FRACTION = 0.95  # of the speed of the fastest config of all searches


def make_time_to_target_table(
    searches: Mapping[str, Iterable[Record]], comparisons: Sequence[Sweep], library: str = "cudnn"
) -> Table:
    """Return a table with one row per search and goal: how many layers reach the goal, and after how many seconds.

    Args:
        searches: Records of each search by its name. A record's seconds count from the start of its layer's search:
            from the command for the first layer, from the end of the previous layer for the others.
        comparisons: Comparisons with the library's times, of which the best counts; layers without one are left out.
        library: Name of the library in the comparisons.
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
