"""`tvmconv explain`: explain the time of a kernel by counts from its code, without a GPU."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from tvmconv import devices, kernel, registry, workloads
from tvmconv.cli.errors import UsageError, print_note
from tvmconv.cli.kernels import KERNEL_NAME_HELP, add_log_option, build_named_kernel
from tvmconv.cli.options import (
    EXAMPLE_WORKLOAD,
    add_device_options,
    add_renamed_option,
    add_set_option,
    find_target_device,
    print_device,
    report_fallbacks,
)
from tvmconv.cli.progress import progress_line
from tvmconv.cli.run import FAILED_STATUS
from tvmconv.errors import ScheduleFailure, log_traceback
from tvmconv.logs.packaged import packaged_logs
from tvmconv.logs.ranking import list_log_files
from tvmconv.target import Target
from tvmconv.tvm_import import import_tvm

if TYPE_CHECKING:
    from tvmconv.devices import Device
    from tvmconv.workloads import Workload


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "explain",
        help="explain the time of a kernel by counts from its code",
        description="Count from the code of a kernel: occupancy, waves, wavefronts and sectors of each access, and the "
        "minimum time of each unit. With several kernels, print what differs.",
    )
    parser.add_argument("workload", metavar="WORKLOAD", help=f"Workload, such as {EXAMPLE_WORKLOAD}.")
    parser.add_argument(
        "schedules", metavar="SCHEDULE", nargs="+", help=f"{KERNEL_NAME_HELP}; several kernels are compared."
    )
    add_renamed_option(
        parser,
        "--sensitivity",
        "--steps",
        action="store_true",
        help="Show for one schedule what the neighbouring values of each knob change.",
    )
    parser.add_argument(
        "--waterfall",
        action="store_true",
        help="Show for one schedule what each knob gains, from the default config to the fastest one.",
    )
    add_log_option(parser, "the fastest config of --waterfall and for ")
    add_device_options(parser)
    add_set_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the explanation of one kernel, the comparison of several, or a waterfall."""
    workload = workloads.parse(args.workload)
    import_tvm()
    from tvmconv.analysis.sass.linked_sources import prefetch_listings

    device = find_target_device(args)
    if device.arch is None:
        raise UsageError(f"{device.text} is not an NVIDIA architecture, which explain needs: choose one with --arch")
    device_spec = find_device_spec(device)
    for option in ("sensitivity", "waterfall"):
        if getattr(args, option) and (len(args.schedules) > 1 or device_spec is None):
            raise UsageError(f"--{option} takes one schedule, and a GPU whose peak rates are known")
    if args.waterfall and args.sensitivity:
        raise UsageError("--sensitivity and --waterfall exclude each other: expected one of them")
    if args.waterfall and device_spec:
        _print_waterfall(args, workload, device, device_spec)
        print_device(args, device)
        return 0
    built_kernels, names, failures = [], [], []
    for name in args.schedules:
        try:
            built_kernels.append(build_named_kernel(name, workload, device, dict(args.set), args.log))
        except ScheduleFailure as failure:
            failures.append(failure)
            continue
        names.append(name)
        prefetch_listings(built_kernels[-1])  # disassembles in parallel with the next build and the imports below
    if not built_kernels:
        raise failures[0]
    for error in failures:
        log_traceback(error)
        print_note(str(error))
    from tvmconv.reports.explanation import explain_kernel, make_sensitivity_report
    from tvmconv.reports.kernel_comparison import compare_kernels

    print(
        explain_kernel(built_kernels[0], device_spec)
        if len(built_kernels) == 1
        else compare_kernels(built_kernels, device_spec, names)
    )
    if args.sensitivity and device_spec:
        with progress_line("explain: ") as show:
            table = make_sensitivity_report(built_kernels[0], device_spec, show)
        print(f"\n{table}")
    print_device(args, device)
    return FAILED_STATUS if failures else 0


def _print_waterfall(args: argparse.Namespace, workload: Workload, device: Device, device_spec: Target) -> None:
    """Print the gain of each knob from the default config to that of `--set`, or to the fastest of the log."""
    from tvmconv.analysis.waterfall import compute_waterfall
    from tvmconv.reports.page_data import build_fastest, read_logs
    from tvmconv.reports.waterfall import format_waterfall, make_time_lookup

    schedule = registry.find_schedule(workload, args.schedules[0])
    log_records = read_logs(list_log_files(args.log) if args.log else packaged_logs(), [workload], device)
    with report_fallbacks(), progress_line("explain: ") as show:
        if args.set:
            best_kernel = kernel.build(workload, schedule, device=device, config=dict(args.set))
        else:
            best_kernel = build_fastest(workload, schedule.name, log_records, device)
        known_seconds = make_time_lookup(log_records.records.get(workload, []), schedule.name)
        waterfall_steps = compute_waterfall(best_kernel, device_spec, known_seconds, show)
    print(format_waterfall(best_kernel, waterfall_steps))


def find_device_spec(device: Device) -> Target | None:
    """Return the peak rates of a device, or None if they are unknown.

    An architecture has the rates of the GPU whose records trained its cost model.
    """
    from tvmconv.cost_model.model import cost_model_for

    if isinstance(device, devices.Arch):
        cost_model = cost_model_for(device.arch)
        return cost_model.device_spec if cost_model else None
    return device.target
