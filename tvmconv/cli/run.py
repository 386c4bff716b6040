"""`tvmconv run`: build, verify and time schedules, and print a table."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from tvmconv import devices, naive_cost, workloads
from tvmconv.cli.errors import UsageError, print_note
from tvmconv.cli.options import (
    EXAMPLE_WORKLOAD,
    add_cost_model_option,
    add_set_option,
    add_suite_options,
    add_timing_options,
    add_verify_option,
    parse_layers,
    print_auto_device,
    print_skipped_schedules,
    reject_layer_options,
    report_fallbacks,
    timing_kwargs,
)
from tvmconv.cli.progress import progress_line
from tvmconv.experiments.preparation import find_omitted_naive
from tvmconv.experiments.results import Result
from tvmconv.experiments.run import run_schedules
from tvmconv.experiments.sweep import LayerSelection, Sweep
from tvmconv.files import open_regular
from tvmconv.logs.lines import translate_os_errors
from tvmconv.logs.ranking import list_log_files
from tvmconv.reports.sweep import format_text
from tvmconv.reports.tables import format_result
from tvmconv.tvm_import import import_tvm
from tvmconv.workloads import Workload

FAILED_STATUS = 1


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "run",
        help="build schedules, verify them against float64, and time them",
        description="Build schedules of a workload, verify them against float64, time them, and print a table. "
        "The exit status is 1 if a schedule failed.",
        usage="%(prog)s (WORKLOAD | --suite S) [SCHEDULE ...] [options]",
    )
    parser.add_argument(
        "words",
        metavar="WORKLOAD SCHEDULE",
        nargs="*",
        help=f"Workload and schedules, such as {EXAMPLE_WORKLOAD} vthread (default: all schedules that apply). The "
        "naive schedule always runs, as the reference of speed-ups, unless a launch would take seconds.",
    )
    add_suite_options(parser)
    parser.add_argument(
        "--log",
        metavar="F",
        action="append",
        help="Log, or folder of logs, whose fastest kernel for the device also runs, as row tuned; may be given "
        "several times.",
    )
    add_timing_options(parser)
    add_cost_model_option(parser)
    add_set_option(parser)
    add_verify_option(parser)
    parser.add_argument("--json", action="store_true", help="Print one line with a JSON object for each workload.")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print a table or a line of JSON for each workload, and for a suite a table of all its layers at the end."""
    selection = None if args.suite is None else parse_layers(args)
    chosen_workloads, schedules = _parse_workloads(args, selection)
    _check_readable(args.log or ())
    device = devices.find_device(args.device)
    import_tvm()
    results = []
    for number, workload in enumerate(chosen_workloads, 1):
        with report_fallbacks(), progress_line(f"{device.text}: {workload.text}, ") as progress:
            result = run_schedules(
                workload,
                schedules,
                device=device,
                config=dict(args.set),
                log=args.log,
                predicted=not schedules,
                progress=progress,
                verify=args.verify,
                **timing_kwargs(args),
            )
        if number == 1:
            print_auto_device(args.device, device)
        if not schedules:
            print_skipped_schedules(workload, device)
        if omitted_schedule := find_omitted_naive(workload, schedules, device):
            print_note(f"{naive_cost.describe_omission(omitted_schedule, [workload], device)}; name it to run it")
        _print_result(result, as_json=args.json, has_next=number < len(chosen_workloads))
        results.append(result)
    if selection and len(results) > 1 and not args.json:
        counts = [*(selection.counts or {}).values()]
        print(f"\n{format_text(Sweep(selection.name, [*selection.layers], results, '', counts))}")
    return 0 if all(result.has_all_times for result in results) else FAILED_STATUS


def _parse_workloads(args: argparse.Namespace, selection: LayerSelection | None) -> tuple[list[Workload], list[str]]:
    """Return the selected workloads and the names of the schedules."""
    if selection:
        return list(selection.workloads.values()), args.words
    if not args.words:
        raise UsageError("expected a workload or --suite; see tvmconv run --help")
    reject_layer_options(args)
    return [workloads.parse(args.words[0])], args.words[1:]


def _check_readable(logs: Sequence[str]) -> None:
    """Raise Error if a log cannot be read, before any kernel is measured."""
    for file in list_log_files(logs):
        with translate_os_errors(file, "read"):
            open_regular(file).close()


def _print_result(result: Result, *, as_json: bool, has_next: bool) -> None:
    if as_json:
        print(json.dumps(result.to_json()), flush=True)
    else:
        print(format_result(result), end="\n\n" if has_next else "\n", flush=True)
