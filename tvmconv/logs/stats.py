"""What a log holds, in numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from tvmconv.logs.record import ErrorKind, Record
from tvmconv.logs.subject import Subject


@dataclass
class Search:
    """The records of one schedule for one workload on one device.

    Attributes:
        errors: how many records ended in each way; those of `ErrorKind.NONE` were timed.
        best: the fastest; None if none was timed.
        timed_trials: the records that tell when in the search they came in.
        seconds: of tuning, when the last of them came in.
    """

    errors: Counter[ErrorKind] = field(default_factory=Counter)
    best: Record | None = None
    timed_trials: int = 0
    seconds: float = 0.0

    @property
    def trials(self) -> int:
        """All records."""
        return self.errors.total()

    def add(self, record: Record) -> None:
        """Count a record."""
        self.errors[record.error] += 1
        if record.ok and (self.best is None or record.cost < self.best.cost):
            self.best = record
        if record.elapsed is not None:
            self.timed_trials += 1
            self.seconds = max(self.seconds, record.elapsed)


@dataclass(frozen=True)
class Stats:
    """The searches of logs, in the order in which they began."""

    searches: dict[Subject, Search]

    @classmethod
    def of(cls, records: Iterable[Record]) -> Stats:
        """Count records."""
        searches: dict[Subject, Search] = {}
        for record in records:
            searches.setdefault(record.subject, Search()).add(record)
        return cls(searches)

    @property
    def errors(self) -> Counter[ErrorKind]:
        """How many records ended in each way."""
        return sum((search.errors for search in self.searches.values()), Counter())


def trials_per_second(searches: Iterable[Search]) -> float | None:
    """The rate of searches, one after the other; None if the records do not tell when they came in."""
    found = list(searches)
    seconds = sum(search.seconds for search in found)
    return sum(search.timed_trials for search in found) / seconds if seconds else None
