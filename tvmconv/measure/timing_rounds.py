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

from tvmconv.devices.device import LONG_LAUNCH_SECONDS

NUM_ROUNDS = 3  # of a comparison
MAX_EXTRA_ROUNDS = 3  # further rounds of what does not agree with itself
MAX_DEVIATION = 0.10  # from the median of the rounds, up to which a round agrees with the others

K = TypeVar("K")
T = TypeVar("T")


@dataclass(frozen=True)
class TimingRounds(Generic[T]):
    """Measurements of one kernel or library, one a round.

    Attributes:
        measurements: in the order of the rounds.
        seconds: seconds a launch in each; infinite for one that failed, which is the last.
        is_stable: whether as many rounds as were asked for agree: none of them deviates from the median of all rounds
            by more than `MAX_DEVIATION`. A single round is enough where a launch takes `LONG_LAUNCH_SECONDS`.
    """

    measurements: tuple[T, ...]
    seconds: tuple[float, ...]
    is_stable: bool

    @property
    def agreeing_measurements(self) -> tuple[T, ...]:
        """The measurements that agree; all where too few do, or one failed."""
        if not self.is_stable:
            return self.measurements
        return tuple(self.measurements[number] for number in _find_agreeing_rounds(self.seconds))

    @property
    def median_measurement(self) -> T:
        """The middle one of the measurements that agree: of an even number the faster one of the two."""
        numbers = _find_agreeing_rounds(self.seconds) if self.is_stable else range(len(self.seconds))
        ordered = sorted(numbers, key=lambda number: self.seconds[number])
        return self.measurements[ordered[(len(ordered) - 1) // 2]]


def measure_in_rounds(
    keys: Sequence[K],
    measure: Callable[[Sequence[K]], Sequence[T]],
    get_seconds: Callable[[T], float],
    *,
    num_rounds: int = NUM_ROUNDS,
    max_extra_rounds: int = MAX_EXTRA_ROUNDS,
) -> list[TimingRounds[T]]:
    """Measure several kernels in turn, and again those whose rounds deviate by more than `MAX_DEVIATION`.

    A kernel whose launch takes `LONG_LAUNCH_SECONDS` is measured in a single round.

    Args:
        keys: what is measured.
        measure: measures the keys that it is given, each once, in their order.
        get_seconds: the seconds a launch of a measurement; infinite for a failure, after which a key is measured no
            more.
        num_rounds: how many rounds have to agree.
        max_extra_rounds: how many further rounds there may be, of those keys whose rounds do not agree.

    Returns:
        The rounds of each key, in the order of the keys.
    """
    measurements_by_key: list[list[T]] = [[] for _ in keys]

    def list_seconds(number: int) -> list[float]:
        return [get_seconds(measurement) for measurement in measurements_by_key[number]]

    for _ in range(num_rounds + max_extra_rounds):
        unstable_indices = [
            n
            for n in range(len(keys))
            if not _is_stable(list_seconds(n), num_rounds) and math.inf not in list_seconds(n)
        ]
        for index, measurement in zip(
            unstable_indices, measure([keys[n] for n in unstable_indices]) if unstable_indices else (), strict=True
        ):
            measurements_by_key[index].append(measurement)
    return [
        TimingRounds(tuple(measurements), tuple(list_seconds(n)), _is_stable(list_seconds(n), num_rounds))
        for n, measurements in enumerate(measurements_by_key)
    ]


def _find_agreeing_rounds(seconds: Sequence[float]) -> list[int]:
    """The numbers of the rounds that deviate from the median of all by at most `MAX_DEVIATION`."""
    median = statistics.median(seconds)
    return [
        number for number, round_seconds in enumerate(seconds) if abs(round_seconds - median) <= MAX_DEVIATION * median
    ]


def _is_stable(seconds: Sequence[float], num_rounds: int) -> bool:
    """Whether as many rounds agree as were asked for, or a launch takes too long for another, and none failed."""
    if len(seconds) == 1 and LONG_LAUNCH_SECONDS <= seconds[0] < math.inf:
        return True
    return len(seconds) >= num_rounds and math.inf not in seconds and len(_find_agreeing_rounds(seconds)) >= num_rounds
