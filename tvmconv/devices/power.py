"""Clock and energy of a device that runs one kernel for some tenths of a second.

A GPU under load lowers its clock to keep within its power. The peak rate of its tensor cores falls with the clock, so a
kernel is compared with the peak at the clock that it leaves. `measure_sustained` samples both while a kernel is timed.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

SAMPLE_SECONDS = 0.005  # pause between two samples
BUSY_FRACTION = 0.8  # of the time of a run that counts, at its end; a warm-up and uploads come before


@dataclass(frozen=True)
class PowerSample:
    """A reading of a device's sensors."""

    at_seconds: float  # time of the reading
    clock_hz: float  # clock of the multiprocessors
    joules: float  # counter of the device's energy, which moves in steps of some hundredths of a second


@dataclass(frozen=True)
class SustainedRun:
    """A kernel that ran long enough to settle the clock."""

    seconds: float  # median time of a launch
    clock_hz: float  # median clock of the multiprocessors
    watts: float | None  # mean power; None if the counter of energy did not move twice

    @property
    def joules(self) -> float | None:
        """Energy of a launch, without the time between two launches."""
        return None if self.watts is None else self.watts * self.seconds


def measure_sustained(
    run: Callable[[float], float], read: Callable[[], PowerSample], seconds: float
) -> SustainedRun | None:
    """Time a kernel for some time, and sample clock and energy meanwhile.

    Args:
        run: Function that times the kernel for about the given seconds, and returns the median of a launch.
        read: Function that reads the sensors.
        seconds: Time of the run.

    Returns:
        The clock, the power and the time; None if there was no sample.
    """
    samples: list[PowerSample] = []
    has_ended = threading.Event()

    def sample() -> None:
        while not has_ended.is_set():
            samples.append(read())
            time.sleep(SAMPLE_SECONDS)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        launch_seconds = run(seconds)
    finally:
        has_ended.set()
        thread.join()
    return summarize_samples(samples, launch_seconds, BUSY_FRACTION * seconds)


def summarize_samples(
    samples: Sequence[PowerSample], launch_seconds: float, busy_seconds: float
) -> SustainedRun | None:
    """Return clock and power of the last `busy_seconds` of samples; None if there are none.

    The power is the energy between two steps of its counter, the first and the last of this time.
    """
    if not samples:
        return None
    busy = [each for each in samples if each.at_seconds >= samples[-1].at_seconds - busy_seconds]
    steps = [after for before, after in itertools.pairwise(samples) if after.joules > before.joules and after in busy]
    clock_hz = float(np.median([each.clock_hz for each in busy]))
    if len(steps) < 2:
        return SustainedRun(launch_seconds, clock_hz, None)
    watts = (steps[-1].joules - steps[0].joules) / (steps[-1].at_seconds - steps[0].at_seconds)
    return SustainedRun(launch_seconds, clock_hz, watts)
