"""Build schedules, verify them against float64, and time them.

Build schedules of a workload, verify them against float64, time them, and print a table. The exit status is 1 if a
schedule failed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from tvmconv import baselines, devices, naive_cost
from tvmconv.cli import options, output
from tvmconv.cli.errors import UsageError, print_note
from tvmconv.cli.kernels import PREDICTED, TUNED
from tvmconv.cli.progress import progress_line
from tvmconv.experiments.preparation import find_omitted_naive
from tvmconv.experiments.results import Result
from tvmconv.experiments.run import run_schedules
from tvmconv.experiments.sweep import Sweep
from tvmconv.files import open_regular
from tvmconv.logs.lines import translate_os_errors
from tvmconv.logs.ranking import list_log_files
from tvmconv.reports.sweep import format_text
from tvmconv.reports.tables import format_result, make_plain_table
from tvmconv.tvm_import import import_tvm

FAILED_STATUS = 1

USAGE = "%(prog)s (WORKLOAD | --suite S) [SCHEDULE ...] [options]"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    text = (
        f"Workload and schedules, such as {options.EXAMPLE_WORKLOAD} vthread (default: all schedules that apply). The "
        "naive schedule always runs, as the reference of speed-ups, unless a launch would take seconds."
    )
    parser.add_argument("words", metavar="WORKLOAD SCHEDULE", nargs="*", help=text)
    options.add_suite_options(parser)
    text = "Log, or folder of logs, whose fastest kernel for the device also runs, as row tuned"
    options.add_option(parser, "--log", "F", text, repeat=True)
    options.add_timing_options(parser)
    options.add_cost_model_option(parser)
    options.add_set_option(parser)
    options.add_verify_option(parser)
    output.add_table_options(parser, json_help="Print one line with a JSON object for each workload.")


def run(args: argparse.Namespace) -> int:
    """Print a table or a line of JSON for each workload, and for a suite a table of all its layers at the end."""
    schedules = args.words
    args.workload = schedules.pop(0) if schedules and args.suite is None else None
    _check_schedule_names(schedules)
    selection = options.parse_selection(args, "run")
    for file in list_log_files(args.log):  # fails before any kernel is measured
        with translate_os_errors(file, "read"):
            open_regular(file).close()
    device = devices.find_device(args.device)
    import_tvm()
    results: list[Result] = []
    formatter = output.make_table_formatter(args)
    for workload in selection.workloads.values():
        with options.report_fallbacks(), progress_line(f"{device.text}: {workload.text}, ") as progress:
            result = run_schedules(
                workload,
                schedules,
                device=device,
                config=dict(args.set),
                log=args.log or None,
                predicted=not schedules,
                progress=progress,
                verify=args.verify,
                **options.timing_kwargs(args),
            )
        if not results:
            options.print_auto_device(args.device, device)
        if not schedules:
            options.print_skipped_schedules(workload, device)
        if omitted_schedule := find_omitted_naive(workload, schedules, device):
            print_note(f"{naive_cost.describe_omission(omitted_schedule, [workload], device)}; name it to run it")
        if args.json:
            print(json.dumps(result.to_json()), flush=True)
        elif not args.csv:
            print("\n" * bool(results) + format_result(result, formatter), flush=True)
        results.append(result)
    if args.csv:
        print(make_plain_table(results).format_csv(), end="")
    elif len(results) > 1 and not args.json:
        counts = [*(selection.counts or {}).values()]
        print(f"\n{format_text(Sweep(selection.name, [*selection.layers], results, '', counts), formatter)}")
    return 0 if all(result.has_all_times for result in results) else FAILED_STATUS


def _check_schedule_names(names: Sequence[str]) -> None:
    """Raise UsageError for names of configs or of baselines in place of schedules."""
    for name in names:
        if name in (TUNED, PREDICTED) or ":" in name:
            hint = f"--log adds the row {TUNED}, and --set changes knobs"
            raise UsageError(f"run takes names of schedules, not {name!r}: {hint}")
        if name in baselines.load_baselines():
            raise UsageError(f"{name} is no schedule but a baseline: write --baseline before each of their names")
