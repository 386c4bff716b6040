"""`tvmconv run`: build, verify, time; a table."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from tvmconv import devices, workloads
from tvmconv.cli.errors import UsageError
from tvmconv.cli.options import (
    EXAMPLE,
    add_set,
    add_suite,
    add_timing,
    chosen_layers,
    how_to_time,
    refuse_layers_options,
    tell_choice,
    tell_left_out,
    told_fallbacks,
)
from tvmconv.cli.progress import progress_line
from tvmconv.experiments.results import Result
from tvmconv.experiments.run import run_ladder
from tvmconv.logs.best import log_files
from tvmconv.logs.lines import in_one_line
from tvmconv.reports.tables import result_text
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
        "schedules, all that apply; the first of the list is always among them, for the speed-up",
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
    add_set(parser)
    parser.add_argument("--json", action="store_true", help="print a JSON object a workload, in a line of its own")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print a table, or a line of JSON, for each workload."""
    chosen, schedules = _workloads(args)
    _check_readable(args.log or ())
    device = devices.find(args.device)
    ok = True
    for number, workload in enumerate(chosen, 1):
        with told_fallbacks(), progress_line(f"{device.text}: {workload.text}, ") as progress:
            result = run_ladder(
                workload,
                schedules,
                device=device,
                config=dict(args.set),
                log=args.log,
                progress=progress,
                **how_to_time(args),
            )
        if number == 1:
            tell_choice(args.device, device)
        if not schedules:
            tell_left_out(workload, device)
        _print(result, as_json=args.json, more=number < len(chosen))
        ok &= result.ok
    return 0 if ok else FAILED


def _workloads(args: argparse.Namespace) -> tuple[list[Workload], list[str]]:
    """The workloads and the names of schedules that were asked for."""
    if args.suite is not None:
        return list(chosen_layers(args).workloads.values()), args.words
    if not args.words:
        raise UsageError("expected a workload or --suite; see tvmconv run --help")
    refuse_layers_options(args)
    return [workloads.parse(args.words[0])], args.words[1:]


def _check_readable(logs: Sequence[str]) -> None:
    """Raise Error if a log cannot be read, before anything is measured."""
    for file in log_files(logs):
        with in_one_line(file, "read"):
            file.open("rb").close()


def _print(result: Result, *, as_json: bool, more: bool) -> None:
    if as_json:
        print(json.dumps(result.to_json()), flush=True)
    else:
        print(result_text(result), end="\n\n" if more else "\n", flush=True)
