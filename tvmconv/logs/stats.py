"""Contents of logs, in numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tvmconv.logs.best import fastest_first, index_each
from tvmconv.logs.lines import BadLines
from tvmconv.logs.log import read
from tvmconv.logs.record import LEAST_SECONDS, ErrorKind, Record
from tvmconv.logs.subject import Subject


@dataclass
class Tally:
    """Trials and final timings of one schedule for one workload on one device.

    Attributes:
        errors: number of trials that ended in each way; those of `ErrorKind.NONE` were timed.
        best: the best record of the schedule, by the rule of `fastest_first`; None if nothing valid was timed.
        finals: number of final timings, which are no trials.
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
        """Count a record; `best` is left as it is."""
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
    def read(cls, logs: Mapping[Path, BadLines]) -> Stats:
        """Count the records of logs, and find the best record of each search.

        Args:
            logs: the files; their lines that are no records are added to the file's bad lines.

        Raises:
            Error: a log cannot be read.
        """
        tallies: dict[Subject, Tally] = {}
        for path, bad in logs.items():
            for record in read(path, bad):
                tallies.setdefault(record.subject, Tally()).add(record)
        for group in index_each({path: BadLines() for path in logs}).values():
            for subject in {subject for subject, _ in group} & tallies.keys():
                own = [(other, each) for other, each in group if other.schedule == subject.schedule]
                tallies[subject].best = next(fastest_first(own), None)
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
