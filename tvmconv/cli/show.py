"""`tvmconv show`: print a kernel at one level of lowering, from the tensor expression to machine code."""

from __future__ import annotations

import argparse
from typing import Any

from tvmconv import workloads
from tvmconv.cli.kernels import KERNEL_NAME_HELP, add_log_option, build_named_kernel
from tvmconv.cli.options import EXAMPLE_WORKLOAD, add_device_options, add_set_option, find_target_device, print_device
from tvmconv.reports.ir_levels import IR_LEVELS, format_ir_level
from tvmconv.tvm_import import import_tvm


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser("show", help="print a kernel at one level of lowering, as text")
    parser.add_argument("workload", metavar="WORKLOAD", help=f"Workload, such as {EXAMPLE_WORKLOAD}.")
    parser.add_argument("schedule", metavar="SCHEDULE", help=f"{KERNEL_NAME_HELP}.")
    parser.add_argument("--stage", choices=IR_LEVELS, default="source", help="Lowering level (default: %(default)s).")
    parser.add_argument("--full", action="store_true", help="Print the source with its preamble, so that it compiles.")
    add_log_option(parser)
    add_device_options(parser)
    add_set_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print a kernel at one level of lowering."""
    workload = workloads.parse(args.workload)
    device = find_target_device(args)
    import_tvm()
    built_kernel = build_named_kernel(args.schedule, workload, device, dict(args.set), args.log)
    print(format_ir_level(built_kernel, args.stage, is_full=args.full))
    print_device(args, device)
    return 0
