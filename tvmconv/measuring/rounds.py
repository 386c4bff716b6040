"""Comparing times: everything in turn, for several rounds, so that what disturbs one round decides nothing.

A GPU that lowers its clocks for a moment, or a neighbour that takes its memory, makes a kernel look half as fast as it
is. Timings that are taken one after another suffer that alone; taken in turn, they suffer it in one round of several.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from tvmconv.devices.base import LONG_LAUNCH_SECONDS

ROUNDS = 3  # of a comparison
MAX_REPEATED = 3  # further rounds of what does not agree with itself
DEVIATION = 0.10  # from the median of the rounds, up to which a round agrees with the others

K = TypeVar("K")
T = TypeVar("T")


@dataclass(frozen=True)
class Rounds(Generic[T]):
    """Measurements of one kernel or library, one a round.

    Attributes:
        measurements: in the order of the rounds.
        seconds: seconds a launch in each; infinite for one that failed, which is the last.
        is_stable: whether as many rounds as were asked for agree: none of them deviates from the median of all rounds
            by more than `DEVIATION`. A single round is enough where a launch takes `LONG_LAUNCH_SECONDS`.
    """

    measurements: tuple[T, ...]
    seconds: tuple[float, ...]
    is_stable: bool

    @property
    def agreeing(self) -> tuple[T, ...]:
        """The measurements that agree; all where too few do, or one failed."""
        if not self.is_stable:
            return self.measurements
        return tuple(self.measurements[number] for number in _agreeing(self.seconds))

    @property
    def median(self) -> T:
        """The middle one of the measurements that agree: of an even number the faster one of the two."""
        numbers = _agreeing(self.seconds) if self.is_stable else range(len(self.seconds))
        ordered = sorted(numbers, key=lambda number: self.seconds[number])
        return self.measurements[ordered[(len(ordered) - 1) // 2]]


def measure_rounds(
    keys: Sequence[K],
    measure: Callable[[Sequence[K]], Sequence[T]],
    seconds: Callable[[T], float],
    *,
    rounds: int = ROUNDS,
    repeated: int = MAX_REPEATED,
) -> list[Rounds[T]]:
    """Measure several kernels in turn, and again those whose rounds deviate by more than `DEVIATION`.

    A kernel whose launch takes `LONG_LAUNCH_SECONDS` is measured in a single round.

    Args:
        keys: what is measured.
        measure: measures the keys that it is given, each once, in their order.
        seconds: the seconds a launch of a measurement; infinite for a failure, after which a key is measured no more.
        rounds: how many rounds have to agree.
        repeated: how many further rounds there may be, of those keys whose rounds do not agree.

    Returns:
        The rounds of each key, in the order of the keys.
    """
    taken: list[list[T]] = [[] for _ in keys]

    def times(number: int) -> list[float]:
        return [seconds(measurement) for measurement in taken[number]]

    for _ in range(rounds + repeated):
        wanted = [n for n in range(len(keys)) if not _is_stable(times(n), rounds) and math.inf not in times(n)]
        for number, measurement in zip(wanted, measure([keys[n] for n in wanted]) if wanted else (), strict=True):
            taken[number].append(measurement)
    return [Rounds(tuple(own), tuple(times(n)), _is_stable(times(n), rounds)) for n, own in enumerate(taken)]


def _agreeing(seconds: Sequence[float]) -> list[int]:
    """The numbers of the rounds that deviate from the median of all by at most `DEVIATION`."""
    middle = statistics.median(seconds)
    return [number for number, one in enumerate(seconds) if abs(one - middle) <= DEVIATION * middle]


def _is_stable(seconds: Sequence[float], rounds: int) -> bool:
    """Whether as many rounds agree as were asked for, or a launch takes too long for another, and none failed."""
    if len(seconds) == 1 and LONG_LAUNCH_SECONDS <= seconds[0] < math.inf:
        return True
    return len(seconds) >= rounds and math.inf not in seconds and len(_agreeing(seconds)) >= rounds
