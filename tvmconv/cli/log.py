"""List the contents of tuning logs, merge logs, import AutoTVM's logs."""

from __future__ import annotations

import argparse
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tvmconv import workloads
from tvmconv.cli import options, output
from tvmconv.cli.errors import print_note
from tvmconv.errors import Error, escape_unprintable
from tvmconv.logs.lines import InvalidLines
from tvmconv.logs.log import read_records
from tvmconv.logs.merge import import_logs, merge_logs, write_new_log
from tvmconv.logs.ranking import find_unconfirmed_trial, index_logs_by_workload, iterate_fastest_first, list_log_files
from tvmconv.logs.record import MIN_SECONDS, ErrorKind, Record, RecordKey
from tvmconv.reports.tables import EMPTY_CELL, Table, format_optional, format_significant
from tvmconv.space import format_value

FINAL, TRIAL = "final", "trial"  # kind of timing of a search's best record


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)

    summary = "print the fastest valid records of each workload on each device"
    best = _add_action(actions, "best", _run_best, summary)
    text = "Number of records for each workload and device"
    options.add_option(best, "--top", "N", text, type=options.parse_count, default=1)
    best.add_argument("--workload", metavar="W", help="Print only records of this workload.")
    best.add_argument("--device", metavar="D", help='Print only records of the device of this name ("NVIDIA H200").')
    output.add_table_options(best, json_help="Print the records as lines of a log.")
    best.add_argument("-o", dest="out", metavar="OUT", type=Path, help="Log to write, with times of five digits.")

    summary = "count records, errors and invalid lines, and print the best of each search"
    stats = _add_action(actions, "stats", _run_stats, summary)
    output.add_table_options(stats)

    summary = "convert AutoTVM's logs, and report the lines that cannot be converted"
    importing = _add_action(actions, "import", _run_import, summary)
    merging = _add_action(actions, "merge", _run_merge, "merge several logs into one, with each measurement once")
    for action in (importing, merging):
        action.add_argument("-o", dest="out", metavar="OUT", type=Path, required=True, help="Log to write.")


def _add_action(actions: Any, name: str, run: Any, summary: str) -> Any:
    parser = actions.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    parser.add_argument("files", metavar="FILE", nargs="+", type=Path, help="Log, or folder of logs (*.jsonl).")
    parser.set_defaults(run=run)
    return parser


def _run_best(args: argparse.Namespace) -> int:
    workload = None if args.workload is None else workloads.parse(args.workload)
    files = list_log_files(args.files)
    invalid_lines = {file: InvalidLines() for file in files}
    groups = index_logs_by_workload(invalid_lines, workload, args.device).values()
    records = [record for group in groups for record in itertools.islice(iterate_fastest_first(group), args.top)]
    for file, lines in invalid_lines.items():
        if lines.count:
            print_note(f"{file}: {lines}")
    if not records:
        restriction = f" of {workload}" * (workload is not None) + f" on {args.device}" * (args.device is not None)
        raise Error(f"no valid record{restriction} in {', '.join(map(str, files))}")
    if args.out is not None:
        with write_new_log(args.out, files) as write:
            for record in records:
                write(record.rounded().line().encode())
    elif args.json:
        print("\n".join(record.line() for record in records))
    elif args.csv:
        print(_make_best_table(records).format_csv(), end="")
    else:
        print(output.format_table(_make_best_table(records), is_wide=args.wide))
    for trial in filter(None, map(find_unconfirmed_trial, groups)):
        print_note(_describe_unconfirmed(trial))
    return 0


def _describe_unconfirmed(trial: Record) -> str:
    time = f"{format_significant(trial.cost * 1e6)} µs"
    return (
        f"{trial.workload} on {trial.device}: a trial of {trial.schedule} took {time}, less than all final "
        "timings; the next tvmconv tune times it again, and only then it counts"
    )


def _make_best_table(records: Iterable[Record]) -> Table:
    headers = ("workload", "schedule", "device", "time [µs]", "GFLOP/s", "config")
    rows = [
        [record.workload.text, record.schedule, record.device, *_format_speed(record), format_config(record)]
        for record in records
    ]
    return Table(headers, rows, frozenset({"workload", "schedule", "device", "config"}), ("device",))


def _format_speed(record: Record | None) -> tuple[str, str]:
    if record is None:
        return EMPTY_CELL, EMPTY_CELL
    return format_significant(record.cost * 1e6), format_significant(record.gflops)


def format_config(record: Record) -> str:
    """Return the knobs of a record as words NAME=VALUE."""
    return " ".join(f"{name}={format_value(value)}" for name, value in record.config.items())


def _run_stats(args: argparse.Namespace) -> int:
    invalid_lines = {file: InvalidLines() for file in list_log_files(args.files)}
    searches = collect_stats(invalid_lines)
    stats = _stats_to_json(searches, invalid_lines)
    if args.json:
        print(json.dumps(stats))
        return 0
    if args.csv:
        print(_make_stats_table(searches).format_csv(), end="")
        return 0
    errors = [f"{count:,} {kind}" for kind, count in stats["errors"].items()]
    devices = ", ".join(sorted({key.device for key in searches})) or "none"
    print(f"records    {stats['records']:,}")
    if stats["finals"]:
        print(f"finals     {stats['finals']:,}")
    print(f"errors     {', '.join(errors) or 'none'}")
    print(f"workloads  {len({key.workload for key in searches}):,}")
    print(f"devices    {escape_unprintable(devices)}")
    print(f"trials/s   {_format_rate(searches.values())}")
    for file, lines in invalid_lines.items():
        if lines.count:
            print(escape_unprintable(f"{file}: {lines}"))
    print(f"\n{output.format_table(_make_stats_table(searches), is_wide=args.wide)}")
    return 0


def _make_stats_table(searches: Mapping[RecordKey, SearchStats]) -> Table:
    headers = ("workload", "schedule", "device", "records", "errors", "trials/s", "best [µs]", "GFLOP/s", "timing")
    rows = []
    for key, search in searches.items():
        num_failed = search.num_trials - search.error_counts[ErrorKind.NONE]
        counts = f"{search.num_trials:,}", f"{num_failed:,}", _format_rate([search])
        timing = EMPTY_CELL if search.best_record is None else FINAL if search.best_record.final else TRIAL
        rows.append([key.workload.text, key.schedule, key.device, *counts, *_format_speed(search.best_record), timing])
    return Table(headers, rows, frozenset({"workload", "schedule", "device", "timing"}), ("device", "trials/s"))


def _stats_to_json(
    searches: Mapping[RecordKey, SearchStats], invalid_lines: dict[Path, InvalidLines]
) -> dict[str, Any]:
    error_counts = count_errors(searches.values())
    return {
        "records": error_counts.total(),
        "finals": sum(search.num_finals for search in searches.values()),
        "errors": {kind.text: n for kind, n in error_counts.most_common() if kind is not ErrorKind.NONE},
        "trials_per_second": trials_per_second(searches.values()),
        "bad_lines": {
            str(file): {"count": lines.count, "numbers": lines.numbers} for file, lines in invalid_lines.items()
        },
        "searches": [
            {
                "workload": key.workload.text,
                "schedule": key.schedule,
                "device": key.device,
                "records": search.num_trials,
                "finals": search.num_finals,
                "errors": search.num_trials - search.error_counts[ErrorKind.NONE],
                "trials_per_second": trials_per_second([search]),
                "best_seconds": search.best_record and search.best_record.cost,
                "best_config": search.best_record and search.best_record.config,
                "best_final": search.best_record and search.best_record.final,
            }
            for key, search in searches.items()
        ],
    }


def _format_rate(searches: Iterable[SearchStats]) -> str:
    return format_optional(trials_per_second(searches))


def _run_import(args: argparse.Namespace) -> int:
    invalid_lines = InvalidLines()
    try:
        count = import_logs(list_log_files(args.files), args.out, invalid_lines)
    finally:
        for kind in invalid_lines.kinds.values():
            lines = f"{kind.count} line{'s' * (kind.count > 1)}"
            print_note(f"refused {lines}, the first line {kind.number}: {kind.error}")
    _print_written(args.out, f"{_count_records(count)} imported, {invalid_lines.count:,} refused")
    return 0


def _run_merge(args: argparse.Namespace) -> int:
    invalid_lines = InvalidLines()
    count, num_repeated = merge_logs(list_log_files(args.files), args.out, invalid_lines)
    if invalid_lines.count:
        print_note(f"left out {invalid_lines}")
    _print_written(args.out, f"{_count_records(count)}, {num_repeated:,} left out as repeated")
    return 0


def _print_written(file: Path, contents: str) -> None:
    print(f"{escape_unprintable(str(file))}: {contents}")


def _count_records(count: int) -> str:
    return f"{count:,} record{'s' * (count != 1)}"


@dataclass
class SearchStats:
    """Trials and final timings of one schedule for one workload on one device."""

    # Number of trials by kind of error; those of `ErrorKind.NONE` succeeded.
    error_counts: Counter[ErrorKind] = field(default_factory=Counter)
    # Best record of the schedule, by the rule of `iterate_fastest_first`; None without a valid record.
    best_record: Record | None = None
    num_finals: int = 0  # number of final timings, which are not trials
    num_timed_trials: int = 0  # number of trials with a value of `elapsed`
    last_elapsed: float = 0.0  # largest value of `elapsed`, in seconds

    @property
    def num_trials(self) -> int:
        """Number of trials."""
        return self.error_counts.total()

    def add_record(self, record: Record) -> None:
        """Count a record; `best_record` does not change."""
        if record.final:
            self.num_finals += 1
            return
        self.error_counts[record.error] += 1
        if record.elapsed is not None:
            self.num_timed_trials += 1
            self.last_elapsed = max(self.last_elapsed, record.elapsed)


def collect_stats(invalid_lines_by_log: Mapping[Path, InvalidLines]) -> dict[RecordKey, SearchStats]:
    """Count the records of logs, in the order of their first records, and find the best record of each search.

    `invalid_lines_by_log`: logs, each with the object that collects its invalid lines.
    """
    searches: dict[RecordKey, SearchStats] = {}
    for path, invalid_lines in invalid_lines_by_log.items():
        for record in read_records(path, invalid_lines):
            searches.setdefault(record.key, SearchStats()).add_record(record)
    for group in index_logs_by_workload({path: InvalidLines() for path in invalid_lines_by_log}).values():
        for key in {key for key, _ in group} & searches.keys():
            same_schedule = [item for item in group if item[0].schedule == key.schedule]
            searches[key].best_record = next(iterate_fastest_first(same_schedule), None)
    return searches


def count_errors(searches: Iterable[SearchStats]) -> Counter[ErrorKind]:
    """Return the number of trials of some searches by kind of error."""
    return sum((search.error_counts for search in searches), Counter())


def trials_per_second(searches: Iterable[SearchStats]) -> float | None:
    """Return the mean rate of consecutive searches in trials per second; None without values of `elapsed`."""
    search_list = list(searches)
    seconds = sum(search.last_elapsed for search in search_list)
    return sum(search.num_timed_trials for search in search_list) / seconds if seconds >= MIN_SECONDS else None
