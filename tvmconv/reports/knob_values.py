"""What the values of a knob are worth: how close to the fastest kernel of a search its best kernel with each came.

A kernel with another value may be as fast only once the other knobs have followed suit, so that what counts is the best
that a whole search found with a value. A search tries what does well more often than what does not: what a value falls
short by is rather too large than too small.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field

from tvmconv.knobs import Value
from tvmconv.logs.record import Record
from tvmconv.logs.subject import Subject


@dataclass
class Found:
    """What a search found.

    Attributes:
        best: its fastest record.
        newest: its latest one, of those that were timed.
        timed: how many were.
        seconds: of the fastest kernel with each value, by knob; splits, which have too many values, left out.
    """

    best: Record
    newest: Record
    timed: int = 0
    seconds: dict[str, dict[Value, float]] = field(default_factory=dict)

    def add(self, record: Record) -> None:
        """Count a record that was timed."""
        self.timed += 1
        self.best = min(self.best, record, key=lambda each: each.cost)
        self.newest = max(self.newest, record, key=lambda each: each.timestamp)
        for knob, value in record.config.items():
            if not isinstance(value, tuple):
                fastest = self.seconds.setdefault(knob, {})
                fastest[value] = min(record.cost, fastest.get(value, record.cost))


def find_all(records: Iterable[Record]) -> dict[Subject, Found]:
    """What each search found, in the order in which they began; errors and last timings count for nothing."""
    found: dict[Subject, Found] = {}
    for record in records:
        if record.ok and not record.final:
            found.setdefault(record.subject, Found(record, record)).add(record)
    return found


@dataclass(frozen=True)
class Worth:
    """What one value of a knob is worth, over all searches of a schedule that tried it and another.

    Attributes:
        schedule: whose knob it is.
        knob: its name.
        value: the value.
        speed: of the best kernel with the value over that of the best of all; the geometric mean of the searches.
        tried: how many searches there are.
        best: in how many of them the fastest kernel, or one as fast, has the value.
    """

    schedule: str
    knob: str
    value: Value
    speed: float
    tried: int
    best: int


def worths(found: dict[Subject, Found]) -> list[Worth]:
    """What the values of all knobs are worth: schedules and knobs as they were met, values from the best down."""
    speeds: dict[tuple[str, str], dict[Value, list[float]]] = {}
    for subject, search in found.items():
        for knob, seconds in search.seconds.items():
            if len(seconds) > 1:
                values = speeds.setdefault((subject.schedule, knob), {})
                for value, fastest in seconds.items():
                    values.setdefault(value, []).append(search.best.cost / fastest)
    return [
        Worth(schedule, knob, value, statistics.geometric_mean(each), len(each), each.count(1.0))
        for (schedule, knob), values in speeds.items()
        for value, each in sorted(values.items(), key=lambda item: -statistics.geometric_mean(item[1]))
    ]
