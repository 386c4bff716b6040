"""Make a table that compares tuned networks with libraries, from the results of `tvmconv bench tune-suite`.

    tvmconv bench networks results/*-tuned.json
    tvmconv bench networks tuning_logs/nvidia-h200/*-tuned.json --update-page docs/results.md
    tvmconv bench networks tuning_logs/nvidia-h200/*-tuned.json --predicted --update-page docs/knowledge.md

With --predicted, the table has the kernels that the cost model predicts without trials. With --slower, it has the
layers whose tuned kernels are slower than the library's. The benchmark also writes the sections of docs/ with these
tables.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tvmconv.benchmarks.common import show
from tvmconv.cli import options
from tvmconv.experiments.sweep import Sweep
from tvmconv.reports.networks import make_networks_table, make_predictions_table, make_slower_layers_table

LEGEND = (
    "Number of distinct layers, and of those that are slower than the library; speed-up over the library; total time "
    "of all layers of the network. Each line is one run, whose page lists versions, date and command."
)
PREDICTED_LEGEND = (
    "×: speed-up over cuDNN, geometric means over the distinct layers. *Attainable*: the speed-up of a kernel that "
    "takes a launch and then the longer time of its arithmetic and its bytes, at the best rates of any tensor-core "
    "kernel on this GPU; and the number of layers whose attainable speed-up is below 1.5. Further columns have the "
    "number of layers whose prediction has less than 0.8 of cuDNN's speed, and the total time of all layers of the "
    "network. Each line is one run, whose page lists versions, date, command and model."
)
SLOWER_LEGEND = (
    "The layers of the networks above whose tuned kernels have less than 0.97 of cuDNN's speed, and the attainable "
    "speed-up over cuDNN."
)
TABLES = {  # by the section of a page
    "networks": (make_networks_table, LEGEND),
    "predicted": (make_predictions_table, PREDICTED_LEGEND),
    "slower": (make_slower_layers_table, SLOWER_LEGEND),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the benchmark."""
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="Files NAME-tuned.json.")
    options.add_page(parser)
    kinds = parser.add_mutually_exclusive_group()
    for kind, text in (("predicted", "the predictions without trials"), ("slower", "the layers that are slower")):
        kinds.add_argument(f"--{kind}", dest="table", action="store_const", const=kind, help=f"Show {text}.")
    parser.set_defaults(table="networks")


def run(args: argparse.Namespace) -> int:
    """Read the results, print the table and write it into a page."""
    make, legend = TABLES[args.table]
    show(make([Sweep.read(file) for file in args.files]), args, args.table, legend)
    return 0
