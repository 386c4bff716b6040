"""Make a table of tuned networks beside libraries, one line each, from the results of `tvmconv bench tune-suite`.

    tvmconv bench networks results/*-tuned.json
    tvmconv bench networks tuning_logs/nvidia-h200/*-tuned.json --update-page docs/results.md
    tvmconv bench networks tuning_logs/nvidia-h200/*-tuned.json --predicted --update-page docs/knowledge.md

With --predicted the table has the kernels that the model predicted without any trial; with --slower it has the layers
whose tuned kernels are slower than the library's. The sections of docs/ that have these tables are written by it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tvmconv.benchmarks.common import show
from tvmconv.cli.options import add_page
from tvmconv.experiments.sweep import Sweep
from tvmconv.reports.networks import make_networks_table
from tvmconv.reports.predictions import make_predictions_table, make_slower_layers_table

LEGEND = (
    "Distinct layers, and how many of them are slower than the library; how many times as fast ours are; times of all "
    "layers, each as often as the network has it. Each line is of one run, whose page names versions, date and command."
)
PREDICTED_LEGEND = (
    "×: times as fast as cuDNN, geometric means over the distinct layers. *Attainable*: by a kernel that takes no "
    "longer than a launch and then its arithmetic or its bytes, whichever takes longer, at the best rates that "
    "any kernel on tensor cores has reached on this GPU; and how many layers leave less than 1.5 × of that. How "
    "many layers of what is predicted have less than 0.8 of cuDNN's speed; times of all layers, each as often as "
    "the network has it. Each line is of one run, whose page names versions, date, command and model."
)
SLOWER_LEGEND = (
    "The layers of the networks above whose tuned kernels have less than 0.97 of cuDNN's speed, and how many times as "
    "fast as cuDNN's a kernel without any loss would be."
)
TABLES = {  # by the section of a page
    "networks": (make_networks_table, LEGEND),
    "predicted": (make_predictions_table, PREDICTED_LEGEND),
    "slower": (make_slower_layers_table, SLOWER_LEGEND),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the benchmark."""
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="NAME-tuned.json")
    add_page(parser)
    kinds = parser.add_mutually_exclusive_group()
    for kind, text in (("predicted", "predictions without any trial"), ("slower", "the layers that are slower")):
        kinds.add_argument(f"--{kind}", dest="table", action="store_const", const=kind, help=f"show {text}")
    parser.set_defaults(table="networks")


def run(args: argparse.Namespace) -> int:
    """Read the results, print the table and write it into a page."""
    make, legend = TABLES[args.table]
    show(make([Sweep.read(file) for file in args.files]), args, args.table, legend)
    return 0
