"""`tvmconv suites`: the named lists of workloads."""

from __future__ import annotations

import argparse
from typing import Any

from tvmconv.reports.tables import Table
from tvmconv.workloads import suite
from tvmconv.workloads.suites import SUITES


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser("suites", help="the named lists of workloads, or the layers of one")
    parser.add_argument("name", metavar="NAME", nargs="?", help=f"one of {', '.join(SUITES)}")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the suites, or the layers of one."""
    if args.name is None:
        rows = [[name, str(len(suite(name)))] for name in SUITES]
        print(Table(("suite", "workloads"), rows, left=frozenset({"suite"})).text())
        return 0
    rows = [[layer.name, str(layer.count), layer.workload.text] for layer in suite(args.name)]
    print(Table(("layer", "times", "workload"), rows, left=frozenset({"layer", "workload"})).text())
    return 0
