"""`tvmconv suites`: the named lists of workloads."""

from __future__ import annotations

import argparse
from typing import Any

from tvmconv.cli.options import add_selection, chosen_layers, refuse_layers_options
from tvmconv.reports.tables import Table
from tvmconv.workloads import suite
from tvmconv.workloads.suites import SUITES


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser("suites", help="the named lists of workloads, or the layers of one")
    parser.add_argument("suite", metavar="NAME", nargs="?", help=f"one of {', '.join(SUITES)}, or a file NAME.json")
    add_selection(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the suites, or the layers of one."""
    if args.suite is None:
        refuse_layers_options(args)
        rows = [[name, str(len(suite(name)))] for name in SUITES]
        print(Table(("suite", "workloads"), rows, left=frozenset({"suite"})).text())
        return 0
    layers = chosen_layers(args).layers.values()
    rows = [[layer.name, str(layer.count), layer.workload.text] for layer in layers]
    print(Table(("layer", "times", "workload"), rows, left=frozenset({"layer", "workload"})).text())
    return 0
