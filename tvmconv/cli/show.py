"""Print a kernel at one level of lowering, as text."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING

from tvmconv import kernel, workloads
from tvmconv.cli import options, output
from tvmconv.cli.errors import UsageError
from tvmconv.cli.kernels import KERNEL_NAME_HELP, add_log_option, build_named_kernel
from tvmconv.kernel import Kernel
from tvmconv.reports.tables import Columns, Table, TableFormatter, format_optional, format_significant, make_table
from tvmconv.tvm_import import import_tvm

if TYPE_CHECKING:
    from tvmconv.analysis.memory.traffic import BlockTraffic

TRAFFIC_LEVEL = "traffic"  # loads, stores and FLOP of a block
IR_LEVELS = (*kernel.IR_LEVELS, TRAFFIC_LEVEL)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    options.add_workload_argument(parser)
    parser.add_argument("schedule", metavar="SCHEDULE", help=f"{KERNEL_NAME_HELP}.")
    options.add_option(parser, "--stage", None, "Lowering level", choices=IR_LEVELS, default="source")
    parser.add_argument("--full", action="store_true", help="Print the source with its preamble, so that it compiles.")
    add_log_option(parser)
    options.add_device_options(parser)
    options.add_set_option(parser)
    output.add_table_options(parser, json_help=f"Print the table of --stage {TRAFFIC_LEVEL} as JSON.")


def run(args: argparse.Namespace) -> int:
    """Print a kernel at one level of lowering."""
    workload = workloads.parse(args.workload)
    device = options.find_target_device(args)
    if (args.json or args.csv or args.wide) and args.stage != TRAFFIC_LEVEL:
        raise UsageError(f"--json, --csv and --wide need --stage {TRAFFIC_LEVEL}, which prints a table")
    import_tvm()
    built_kernel = build_named_kernel(args.schedule, workload, device, dict(args.set), args.log)
    if args.json or args.csv:
        from tvmconv.analysis.memory.traffic import count_traffic

        tables = [make_traffic_table(count_traffic(built_kernel, lowered)) for lowered in built_kernel.kernels]
        output.print_report(args, tables)
    else:
        formatter = output.make_table_formatter(args)
        print(format_ir_level(built_kernel, args.stage, is_full=args.full, formatter=formatter))
    options.print_device(args, device)
    return 0


def format_ir_level(
    built_kernel: Kernel, name: str, *, is_full: bool = False, formatter: TableFormatter = Table.format_text
) -> str:
    """Return a kernel's text at one of `IR_LEVELS`; see `Kernel.format_ir_level`. `formatter` returns a table as text.

    Raises:
        AnalysisError: The kernel's operations cannot be counted.
        CompileError: The level does not exist for the kernel's target.
    """
    if name != TRAFFIC_LEVEL:
        return built_kernel.format_ir_level(name, full=is_full)
    from tvmconv.analysis.memory.traffic import count_traffic

    return "\n\n".join(
        built_kernel.add_kernel_title(
            lowered_kernel, _format_traffic(count_traffic(built_kernel, lowered_kernel), formatter)
        )
        for lowered_kernel in built_kernel.kernels
    )


def make_traffic_table(traffic: BlockTraffic) -> Table:
    """Return a table with one row per operation that occurs."""
    columns: Columns = {
        "operation": lambda item: item[0],
        "per output": lambda item: format_significant(traffic.count_per_output(item[0])),
        "per block": lambda item: f"{item[1].num_elements:,}",
        "warp requests": lambda item: f"{item[1].num_requests:,}",
    }
    return make_table([item for item in traffic.counts.items() if item[1].num_elements], columns, {"operation"})


def _format_traffic(traffic: BlockTraffic, formatter: TableFormatter) -> str:
    """Return the size of the block, the table, and the ratios."""
    flops_per_load, flops_per_byte = (
        format_optional(value if math.isfinite(value) else None)
        for value in (traffic.flops_per_load, traffic.flops_per_byte)
    )
    return (
        f"the busiest block: {traffic.num_threads:,} threads, {traffic.num_outputs:,} outputs\n\n"
        f"{formatter(make_traffic_table(traffic))}\n\n"
        f"FLOP per element loaded from global memory: {flops_per_load}; per byte loaded and stored: {flops_per_byte}"
    )
