"""Explain the time of a kernel by counts from its code.

Count from the code of a kernel: occupancy, waves, wavefronts and sectors of each access, and the minimum time of each
unit. With several kernels, print what differs.
"""

from __future__ import annotations

import argparse
import json

from tvmconv import registry, workloads
from tvmconv.analysis.sass.linked_sources import prefetch_listings
from tvmconv.analysis.waterfall import compute_waterfall
from tvmconv.cli import options, output
from tvmconv.cli.errors import UsageError, print_note
from tvmconv.cli.kernels import KERNEL_NAME_HELP, PREDICTED, TUNED, add_log_option, build_named_kernel
from tvmconv.cli.progress import progress_line
from tvmconv.cli.run import FAILED_STATUS
from tvmconv.devices import Device
from tvmconv.errors import ScheduleFailure, log_traceback
from tvmconv.kernel import Kernel, build
from tvmconv.logs.packaged import packaged_logs
from tvmconv.logs.ranking import list_log_files
from tvmconv.reports.explained import find_device_spec
from tvmconv.reports.explanation import (
    compare_kernels,
    explain_kernel,
    explanation_to_json,
    make_quantities_table,
    make_sensitivity_report,
)
from tvmconv.reports.page_data import build_fastest, read_logs
from tvmconv.reports.waterfall import format_waterfall, make_time_lookup
from tvmconv.target import Target
from tvmconv.tvm_import import import_tvm
from tvmconv.workloads import Workload


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    options.add_workload_argument(parser)
    text = f"{KERNEL_NAME_HELP}; several kernels are compared (default: {TUNED} with --log, else {PREDICTED})."
    parser.add_argument("schedules", metavar="SCHEDULE", nargs="*", help=text)
    text = "Show for one schedule what the neighbouring values of each knob change"
    options.add_option(parser, "--sensitivity", None, text, former="--steps", action="store_true")
    text = "Show for one schedule what each knob gains, from the default config to the fastest one."
    parser.add_argument("--waterfall", action="store_true", help=text)
    add_log_option(parser, "the fastest config of --waterfall and for ")
    options.add_device_options(parser)
    options.add_set_option(parser)
    output.add_table_options(parser, json_help="Print the counts and the predicted time of each kernel as JSON.")


def run(args: argparse.Namespace) -> int:
    """Print the explanation of one kernel, the comparison of several, or a waterfall."""
    workload = workloads.parse(args.workload)
    import_tvm()
    device = options.find_target_device(args)
    if device.arch is None:
        raise UsageError(f"{device.text} is not an NVIDIA architecture, which explain needs: choose one with --arch")
    device_spec = find_device_spec(device)
    _check_options(args, has_device_spec=device_spec is not None)
    if args.waterfall and device_spec:
        _print_waterfall(args, workload, device, device_spec)
        options.print_device(args, device)
        return 0
    kernels, failures = _build_kernels(args, workload, device)
    if not kernels:
        raise failures[0]
    for error in failures:
        log_traceback(error)
        print_note(str(error))
    first_kernel = next(iter(kernels.values()))
    formatter = output.make_table_formatter(args)
    if args.json:
        print(json.dumps([explanation_to_json(built, device_spec, name) for name, built in kernels.items()]))
    elif args.csv:
        print(make_quantities_table([*kernels.values()], device_spec, [*kernels]).format_csv(), end="")
    elif len(kernels) == 1:
        print(explain_kernel(first_kernel, device_spec, formatter))
    else:
        print(compare_kernels([*kernels.values()], device_spec, [*kernels], formatter))
    if args.sensitivity and device_spec:
        with progress_line("explain: ") as show:
            table = make_sensitivity_report(first_kernel, device_spec, show, formatter)
        print(f"\n{table}")
    options.print_device(args, device)
    return FAILED_STATUS if failures else 0


def _check_options(args: argparse.Namespace, *, has_device_spec: bool) -> None:
    """Raise UsageError for options that exclude each other, or that need peak rates of a GPU which are unknown."""
    for option in ("sensitivity", "waterfall"):
        if getattr(args, option) and (len(args.schedules) != 1 or not has_device_spec):
            raise UsageError(f"--{option} takes one schedule, and a GPU whose peak rates are known")
    if (args.json or args.csv) and (args.waterfall or args.sensitivity):
        raise UsageError("--json and --csv are for the counts of kernels, not for --waterfall and --sensitivity")
    if args.waterfall and args.sensitivity:
        raise UsageError("--sensitivity and --waterfall exclude each other: expected one of them")


def _build_kernels(
    args: argparse.Namespace, workload: Workload, device: Device
) -> tuple[dict[str, Kernel], list[ScheduleFailure]]:
    """Return the named kernels that can be built, and the errors of the others."""
    kernels, failures = dict[str, Kernel](), []
    for name in args.schedules or [TUNED if args.log else PREDICTED]:
        try:
            kernels[name] = build_named_kernel(name, workload, device, dict(args.set), args.log)
        except ScheduleFailure as failure:
            failures.append(failure)
            continue
        prefetch_listings(kernels[name])  # disassembles in parallel with the next build
    return kernels, failures


def _print_waterfall(args: argparse.Namespace, workload: Workload, device: Device, device_spec: Target) -> None:
    """Print the gain of each knob from the default config to that of `--set`, or to the fastest of the log."""
    schedule = registry.find_schedule(workload, args.schedules[0])
    log_records = read_logs(list_log_files(args.log) if args.log else packaged_logs(), [workload], device)
    with options.report_fallbacks(), progress_line("explain: ") as show:
        if args.set:
            best_kernel = build(workload, schedule, device=device, config=dict(args.set))
        else:
            best_kernel = build_fastest(workload, schedule.name, log_records, device)
        known_seconds = make_time_lookup(log_records.records.get(workload, []), schedule.name)
        waterfall_steps = compute_waterfall(best_kernel, device_spec, known_seconds, show)
    print(format_waterfall(best_kernel, waterfall_steps, output.make_table_formatter(args)))
