r"""Make a table of how soon searches reach the speed of a library, and nearly their best speed, from their logs.

    tvmconv bench time-to-target with.jsonl without.jsonl --comparisons tuning_logs/nvidia-h200/yolov8s-tuned.json
    tvmconv bench time-to-target tuning_logs/searches/*.gz --comparisons tuning_logs/*/*-tuned.json \
        --update-page docs/knowledge.md

A log is a complete one of `tvmconv tune` or `tvmconv bench tune-suite`, possibly packed by `scripts/pack_logs.py`. A
comparison is a file NAME-tuned.json of `tvmconv bench tune-suite`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tvmconv.benchmarks.common import show
from tvmconv.cli import options
from tvmconv.experiments.sweep import Sweep
from tvmconv.reports.time_to_target import NEAR_BEST_FRACTION, make_time_to_target_table
from tvmconv.training import read_valid_records

SECTION = "reach"
LEGEND = (
    "Seconds from the start of a layer's search to the first record of the target speed: median over all layers, and "
    "maximum over those that reach it. The best is the fastest config of all searches, and "
    f"{NEAR_BEST_FRACTION:.0%} is a fraction of its speed. *Seconds a layer*: mean time of the last record."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the benchmark."""
    parser.add_argument("logs", nargs="+", type=Path, metavar="LOG", help="Logs of searches, also .gz.")
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
