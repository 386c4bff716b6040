"""`tvmconv schedules`: the library, one line each; of one schedule for a workload, its description and its knobs."""

from __future__ import annotations

import argparse
import json
from typing import Any

from tvmconv import library, workloads
from tvmconv.cli.options import EXAMPLE
from tvmconv.errors import ScheduleError, log_traceback, reason_of
from tvmconv.knobs import Knob, Split, format_value
from tvmconv.reports.tables import Table
from tvmconv.without_torch import import_tvm
from tvmconv.workloads import Workload

COVERS = "-1 as the first factor: as many as it takes to cover the extent, which the last tile may overhang."


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "schedules",
        help="the library, one line each, or the knobs of one schedule",
        description="List the schedules; for a workload those that apply to it, with the number of their configs. Of "
        "one schedule, print its description, its knobs, their values and their defaults.",
    )
    parser.add_argument("workload", metavar="WORKLOAD", nargs="?", help=f"only those that apply to it: {EXAMPLE}")
    parser.add_argument("schedule", metavar="SCHEDULE", nargs="?", help="describe this one and its knobs")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the schedules, and for a workload how many configs each has; or one schedule's knobs."""
    workload = workloads.parse(args.workload) if args.workload is not None else None
    import_tvm()
    if workload is not None and args.schedule is not None:
        print(_described(workload, library.find(workload, args.schedule), as_json=args.json))
        return 0
    found = [_listed(schedule, workload) for schedule in library.schedules(workload)]
    if args.json:
        print(json.dumps(found))
        return 0
    headers = ("schedule", "configs", "summary") if workload else ("operator", "schedule", "summary")
    rows = [[_cell(entry, header) for header in headers] for entry in found]
    print(Table(headers, rows, left=frozenset(headers) - {"configs"}).text())
    if failures := [f"{entry['schedule']} failed: {entry['failure']}" for entry in found if entry.get("failure")]:
        print("", *failures, sep="\n")
    return 0


def _listed(schedule: library.Schedule, workload: Workload | None) -> dict[str, Any]:
    counted: dict[str, Any] = {}
    if workload:
        try:
            counted = {"configs": schedule.space(workload).size}
        except ScheduleError as error:
            log_traceback(error)
            counted = {"configs": None, "failure": reason_of(error)}
    return {
        "operator": schedule.operator,
        "schedule": schedule.name,
        **counted,
        "kinds": schedule.kinds,
        "since": f"sm_{schedule.since}" if schedule.since else None,
        "only": f"sm_{schedule.only}" if schedule.only else None,
        "summary": schedule.summary,
    }


def _described(workload: Workload, schedule: library.Schedule, *, as_json: bool) -> str:
    """The description of a schedule and its knobs for a workload, as JSON or as text."""
    space = schedule.space(workload)
    if as_json:
        knobs = [_knob_json(name, knob) for name, knob in space.knobs.items()]
        return json.dumps({**_listed(schedule, workload), "doc": schedule.doc, "knobs": knobs})
    headers = ("knob", "default", "options", "values")
    rows = [(name, format_value(knob.default), f"{knob.size:,}", _values(knob)) for name, knob in space.knobs.items()]
    parts = [f"{schedule.name} of {workload.text}: {space.size:,} config{'s' if space.size > 1 else ''}", schedule.doc]
    if rows:
        parts.append(Table(headers, rows, left=frozenset(headers) - {"options"}).text())
    if any(isinstance(knob, Split) for knob in space.knobs.values()):
        parts.append(COVERS)
    if space.conditions:
        parts.append("What the values have to fulfil together, or in a search:")
        parts[-1] += "".join(f"\n  {condition.text}" for condition in space.conditions)
    return "\n\n".join(part for part in parts if part)


def _values(knob: Knob) -> str:
    if isinstance(knob, Split):
        return f"{knob.parts} factors of {knob.extent}, outermost first"
    return ", ".join(map(format_value, knob.options))


def _knob_json(name: str, knob: Knob) -> dict[str, Any]:
    values = {"extent": knob.extent, "parts": knob.parts} if isinstance(knob, Split) else {"values": knob.options}
    return {"knob": name, "default": knob.default, "options": knob.size, **values}


def _cell(entry: dict[str, Any], header: str) -> str:
    if header == "configs":
        return "failed" if entry[header] is None else f"{entry[header]:,}"
    if header == "summary":
        kinds = f"{' and '.join(entry['kinds'])} only" if len(entry["kinds"]) < len(library.KINDS) else None
        since = f"{entry['since']} and later" if entry["since"] else None
        only = f"{entry['only']} only" if entry["only"] else None
        where = ", ".join(filter(None, (kinds, since, only)))
        return f"{entry[header]} ({where})" if where else entry[header]
    return entry[header]
