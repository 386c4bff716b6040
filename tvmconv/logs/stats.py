"""What a log holds, in numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from tvmconv.logs.record import LEAST_SECONDS, ErrorKind, Record
from tvmconv.logs.subject import Subject


@dataclass
class Tally:
    """The trials of one schedule for one workload on one device; last timings are none.

    Attributes:
        errors: how many trials ended in each way; those of `ErrorKind.NONE` were timed.
        best: the fastest trial, or where a log was thinned to them the fastest last timing; None if nothing was timed.
        finals: how many last timings there are beside them.
        timed_trials: those that tell when in the search they came in.
        seconds: of tuning, when the last of them came in.
    """

    errors: Counter[ErrorKind] = field(default_factory=Counter)
    best: Record | None = None
    finals: int = 0
    timed_trials: int = 0
    seconds: float = 0.0

    @property
    def trials(self) -> int:
        """How many there are."""
        return self.errors.total()

    def add(self, record: Record) -> None:
        """Count a record."""
        if record.ok and (self.best is None or (record.final, record.cost) < (self.best.final, self.best.cost)):
            self.best = record
        if record.final:
            self.finals += 1
            return
        self.errors[record.error] += 1
        if record.elapsed is not None:
            self.timed_trials += 1
            self.seconds = max(self.seconds, record.elapsed)


@dataclass(frozen=True)
class Stats:
    """The searches of logs, in the order in which they began."""

    tallies: dict[Subject, Tally]

    @classmethod
    def of(cls, records: Iterable[Record]) -> Stats:
        """Count records."""
        tallies: dict[Subject, Tally] = {}
        for record in records:
            tallies.setdefault(record.subject, Tally()).add(record)
        return cls(tallies)

    @property
    def errors(self) -> Counter[ErrorKind]:
        """How many trials ended in each way."""
        return sum((tally.errors for tally in self.tallies.values()), Counter())


def trials_per_second(tallies: Iterable[Tally]) -> float | None:
    """The rate of searches, one after the other; None if the trials do not tell when they came in."""
    found = list(tallies)
    seconds = sum(tally.seconds for tally in found)
    return sum(tally.timed_trials for tally in found) / seconds if seconds >= LEAST_SECONDS else None
