"""Results of measurements, and the times of their phases."""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import IntEnum

from tvmconv.space import Config
from tvmconv.workloads import Workload

NUM_FINALISTS, NUM_FINAL_ROUNDS = 5, 2  # number of fastest candidates in the final timing, and rounds of it
MAX_EXTRA_FINAL_ROUNDS = 2  # further rounds of candidates whose rounds disagree
PHASES = ("apply", "lower", "codegen", "compile", "queue", "load", "verify", "time")


class ErrorKind(IntEnum):
    """Outcome of a measurement, with the numbers of AutoTVM's `MeasureErrorNo`.

    Examples:
        >>> import tvmconv as tc
        >>> tc.ErrorKind(5).text
        'wrong answer'
    """

    NONE = 0
    INSTANTIATION = 1
    COMPILE_HOST = 2
    COMPILE_DEVICE = 3
    RUNTIME = 4
    WRONG_ANSWER = 5
    BUILD_TIMEOUT = 6
    RUN_TIMEOUT = 7
    UNKNOWN = 8

    @property
    def text(self) -> str:
        """Name in lower-case words."""
        return self.name.lower().replace("_", " ")


def compute_cost_seconds(error: ErrorKind, times: Sequence[float]) -> float:
    """Return the median of the repeats in seconds per launch; `math.inf` after an error or without times."""
    return statistics.median(times) if error is ErrorKind.NONE and times else math.inf


@dataclass(frozen=True)
class RunnerResult:
    """Result of an executable on a device."""

    times: tuple[float, ...] = ()  # seconds per launch, one number per repeat; empty after an error
    # Relative L2 error against the float64 reference; None if the kernel did not finish.
    relative_error: float | None = None
    error: ErrorKind = ErrorKind.NONE
    message: str = ""
    phases: Mapping[str, float] = field(default_factory=dict)  # milliseconds by phase ("load", "verify", "time")
    seconds: float = 0.0  # wall time on the device


def merge_results(results: Sequence[RunnerResult]) -> RunnerResult:
    """Merge several results of one executable to a result with all times or the first error."""
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
    """Result of a candidate that was measured or that failed."""

    workload: Workload
    schedule: str
    config: Config  # value of each knob as proposed
    device: str  # name of the device, such as "NVIDIA H200"
    target: str  # target of the build, such as "cuda -arch=sm_90" or "opencl"
    runner_result: RunnerResult  # result on the device, or the error of the build
    seconds: float  # wall time of build and run
    timestamp: float  # end of the measurement in seconds since 1970
    # Known ones of registers, spills, shared_bytes, threads and blocks.
    resources: Mapping[str, int] = field(default_factory=dict)
    # Versions of the software that built and ran the kernel (tvmconv, tvm, nvrtc, ...).
    versions: Mapping[str, str] = field(default_factory=dict)
    is_final: bool = False  # whether it is a final timing by `Benchmark.time_final`

    @property
    def cost(self) -> float:
        """Seconds per launch; `math.inf` after an error."""
        return compute_cost_seconds(self.runner_result.error, self.runner_result.times)


class PhaseTimer:
    """A timer of phases.

    `milliseconds`: duration of every entered phase by name, including failed ones.
    """

    def __init__(self) -> None:
        self.milliseconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block as a phase."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.milliseconds[name] = (time.perf_counter() - start) * 1e3


class PhaseMeans:
    """Mean milliseconds by phase over many trials."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = defaultdict(float)
        self._counts: dict[str, int] = defaultdict(int)

    def add(self, milliseconds: Mapping[str, float]) -> None:
        """Add the phases of one trial."""
        for phase, phase_ms in milliseconds.items():
            self._sums[phase] += phase_ms
            self._counts[phase] += 1

    def compute_means(self) -> dict[str, float]:
        """Return the mean over the trials that reached a phase, by phase in the order of `PHASES`."""
        return {phase: self._sums[phase] / self._counts[phase] for phase in PHASES if self._counts[phase]}
