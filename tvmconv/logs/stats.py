"""Contents of logs, in numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tvmconv.logs.lines import InvalidLines
from tvmconv.logs.log import read_records
from tvmconv.logs.ranking import index_logs_by_workload, iterate_fastest_first
from tvmconv.logs.record import MIN_SECONDS, ErrorKind, Record
from tvmconv.logs.record_key import RecordKey


@dataclass
class SearchStats:
    """Trials and final timings of one schedule for one workload on one device.

    Attributes:
        error_counts: number of trials that ended in each way; those of `ErrorKind.NONE` were timed.
        best_record: the best record of the schedule, by the rule of `iterate_fastest_first`; None if nothing valid was
            timed.
        num_finals: number of final timings, which are no trials.
        num_timed_trials: those that tell when in the search they came in.
        last_elapsed: of tuning, when the last of them came in.
    """

    error_counts: Counter[ErrorKind] = field(default_factory=Counter)
    best_record: Record | None = None
    num_finals: int = 0
    num_timed_trials: int = 0
    last_elapsed: float = 0.0

    @property
    def num_trials(self) -> int:
        """How many there are."""
        return self.error_counts.total()

    def add_record(self, record: Record) -> None:
        """Count a record; `best_record` is left as it is."""
        if record.final:
            self.num_finals += 1
            return
        self.error_counts[record.error] += 1
        if record.elapsed is not None:
            self.num_timed_trials += 1
            self.last_elapsed = max(self.last_elapsed, record.elapsed)


@dataclass(frozen=True)
class LogStats:
    """The searches of logs, in the order in which they began."""

    searches: dict[RecordKey, SearchStats]

    @classmethod
    def from_logs(cls, invalid_lines_by_log: Mapping[Path, InvalidLines]) -> LogStats:
        """Count the records of logs, and find the best record of each search.

        Args:
            invalid_lines_by_log: the files; their lines that are no records are added to the file's bad lines.

        Raises:
            Error: a log cannot be read.
        """
        searches: dict[RecordKey, SearchStats] = {}
        for path, invalid_lines in invalid_lines_by_log.items():
            for record in read_records(path, invalid_lines):
                searches.setdefault(record.key, SearchStats()).add_record(record)
        for group in index_logs_by_workload({path: InvalidLines() for path in invalid_lines_by_log}).values():
            for key in {key for key, _ in group} & searches.keys():
                schedule_indexes = [
                    (other_key, log_index) for other_key, log_index in group if other_key.schedule == key.schedule
                ]
                searches[key].best_record = next(iterate_fastest_first(schedule_indexes), None)
        return cls(searches)

    @property
    def error_counts(self) -> Counter[ErrorKind]:
        """How many trials ended in each way."""
        return sum((search.error_counts for search in self.searches.values()), Counter())


def trials_per_second(searches: Iterable[SearchStats]) -> float | None:
    """The rate of searches, one after the other; None if the trials do not tell when they came in."""
    search_list = list(searches)
    seconds = sum(search.last_elapsed for search in search_list)
    return sum(search.num_timed_trials for search in search_list) / seconds if seconds >= MIN_SECONDS else None
