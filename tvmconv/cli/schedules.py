"""List the schedules, or the knobs of one schedule.

List the schedules, or those that apply to a workload with the number of their configs. With a schedule, print its
description, its knobs, their values and their defaults.
"""

from __future__ import annotations

import argparse
import json
import shutil
import textwrap
from itertools import starmap
from typing import Any

from tvmconv import registry, workloads
from tvmconv.cli import output
from tvmconv.cli.options import EXAMPLE_WORKLOAD
from tvmconv.errors import ScheduleError, get_reason, log_traceback
from tvmconv.reports.tables import Table, TableFormatter
from tvmconv.schedule_definition import DEVICE_KINDS
from tvmconv.space import Knob, SplitKnob, format_value
from tvmconv.tvm_import import import_tvm
from tvmconv.workloads import Workload

MIN_WIDTH = 60  # columns of a terminal
COVERING_FACTOR_TEXT = "-1 as the first factor stands for the number of tiles that cover the extent."


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    text = f"Workload to which the listed schedules apply, such as {EXAMPLE_WORKLOAD}."
    parser.add_argument("workload", metavar="WORKLOAD", nargs="?", help=text)
    parser.add_argument("schedule", metavar="SCHEDULE", nargs="?", help="Schedule to describe.")
    output.add_table_options(parser)


def run(args: argparse.Namespace) -> int:
    """Print the schedules, with the number of configs for a workload; or print the knobs of one schedule."""
    workload = workloads.parse(args.workload) if args.workload is not None else None
    import_tvm()
    if workload is not None and args.schedule is not None:
        schedule = registry.find_schedule(workload, args.schedule)
        if args.csv:
            print(make_knobs_table(schedule, workload).format_csv(), end="")
        else:
            formatter = output.make_table_formatter(args)
            print(describe_schedule(workload, schedule, as_json=args.json, formatter=formatter))
        return 0
    entries = [_schedule_to_json(schedule, workload) for schedule in registry.schedules(workload)]
    headers = ("schedule", "configs", "summary") if workload else ("operator", "schedule", "summary")
    rows = [[_format_cell(entry, header) for header in headers] for entry in entries]
    output.print_table(Table(headers, rows, left_aligned=frozenset(headers) - {"configs"}), args, entries)
    if args.json or args.csv:
        return 0
    if failures := [f"{entry['schedule']} failed: {entry['failure']}" for entry in entries if entry.get("failure")]:
        print("", *failures, sep="\n")
    return 0


def _schedule_to_json(schedule: registry.Schedule, workload: Workload | None) -> dict[str, Any]:
    config_count: dict[str, Any] = {}
    if workload:
        try:
            config_count = {"configs": schedule.space(workload).size}
        except ScheduleError as error:
            log_traceback(error)
            config_count = {"configs": None, "failure": get_reason(error)}
    return {
        "operator": schedule.operator,
        "schedule": schedule.name,
        **config_count,
        "kinds": schedule.device_kinds,
        "since": f"sm_{schedule.min_arch}" if schedule.min_arch else None,
        "only": f"sm_{schedule.exact_arch}" if schedule.exact_arch else None,
        "summary": schedule.summary,
    }


def make_knobs_table(schedule: registry.Schedule, workload: Workload) -> Table:
    """Return a table with one row per knob of a schedule."""
    headers = ("knob", "default", "options", "values")
    rows = [
        (name, format_value(knob.default), f"{knob.size:,}", _format_values(knob))
        for name, knob in schedule.space(workload).knobs.items()
    ]
    return Table(headers, rows, left_aligned=frozenset(headers) - {"options"})


def describe_schedule(
    workload: Workload,
    schedule: registry.Schedule,
    *,
    as_json: bool,
    formatter: TableFormatter = Table.format_text,
) -> str:
    """Return the description of a schedule and its knobs for a workload, as JSON or as text; `formatter` returns the
    table of knobs as text.
    """
    space = schedule.space(workload)
    if as_json:
        knobs = [
            {**_knob_to_json(name, knob), "meaning": schedule.describe_knob(name)} for name, knob in space.knobs.items()
        ]
        return json.dumps({**_schedule_to_json(schedule, workload), "doc": schedule.doc, "knobs": knobs})
    parts = [f"{schedule.name} of {workload.text}: {space.size:,} config{'s' if space.size > 1 else ''}", schedule.doc]
    if space.knobs:
        parts.append(formatter(make_knobs_table(schedule, workload)))
    if any(isinstance(knob, SplitKnob) for knob in space.knobs.values()):
        parts.append(COVERING_FACTOR_TEXT)
    if meanings := {name: meaning for name in space.knobs if (meaning := schedule.describe_knob(name))}:
        parts.append("\n".join(["What the knobs mean:", *starmap(_format_meaning, meanings.items())]))
    if space.constraints:
        parts.append("\n  ".join(["Constraints on the values:", *(rule.description for rule in space.constraints)]))
    return "\n\n".join(filter(None, parts))


def _format_meaning(name: str, meaning: str) -> str:
    width = max(shutil.get_terminal_size().columns, MIN_WIDTH)
    return textwrap.fill(f"{name}: {meaning}", width, initial_indent="  ", subsequent_indent="    ")


def _format_values(knob: Knob) -> str:
    if isinstance(knob, SplitKnob):
        return f"{knob.num_factors} factors of {knob.extent}, outermost first"
    return ", ".join(map(format_value, knob.options))


def _knob_to_json(name: str, knob: Knob) -> dict[str, Any]:
    entry = {"knob": name, "default": knob.default, "options": knob.size}
    if isinstance(knob, SplitKnob):
        return {**entry, "extent": knob.extent, "parts": knob.num_factors}
    return {**entry, "values": knob.options}


def _format_cell(entry: dict[str, Any], header: str) -> str:
    if header == "configs":
        return "failed" if entry[header] is None else f"{entry[header]:,}"
    if header == "summary":
        kinds = f"{' and '.join(entry['kinds'])} only" if len(entry["kinds"]) < len(DEVICE_KINDS) else None
        since = f"{entry['since']} and later" if entry["since"] else None
        only = f"{entry['only']} only" if entry["only"] else None
        where = ", ".join(filter(None, (kinds, since, only)))
        return f"{entry[header]} ({where})" if where else entry[header]
    return entry[header]
