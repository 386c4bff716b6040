"""Predicted time of a kernel, from the time of each unit of a multiprocessor and from latency.

The busiest of M multiprocessors executes n = ceil(B / M) blocks of a grid of B blocks. It holds R = min(n, resident
blocks) of them at a time. The times are clocks of this multiprocessor, and all counts are per block (`KernelWork`):

* issue: n × instructions / 4. Each of four schedulers issues one instruction per clock.
* arithmetic: n × floats × 32 / lanes, and integers: n × integers × 32 / 64.
* tensor cores: n × multiplications × 1.6 clocks for 16×8×16.
* shared memory and L1: n × (wavefronts + spills + max(lines, sectors / 4)). Both share one data path of 128 bytes per
  clock, and L1 looks up one line per clock.
* L2: n × sectors / 2, which is 64 bytes per clock and multiprocessor.
* latency: n / R × clocks of one warp alone (`sass.warp_pipeline`), by Little's law; see V. Volkov there.
* memory: bytes divided by the bandwidth, if the arrays do not fit L2 (`memory.footprint`).

The rates and their sources are in `tvmconv.target`.

The units overlap, but not perfectly: the longest time alone is too short, and the sum of all times is too long. The
predicted time is (Σ timeᵖ)^(1/p). Its only fitted constant is p = `OVERLAP_EXPONENT`: 1 means no overlap, and infinity
means full overlap. Each device kernel adds the time of a launch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tvmconv.analysis.kernel_work import KernelWork, count_kernel_work
from tvmconv.errors import KnobError
from tvmconv.kernel import Kernel
from tvmconv.target import (
    CLOCKS_PER_MATRIX_MULTIPLY,
    INTEGER_LANES,
    L1_SECTORS_PER_CLOCK,
    L2_SECTORS_PER_CLOCK,
    SCHEDULERS,
    WARP_SIZE,
    BlockLimits,
    Target,
)

if TYPE_CHECKING:
    from tvmconv.registry import Schedule
    from tvmconv.space.knobs import Value
    from tvmconv.workloads import Workload

OVERLAP_EXPONENT = 2.0  # fitted on four layers: tuning_logs/nvidia-h200/experiments/bounds-direct.md
QUARTILES = (0.86, 1.11)  # measured divided by predicted time, on layers outside the fit: the same file


@dataclass(frozen=True)
class TimeComponent:
    """Time that one unit, or latency, would take alone."""

    name: str  # name of the unit
    seconds: float  # seconds that the unit takes alone, over all device kernels
    added_seconds: float  # part of the predicted time that the unit causes; all parts and the launches sum to that time
    formula: str  # description of how the time is computed


@dataclass(frozen=True)
class PredictedTime:
    """Predicted time of a kernel and its components."""

    seconds: float  # seconds per launch of all device kernels
    components: tuple[TimeComponent, ...]  # components of the time, the largest first

    def get_added_seconds(self, name: str) -> float:
        """Return the seconds that the component called `name` adds to the predicted time."""
        return next(component.added_seconds for component in self.components if component.name == name)

    @property
    def launch_seconds(self) -> float:
        """Seconds of the launches, which are the predicted time without its components."""
        return self.seconds - sum(component.added_seconds for component in self.components)


def predict_kernel_time(kernel: Kernel, device_spec: Target, max_instructions: int | None = None) -> PredictedTime:
    """Predict the time of a kernel."""
    return predict_time(count_kernel_work(kernel, max_instructions), device_spec)


def predict_time(
    kernel_works: Sequence[KernelWork], device_spec: Target, overlap: float = OVERLAP_EXPONENT
) -> PredictedTime:
    """Predict the time of device kernels that run one after the other."""
    total = device_spec.launch_seconds * len(kernel_works)
    separate_seconds, added_seconds = dict.fromkeys(FORMULAS, 0.0), dict.fromkeys(FORMULAS, 0.0)
    for kernel_work in kernel_works:
        unit_seconds = _compute_unit_seconds(kernel_work, device_spec)
        combined_seconds = sum(value**overlap for value in unit_seconds.values()) ** (1 / overlap)
        total += combined_seconds
        for name, value in unit_seconds.items():
            separate_seconds[name] += value
            added_seconds[name] += value * (value / combined_seconds) ** (overlap - 1)  # derivative of the norm
    components = [
        TimeComponent(name, seconds, added_seconds[name], FORMULAS[name]) for name, seconds in separate_seconds.items()
    ]
    components.sort(key=lambda component: (-component.added_seconds, -component.seconds))
    return PredictedTime(total, tuple(components))


FORMULAS = {
    "issue": "instructions of the busiest multiprocessor's blocks, 4 a clock",
    "arithmetic": "float instructions, on the lanes there are",
    "integers": "integer instructions, 64 lanes a clock",
    "tensor cores": "multiplications of matrices, 1.6 clocks each",
    "shared memory and L1": "wavefronts, spills, and lines or sectors of global memory, 128 bytes a clock",
    "L2": "sectors that L1 does not have, 2 a clock",
    "latency": "a warp alone, times the blocks of the busiest multiprocessor over those there at a time",
    "memory": "bytes that L2 does not have, over the bandwidth",
}


def _compute_unit_seconds(kernel_work: KernelWork, device_spec: Target) -> dict[str, float]:
    blocks_per_sm = device_spec.count_blocks_per_sm(kernel_work.blocks)
    l1_clocks = max(kernel_work.lines, kernel_work.l1_sectors / L1_SECTORS_PER_CLOCK)
    clocks = (
        kernel_work.issued / SCHEDULERS,
        kernel_work.floats * WARP_SIZE / device_spec.fp32_lanes,
        kernel_work.integers * WARP_SIZE / INTEGER_LANES,
        kernel_work.matrices * CLOCKS_PER_MATRIX_MULTIPLY,
        kernel_work.wavefronts + kernel_work.spilled + l1_clocks,
        kernel_work.l2_sectors / L2_SECTORS_PER_CLOCK,
        kernel_work.alone / min(kernel_work.resident, blocks_per_sm),
    )
    seconds = [blocks_per_sm * unit_clocks / device_spec.clock_hz for unit_clocks in clocks]
    return dict(zip(FORMULAS, (*seconds, kernel_work.dram_bytes / device_spec.bandwidth), strict=True))


def estimate_schedule_seconds(kernel: Kernel) -> float | None:
    """Return a kernel's seconds by its schedule's own estimate, a formula over the tile sizes, on the GPU of its fit.

    None if the schedule has no estimate, or if it does not cover the kernel's config.
    """
    return estimate_config_seconds(kernel.workload, kernel.schedule, kernel.config, kernel.device.limits)


def estimate_config_seconds(
    workload: Workload, schedule: Schedule, config: Mapping[str, Value] | None, limits: BlockLimits
) -> float | None:
    """Return the same as `estimate_schedule_seconds` for a config that is not built, by default that of defaults."""
    space = schedule.space(workload, limits)
    try:
        usage = space.compute_usage(space.point_from_config(space.default if config is None else config)[None])
    except KnobError:  # the config has a value outside the search space
        return None
    if usage is None or usage.estimate is None or usage.estimate_seconds_per_unit is None:
        return None if config else schedule.estimate_good_config_seconds(workload)
    return float(usage.estimate[0]) * usage.estimate_seconds_per_unit
