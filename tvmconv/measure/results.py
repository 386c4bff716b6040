"""What comes of a config: how its measurement ends, what a device tells of its program, what is known in the end."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum

from tvmconv.space import Config
from tvmconv.workloads import Workload

NUM_FINALISTS, NUM_FINAL_ROUNDS = (
    5,
    2,
)  # how many of the fastest are timed once more at the end, and how often each in turn
MAX_EXTRA_FINAL_ROUNDS = 2  # further rounds of those whose rounds do not agree


class ErrorKind(IntEnum):
    """How a measurement ended, under AutoTVM's numbers (`MeasureErrorNo`)."""

    NONE = 0
    INSTANTIATION = 1
    COMPILE_HOST = 2
    COMPILE_DEVICE = 3
    RUNTIME = 4
    WRONG_ANSWER = 5
    BUILD_TIMEOUT = 6
    RUN_TIMEOUT = 7
    UNKNOWN = 8


def compute_cost_seconds(error: ErrorKind, times: Sequence[float]) -> float:
    """Seconds a launch, the median of the repeats; `math.inf` for an error, or where nothing was timed."""
    return statistics.median(times) if error is ErrorKind.NONE and times else math.inf


@dataclass(frozen=True)
class RunnerResult:
    """What came of a program on a device.

    Attributes:
        times: seconds a launch, one number a repeat; empty for an error.
        relative_error: relative L2 error against the float64 reference; None where the kernel did not come to its end.
        error: what went wrong.
        message: of an error, one line.
        phases: milliseconds by phase ("load", "verify", "time").
        seconds: wall time that the device was taken for.
    """

    times: tuple[float, ...] = ()
    relative_error: float | None = None
    error: ErrorKind = ErrorKind.NONE
    message: str = ""
    phases: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0


def merge_results(results: Sequence[RunnerResult]) -> RunnerResult:
    """What came of a program that was measured several times: all times, or the first error."""
    for result in results:
        if result.error is not ErrorKind.NONE:
            return result
    return replace(
        results[-1],
        times=tuple(seconds for result in results for seconds in result.times),
        seconds=sum(result.seconds for result in results),
    )


@dataclass(frozen=True)
class MeasureResult:
    """One config that was measured, or that failed on the way.

    Attributes:
        workload: what was computed.
        schedule: the schedule's name.
        config: values by knob name, as they were proposed.
        device: the device's name, such as "NVIDIA H200".
        target: what the programs are built for, such as "cuda -arch=sm_90" or "opencl".
        runner_result: what came of it; of a config that was not built, why.
        seconds: on the clock to build and to run.
        timestamp: when it ended, in seconds since 1970.
        resources: registers, spills, shared_bytes, threads, blocks, as far as known.
        versions: of the software that made and ran the kernel: tvmconv, tvm, nvrtc …
        is_final: whether it is a last timing, as `Benchmark.time_final` does it.
    """

    workload: Workload
    schedule: str
    config: Config
    device: str
    target: str
    runner_result: RunnerResult
    seconds: float
    timestamp: float
    resources: Mapping[str, int] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    is_final: bool = False

    @property
    def cost(self) -> float:
        """Seconds a launch; `math.inf` for what failed."""
        return compute_cost_seconds(self.runner_result.error, self.runner_result.times)
