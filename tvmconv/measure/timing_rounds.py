"""Comparison of times in several rounds, so that a disturbance of one round does not decide the result.

A GPU that lowers its clocks for a moment, or another process that uses its memory, makes a kernel look half as fast.
Consecutive timings of one kernel would all be affected. If all kernels are timed in turn, only one round is affected.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Generic, TypeVar

from tvmconv.devices.device import LONG_LAUNCH_SECONDS, Timing, TurnTimer

NUM_ROUNDS = 3  # rounds of a comparison
MAX_EXTRA_ROUNDS = 3  # further rounds of kernels whose rounds disagree
NUM_TURNS = 6  # of each kernel in a round, if kernels can be timed in turns
NUM_WARM_UP_TURNS, NUM_LATER_WARM_UP_TURNS = 3, 1  # turns before them, which do not count: first round, and others
MAX_DEVIATION = 0.10  # largest relative deviation from the median of the rounds at which a round agrees

K = TypeVar("K")
T = TypeVar("T")


@dataclass(frozen=True)
class TimingRounds(Generic[T]):
    """Measurements of one kernel or library, one per round."""

    measurements: tuple[T, ...]  # measurements in the order of the rounds
    seconds: tuple[float, ...]  # seconds per launch of each round; infinite for a failure, which is the last
    # Whether the required number of rounds agree, which means that they deviate from the median by at most
    # `MAX_DEVIATION`. A single round is sufficient if a launch takes `LONG_LAUNCH_SECONDS`.
    is_stable: bool

    @property
    def agreeing_measurements(self) -> tuple[T, ...]:
        """Measurements that agree, or all if too few agree or one failed."""
        if not self.is_stable:
            return self.measurements
        return tuple(self.measurements[number] for number in _find_agreeing_rounds(self.seconds))

    @property
    def median_measurement(self) -> T:
        """Median of the agreeing measurements; for an even number, the faster one of the middle two."""
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
    """Measure several kernels in turn, and repeat those whose rounds deviate by more than `MAX_DEVIATION`.

    A kernel whose launch takes `LONG_LAUNCH_SECONDS` is measured in a single round.

    `measure`: function that measures each of the given keys once, in order.
    `get_seconds`: function from a measurement to seconds per launch; infinite for a failure, after which the key is not
        measured again.
    `max_extra_rounds`: maximum number of further rounds for keys whose rounds disagree.
    """
    measurements_by_key: list[list[T]] = [[] for _ in keys]

    def list_seconds(number: int) -> list[float]:
        return [get_seconds(measurement) for measurement in measurements_by_key[number]]

    for _ in range(num_rounds + max_extra_rounds):
        times = [list_seconds(n) for n in range(len(keys))]
        unstable = [n for n, row in enumerate(times) if not _is_stable(row, num_rounds) and math.inf not in row]
        if not unstable:
            break
        for n, measurement in zip(unstable, measure([keys[n] for n in unstable]), strict=True):
            measurements_by_key[n].append(measurement)
    return [
        TimingRounds(tuple(measurements), tuple(list_seconds(n)), _is_stable(list_seconds(n), num_rounds))
        for n, measurements in enumerate(measurements_by_key)
    ]


def time_in_turns(
    openers: Iterable[Callable[[], AbstractContextManager[TurnTimer] | None]],
    seconds: float,
    num_warm_up_turns: int = NUM_WARM_UP_TURNS,
) -> list[Timing] | None:
    """Time kernels in short turns, so that all of them have the same clocks; None if some kernel has no such timer.

    A GPU at its power limit changes its clock for some tenths of a second after a kernel that draws much power.

    Args:
        openers: Functions that open the timer of a kernel, or return None if there is none.
        seconds: Time of each kernel in all turns that count.
        num_warm_up_turns: Turns of each kernel before, after which the GPU has the clocks of all kernels in turns.
    """
    with ExitStack() as stack:
        timers: list[TurnTimer] = []
        for opener in openers:
            block = opener()
            if block is None:
                return None
            timers.append(stack.enter_context(block))
        for turn in range(-num_warm_up_turns, NUM_TURNS):
            for timer in timers:
                timer.take_turn(seconds / NUM_TURNS, counts=turn >= 0)
        return [timer.finish() for timer in timers]


def _find_agreeing_rounds(seconds: Sequence[float]) -> list[int]:
    """Return the indices of rounds that deviate from the median by at most `MAX_DEVIATION`."""
    median = statistics.median(seconds)
    return [number for number, value in enumerate(seconds) if abs(value - median) <= MAX_DEVIATION * median]


def _is_stable(seconds: Sequence[float], num_rounds: int) -> bool:
    """Return whether `num_rounds` rounds agree and none failed, or a launch is too long for a second round."""
    if len(seconds) == 1 and LONG_LAUNCH_SECONDS <= seconds[0] < math.inf:
        return True
    return len(seconds) >= num_rounds and math.inf not in seconds and len(_find_agreeing_rounds(seconds)) >= num_rounds
