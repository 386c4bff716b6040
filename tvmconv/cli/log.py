"""`tvmconv log`: what tuning logs hold; logs merged, and imported from AutoTVM."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tvmconv import workloads
from tvmconv.cli import options
from tvmconv.cli.errors import note
from tvmconv.errors import Error, printable
from tvmconv.knobs import format_value
from tvmconv.logs.best import fastest_first, index_each, log_files, unconfirmed
from tvmconv.logs.lines import BadLines
from tvmconv.logs.merge import import_logs, merge, new_log
from tvmconv.logs.record import ErrorKind, Record
from tvmconv.logs.stats import Stats, Tally, trials_per_second
from tvmconv.reports.tables import NOTHING, Table, significant

FINAL, TRIAL = "final", "trial"  # what the time of a search's best record is


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser("log", help="what tuning logs hold; merge them, import AutoTVM's")
    actions = parser.add_subparsers(metavar="ACTION", required=True)

    best = _add(actions, "best", _best, "the fastest valid records of each workload on each device")
    best.add_argument(
        "--top", metavar="N", type=options.count, default=1, help="how many of each (default: %(default)s)"
    )
    best.add_argument("--workload", metavar="W", help="only of this workload")
    best.add_argument("--device", metavar="D", help='only of the device of this name, such as "NVIDIA H200"')
    best.add_argument("--json", action="store_true", help="print the records as they stand in a log")
    best.add_argument("-o", dest="out", metavar="OUT", type=Path, help="write them to a log, times with five digits")

    stats = _add(actions, "stats", _stats, "how many records, errors and bad lines; the best of each search")
    stats.add_argument("--json", action="store_true", help="print JSON")

    importing = _add(actions, "import", _import, "rewrite AutoTVM's logs as ours, and tell what has no schedule")
    importing.add_argument("-o", dest="out", metavar="OUT", type=Path, required=True, help="the log to write")

    merging = _add(actions, "merge", _merge, "one log of several, each measurement once")
    merging.add_argument("-o", dest="out", metavar="OUT", type=Path, required=True, help="the log to write")


def _add(actions: Any, name: str, run: Any, summary: str) -> Any:
    parser = actions.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    parser.add_argument("files", metavar="FILE", nargs="+", type=Path, help="a log, or a folder of logs (*.jsonl)")
    parser.set_defaults(run=run)
    return parser


def _best(args: argparse.Namespace) -> int:
    workload = None if args.workload is None else workloads.parse(args.workload)
    files = log_files(args.files)
    bad = {file: BadLines() for file in files}
    groups = index_each(bad, workload, args.device).values()
    records = [record for group in groups for record in itertools.islice(fastest_first(group), args.top)]
    _tell_bad(bad)
    if not records:
        asked = f" of {workload}" * (workload is not None) + f" on {args.device}" * (args.device is not None)
        raise Error(f"no valid record{asked} in {_names(files)}")
    if args.out is not None:
        with new_log(args.out, files) as write:
            for record in records:
                write(record.thinned().line().encode())
    elif args.json:
        print("\n".join(record.line() for record in records))
    else:
        print(_best_table(records).text())
    for trial in filter(None, map(unconfirmed, groups)):
        note(_unconfirmed_text(trial))
    return 0


def _unconfirmed_text(trial: Record) -> str:
    time = f"{significant(trial.cost * 1e6)} µs"
    return (
        f"{trial.workload} on {trial.device}: a trial of {trial.schedule} took {time}, less than all final "
        "timings; it counts once tvmconv tune has timed it again"
    )


def _best_table(records: Iterable[Record]) -> Table:
    headers = ("workload", "schedule", "device", "time [µs]", "GFLOP/s", "config")
    rows = [
        [record.workload.text, record.schedule, record.device, *_speed(record), _config(record)] for record in records
    ]
    return Table(headers, rows, left=frozenset({"workload", "schedule", "device", "config"}))


def _speed(record: Record | None) -> tuple[str, str]:
    return (significant(record.cost * 1e6), significant(record.gflops)) if record else (NOTHING, NOTHING)


def _config(record: Record) -> str:
    return " ".join(f"{name}={format_value(value)}" for name, value in record.config.items())


def _stats(args: argparse.Namespace) -> int:
    bad = {file: BadLines() for file in log_files(args.files)}
    stats = Stats.read(bad)
    if args.json:
        print(json.dumps(_stats_json(stats, bad)))
        return 0
    errors = [f"{count:,} {_kind(kind)}" for kind, count in stats.errors.most_common() if kind is not ErrorKind.NONE]
    print(f"records    {stats.errors.total():,}")
    if finals := sum(tally.finals for tally in stats.tallies.values()):
        print(f"finals     {finals:,}")
    print(f"errors     {', '.join(errors) or 'none'}")
    print(f"workloads  {len({subject.workload for subject in stats.tallies}):,}")
    devices = ", ".join(sorted({subject.device for subject in stats.tallies})) or "none"
    print(f"devices    {printable(devices)}")
    print(f"trials/s   {_rate(stats.tallies.values())}")
    for file, lines in bad.items():
        if lines.count:
            print(printable(f"{file}: {lines}"))
    print()
    print(_stats_table(stats).text())
    return 0


def _stats_table(stats: Stats) -> Table:
    headers = ("workload", "schedule", "device", "records", "errors", "trials/s", "best [µs]", "GFLOP/s", "timing")
    rows = []
    for subject, tally in stats.tallies.items():
        failed = tally.trials - tally.errors[ErrorKind.NONE]
        counts = f"{tally.trials:,}", f"{failed:,}", _rate([tally])
        timing = NOTHING if tally.best is None else FINAL if tally.best.final else TRIAL
        rows.append([subject.workload.text, subject.schedule, subject.device, *counts, *_speed(tally.best), timing])
    return Table(headers, rows, left=frozenset({"workload", "schedule", "device", "timing"}))


def _stats_json(stats: Stats, bad: dict[Path, BadLines]) -> dict[str, Any]:
    return {
        "records": stats.errors.total(),
        "finals": sum(tally.finals for tally in stats.tallies.values()),
        "errors": {_kind(kind): count for kind, count in stats.errors.items() if kind is not ErrorKind.NONE},
        "trials_per_second": trials_per_second(stats.tallies.values()),
        "bad_lines": {str(file): {"count": lines.count, "numbers": lines.numbers} for file, lines in bad.items()},
        "searches": [
            {
                "workload": subject.workload.text,
                "schedule": subject.schedule,
                "device": subject.device,
                "records": tally.trials,
                "finals": tally.finals,
                "errors": tally.trials - tally.errors[ErrorKind.NONE],
                "trials_per_second": trials_per_second([tally]),
                "best_seconds": tally.best and tally.best.cost,
                "best_config": tally.best and tally.best.config,
                "best_final": tally.best and tally.best.final,
            }
            for subject, tally in stats.tallies.items()
        ],
    }


def _kind(kind: ErrorKind) -> str:
    return kind.name.lower().replace("_", " ")


def _rate(tallies: Iterable[Tally]) -> str:
    rate = trials_per_second(tallies)
    return NOTHING if rate is None else significant(rate)


def _import(args: argparse.Namespace) -> int:
    bad = BadLines()
    files = log_files(args.files)
    try:
        count = import_logs(files, args.out, bad)
    finally:
        for kind in bad.kinds.values():
            lines = f"{kind.count} line{'s' * (kind.count > 1)}"
            note(f"refused {lines}, the first line {kind.number}: {kind.error}")
    print(f"{printable(str(args.out))}: {count:,} record{'s' * (count != 1)} imported, {bad.count:,} refused")
    return 0


def _merge(args: argparse.Namespace) -> int:
    bad = BadLines()
    count, repeated = merge(log_files(args.files), args.out, bad)
    if bad.count:
        note(f"left out {bad}")
    print(f"{printable(str(args.out))}: {count:,} record{'s' * (count != 1)}, {repeated:,} left out as repeated")
    return 0


def _tell_bad(bad: dict[Path, BadLines]) -> None:
    for file, lines in bad.items():
        if lines.count:
            note(f"{file}: {lines}")


def _names(files: Sequence[Path]) -> str:
    return ", ".join(map(str, files))
