"""`tvmconv schedules`: the library, one line each."""

from __future__ import annotations

import argparse
import json
from typing import Any

from tvmconv import library, workloads
from tvmconv.cli.options import EXAMPLE
from tvmconv.reports.tables import Table


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser("schedules", help="the library, one line each")
    parser.add_argument("workload", metavar="WORKLOAD", nargs="?", help=f"only those that apply to it: {EXAMPLE}")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the schedules, and for a workload how many configs each has."""
    workload = workloads.parse(args.workload) if args.workload is not None else None
    found = [
        {
            "operator": schedule.operator,
            "schedule": schedule.name,
            **({"configs": schedule.space(workload).size} if workload else {}),
            "kinds": schedule.kinds,
            "since": f"sm_{schedule.since}" if schedule.since else None,
            "only": f"sm_{schedule.only}" if schedule.only else None,
            "summary": schedule.summary,
        }
        for schedule in library.schedules(workload)
    ]
    if args.json:
        print(json.dumps(found))
        return 0
    headers = ("schedule", "configs", "summary") if workload else ("operator", "schedule", "summary")
    rows = [[_cell(entry, header) for header in headers] for entry in found]
    print(Table(headers, rows, left=frozenset(headers) - {"configs"}).text())
    return 0


def _cell(entry: dict[str, Any], header: str) -> str:
    if header == "configs":
        return f"{entry[header]:,}"
    if header == "summary":
        kinds = f"{' and '.join(entry['kinds'])} only" if len(entry["kinds"]) < len(library.KINDS) else None
        since = f"{entry['since']} and later" if entry["since"] else None
        only = f"{entry['only']} only" if entry["only"] else None
        where = ", ".join(filter(None, (kinds, since, only)))
        return f"{entry[header]} ({where})" if where else entry[header]
    return entry[header]
