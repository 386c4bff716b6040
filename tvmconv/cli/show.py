"""Print a kernel at one level of lowering, as text."""

from __future__ import annotations

import argparse

from tvmconv import workloads
from tvmconv.cli import options
from tvmconv.cli.kernels import KERNEL_NAME_HELP, add_log_option, build_named_kernel
from tvmconv.reports.ir_levels import IR_LEVELS, format_ir_level
from tvmconv.tvm_import import import_tvm


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    options.add_workload_argument(parser)
    parser.add_argument("schedule", metavar="SCHEDULE", help=f"{KERNEL_NAME_HELP}.")
    options.add_option(parser, "--stage", None, "Lowering level", choices=IR_LEVELS, default="source")
    parser.add_argument("--full", action="store_true", help="Print the source with its preamble, so that it compiles.")
    add_log_option(parser)
    options.add_device_options(parser)
    options.add_set_option(parser)


def run(args: argparse.Namespace) -> int:
    """Print a kernel at one level of lowering."""
    workload = workloads.parse(args.workload)
    device = options.find_target_device(args)
    import_tvm()
    built_kernel = build_named_kernel(args.schedule, workload, device, dict(args.set), args.log)
    print(format_ir_level(built_kernel, args.stage, is_full=args.full))
    options.print_device(args, device)
    return 0
