"""`tvmconv show`: a kernel at any stage of its way from the tensor expression to machine code."""

from __future__ import annotations

import argparse
from typing import Any

from tvmconv import workloads
from tvmconv.cli.kernels import NAMED, add_log, named
from tvmconv.cli.options import EXAMPLE, add_place, add_set, find_place, tell_place
from tvmconv.reports.stages import STAGES, stage_text
from tvmconv.without_torch import import_tvm


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser("show", help="a kernel at one of its stages, as text")
    parser.add_argument("workload", metavar="WORKLOAD", help=f"such as {EXAMPLE}")
    parser.add_argument("schedule", metavar="SCHEDULE", help=NAMED)
    parser.add_argument("--stage", choices=STAGES, default="source", help="which (default: %(default)s)")
    parser.add_argument("--full", action="store_true", help="the source with its preamble, so that it compiles")
    add_log(parser)
    add_place(parser)
    add_set(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print a stage of a kernel."""
    workload = workloads.parse(args.workload)
    device = find_place(args)
    import_tvm()
    built = named(args.schedule, workload, device, dict(args.set), args.log)
    print(stage_text(built, args.stage, full=args.full))
    tell_place(args, device)
    return 0
