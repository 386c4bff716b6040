"""What a search tried, as numbers to draw: which knob mattered, what failed, and some trials that stand for all."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tvmconv.knobs import Value
from tvmconv.logs.record import Record
from tvmconv.measuring.outcome import ErrorKind

SHOWN = 300  # trials at most that are drawn, the fastest third of them in any case
FEW = 10  # trials that say nothing of a knob


@dataclass(frozen=True)
class Mattered:
    """How much of what trials differ in a knob explains.

    Attributes:
        knob: its name.
        share: epsilon squared of the logarithms of the times by the knob's values, 0 to 1: what they explain of the
            variance, less what as many values would by chance (Kelley, PNAS 21, 1935).
        values: how many were tried.
    """

    knob: str
    share: float
    values: int


def mattered(records: Sequence[Record]) -> list[Mattered]:
    """What each knob explains, those that explain most first; none of few trials.

    Args:
        records: with times, of one search.
    """
    found = []
    if len(records) < FEW:
        return []
    for knob in records[0].config:
        groups: dict[Value | None, list[float]] = {}
        for record in records:
            groups.setdefault(record.config.get(knob), []).append(math.log2(record.cost))
        if 1 < len(groups) <= len(records) // 2:
            found.append(Mattered(knob, _epsilon_squared(list(groups.values())), len(groups)))
    return sorted(found, key=lambda each: -each.share)


def _epsilon_squared(groups: Sequence[Sequence[float]]) -> float:
    everything = [value for group in groups for value in group]
    total = statistics.pvariance(everything) * len(everything) / (len(everything) - 1)
    within = sum(statistics.pvariance(group) * len(group) for group in groups) / (len(everything) - len(groups))
    return max(0.0, 1 - within / total) if total else 0.0


@dataclass(frozen=True)
class Failed:
    """Trials that failed in one way.

    Attributes:
        kind: such as "compile device".
        count: how many.
        message: of the first of them; "" where it has none.
    """

    kind: str
    count: int
    message: str


def failures(records: Sequence[Record]) -> list[Failed]:
    """What failed, by kind, the most frequent first."""
    bad = [record for record in records if not record.ok]
    counts = Counter(record.error for record in bad)
    first: dict[ErrorKind, str] = {}
    for record in bad:
        first.setdefault(record.error, record.message)
    return [
        Failed(kind.name.lower().replace("_", " ") if kind else "no time", count, first[kind])
        for kind, count in counts.most_common()
    ]


def standing_for_all(records: Sequence[Record], count: int = SHOWN) -> list[Record]:
    """So many of the trials with times, the fastest first: the fastest third, and of the others each so-manieth."""
    ranked = sorted((record for record in records if record.ok), key=lambda record: record.cost)
    if len(ranked) <= count:
        return ranked
    head, tail = ranked[: count // 3], ranked[count // 3 :]
    places = count - len(head)
    return head + [tail[i * len(tail) // places] for i in range(places)]
