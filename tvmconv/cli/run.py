"""`tvmconv run`: build, verify, time; a table."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from tvmconv import devices, naive, workloads
from tvmconv.cli.errors import UsageError, note
from tvmconv.cli.options import (
    EXAMPLE,
    add_knowledge,
    add_set,
    add_suite,
    add_timing,
    add_verify,
    chosen_layers,
    how_to_time,
    refuse_layers_options,
    tell_choice,
    tell_left_out,
    told_fallbacks,
)
from tvmconv.cli.progress import progress_line
from tvmconv.experiments.results import Result
from tvmconv.experiments.run import omitted_naive, run_ladder
from tvmconv.experiments.sweep import Selection, Sweep
from tvmconv.files import open_regular
from tvmconv.logs.best import log_files
from tvmconv.logs.lines import in_one_line
from tvmconv.reports.sweep import text
from tvmconv.reports.tables import result_text
from tvmconv.without_torch import import_tvm
from tvmconv.workloads import Workload

FAILED = 1


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "run",
        help="build schedules, verify them against float64, time them",
        description="Build schedules of a workload, verify them against float64, time them, and print a table. "
        "Exit status 1 says that one of them failed.",
        usage="%(prog)s (WORKLOAD | --suite S) [SCHEDULE ...] [options]",
    )
    parser.add_argument(
        "words",
        metavar="WORKLOAD SCHEDULE",
        nargs="*",
        help=f"such as {EXAMPLE} vthread; without "
        "schedules, all that apply; the first of the list is among them, for the speed-up, unless a "
        "launch of it would take seconds",
    )
    add_suite(parser)
    parser.add_argument(
        "--log",
        metavar="F",
        action="append",
        help="a log, or a folder of logs, whose fastest kernel for the device runs as well, as the row tuned; may be "
        "given several times",
    )
    add_timing(parser)
    add_knowledge(parser)
    add_set(parser)
    add_verify(parser)
    parser.add_argument("--json", action="store_true", help="print a JSON object a workload, in a line of its own")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print a table, or a line of JSON, for each workload; of a suite's layers, one of all of them at the end."""
    selection = None if args.suite is None else chosen_layers(args)
    chosen, schedules = _workloads(args, selection)
    _check_readable(args.log or ())
    device = devices.find(args.device)
    import_tvm()
    results = []
    for number, workload in enumerate(chosen, 1):
        with told_fallbacks(), progress_line(f"{device.text}: {workload.text}, ") as progress:
            result = run_ladder(
                workload,
                schedules,
                device=device,
                config=dict(args.set),
                log=args.log,
                predicted=not schedules,
                progress=progress,
                verify=args.verify,
                **how_to_time(args),
            )
        if number == 1:
            tell_choice(args.device, device)
        if not schedules:
            tell_left_out(workload, device)
        if omitted := omitted_naive(workload, schedules, device):
            note(f"{naive.describe_omission(omitted, [workload], device)}; name it to run it")
        _print(result, as_json=args.json, more=number < len(chosen))
        results.append(result)
    if selection and len(results) > 1 and not args.json:
        counts = [*(selection.counts or {}).values()]
        print(f"\n{text(Sweep(selection.name, [*selection.layers], results, '', counts))}")
    return 0 if all(result.ok for result in results) else FAILED


def _workloads(args: argparse.Namespace, selection: Selection | None) -> tuple[list[Workload], list[str]]:
    """The workloads and the names of schedules that were asked for."""
    if selection:
        return list(selection.workloads.values()), args.words
    if not args.words:
        raise UsageError("expected a workload or --suite; see tvmconv run --help")
    refuse_layers_options(args)
    return [workloads.parse(args.words[0])], args.words[1:]


def _check_readable(logs: Sequence[str]) -> None:
    """Raise Error if a log cannot be read, before anything is measured."""
    for file in log_files(logs):
        with in_one_line(file, "read"):
            open_regular(file).close()


def _print(result: Result, *, as_json: bool, more: bool) -> None:
    if as_json:
        print(json.dumps(result.to_json()), flush=True)
    else:
        print(result_text(result), end="\n\n" if more else "\n", flush=True)
