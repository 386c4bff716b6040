"""Statistics of logs: trials, errors and the best record of each search."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tvmconv.logs.lines import InvalidLines
from tvmconv.logs.log import read_records
from tvmconv.logs.ranking import index_logs_by_workload, iterate_fastest_first
from tvmconv.logs.record import MIN_SECONDS, ErrorKind, Record, RecordKey


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
