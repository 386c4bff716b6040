"""Predicted time of a kernel, from the time of each unit of a multiprocessor and from latency.

The busiest of M multiprocessors executes n = ceil(B / M) blocks of a grid of B blocks. It holds R = min(n, resident
blocks) of them at a time. The times are clocks of this multiprocessor, and all counts are per block (`KernelWork`):

* issue: n × instructions / 4. Each of four schedulers issues one instruction per clock (CUDA C++ Programming Guide,
  "Hardware Multithreading").
* arithmetic: n × floats × 32 / lanes, and integers: n × integers × 32 / 64 (the guide's "Arithmetic Instructions").
* tensor cores: n × multiplications × 1.6. A multiplication of 16×8×16 takes one clock, and mma.sync reaches 62.9% of
  that on average: Luo et al., see `sass.warp_pipeline`.
* shared memory and L1: n × (wavefronts + spills + max(lines, sectors / 4)). Both share one data path of 128 bytes per
  clock, and L1 looks up one line per clock: Nsight Compute, "Kernel Profiling Guide", L1TEX.
* L2: n × sectors / 2, which is 64 bytes per clock and multiprocessor: NVIDIA A100 whitepaper, "A100 L2 cache".
* latency: n / R × clocks of one warp alone (`sass.warp_pipeline`), by Little's law; see V. Volkov there.
* memory: bytes divided by the bandwidth, if the arrays do not fit L2 (`memory.footprint`).

The units overlap, but not perfectly: the longest time alone is too short, and the sum of all times is too long. The
predicted time is (Σ timeᵖ)^(1/p). Its only fitted constant is p = `OVERLAP_EXPONENT`: 1 means no overlap, and infinity
means full overlap. Each device kernel adds the time of a launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tvmconv.analysis.kernel_work import KernelWork, count_kernel_work
from tvmconv.arithmetic import ceil_div
from tvmconv.cost_model.features import LAUNCH_SECONDS, DeviceSpec
from tvmconv.gpu_specs import WARP_SIZE, get_fp32_lanes

if TYPE_CHECKING:
    from tvmconv.kernel import Kernel

SCHEDULERS, INTEGER_LANES = 4, 64  # per multiprocessor
CLOCKS_PER_MATRIX_MULTIPLY = 1.6  # per multiplication of 16×8×16
L1_SECTORS_PER_CLOCK, L2_SECTORS_PER_CLOCK = 4, 2  # per multiprocessor
OVERLAP_EXPONENT = 2.0  # fitted on four layers: tuning_logs/nvidia-h200/bounds-direct.md
QUARTILES = (0.86, 1.11)  # measured divided by predicted time, on layers outside the fit: the same file


@dataclass(frozen=True)
class TimeComponent:
    """Time that one unit, or latency, would take alone.

    Attributes:
        name: Name of the unit.
        seconds: Seconds that the unit takes alone, over all device kernels.
        added_seconds: Part of the predicted time that the unit causes; all parts and the launches sum to that time.
        formula: Description of how the time is computed.
    """

    name: str
    seconds: float
    added_seconds: float
    formula: str


@dataclass(frozen=True)
class PredictedTime:
    """Predicted time of a kernel and its components.

    Attributes:
        seconds: Seconds per launch of all device kernels.
        components: Components of the time, the largest first.
    """

    seconds: float
    components: tuple[TimeComponent, ...]

    def get_added_seconds(self, name: str) -> float:
        """Return the seconds that the component called `name` adds to the predicted time."""
        return next(component.added_seconds for component in self.components if component.name == name)

    @property
    def launch_seconds(self) -> float:
        """Seconds of the launches, which are the predicted time without its components."""
        return self.seconds - sum(component.added_seconds for component in self.components)


def predict_kernel_time(kernel: Kernel, device_spec: DeviceSpec, max_instructions: int | None = None) -> PredictedTime:
    """Predict the time of a kernel.

    Args:
        kernel: Kernel for an NVIDIA architecture.
        device_spec: Rates of the GPU.
        max_instructions: Maximum number of warp instructions to interpret per block; one million by default.

    Returns:
        The time in seconds and its components.

    Raises:
        AnalysisError: The work cannot be counted, depends on the data, or is done by TMA and wgmma.
        CompileError: The kernel does not compile, or there is no disassembler.
    """
    return predict_time(count_kernel_work(kernel, max_instructions), device_spec)


def predict_time(
    kernel_works: Sequence[KernelWork], device_spec: DeviceSpec, overlap: float = OVERLAP_EXPONENT
) -> PredictedTime:
    """Predict the time of device kernels that run one after the other.

    Args:
        kernel_works: Work of each device kernel.
        device_spec: Rates of the GPU.
        overlap: Exponent p of the module's formula.

    Returns:
        The time in seconds and its components.
    """
    total = LAUNCH_SECONDS * len(kernel_works)
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


def _compute_unit_seconds(kernel_work: KernelWork, device_spec: DeviceSpec) -> dict[str, float]:
    num_fp32_lanes = get_fp32_lanes(device_spec.arch) or 128
    clock_hz = device_spec.flops / (2 * num_fp32_lanes * device_spec.multiprocessors)
    blocks_per_sm = ceil_div(kernel_work.blocks, device_spec.multiprocessors)
    concurrent_blocks = min(kernel_work.resident, blocks_per_sm)
    l1_clocks = max(kernel_work.lines, kernel_work.l1_sectors / L1_SECTORS_PER_CLOCK)
    clocks = (
        kernel_work.issued / SCHEDULERS,
        kernel_work.floats * WARP_SIZE / num_fp32_lanes,
        kernel_work.integers * WARP_SIZE / INTEGER_LANES,
        kernel_work.matrices * CLOCKS_PER_MATRIX_MULTIPLY,
        kernel_work.wavefronts + kernel_work.spilled + l1_clocks,
        kernel_work.l2_sectors / L2_SECTORS_PER_CLOCK,
        kernel_work.alone / concurrent_blocks,
    )
    seconds = [blocks_per_sm * unit_clocks / clock_hz for unit_clocks in clocks]
    return dict(zip(FORMULAS, (*seconds, kernel_work.dram_bytes / device_spec.bandwidth), strict=True))
