"""How long a kernel takes, predicted from its code: what each unit of a multiprocessor needs, and what latency adds.

Of a grid of B blocks on M multiprocessors the busiest has n, the next integer above B / M, and holds R = min(n, as many
as fit) of them at a time. In clocks of this multiprocessor, with all counts those of a block (`KernelWork`):

* issue: n × instructions / 4. Four schedulers issue one a clock each: CUDA C++ Programming Guide, "Hardware
  Multithreading".
* arithmetic: n × floats × 32 / lanes, and integers: n × integers × 32 / 64. The guide's "Arithmetic Instructions".
* tensor cores: n × multiplications × 1.6. One of 16×8×16 a clock, of which mma.sync reaches 62.9% on average: Luo et
  al., see `warp`.
* shared memory and L1: n × (wavefronts + spills + max(lines, sectors / 4)). Both have one path for data, of 128 bytes a
  clock, and L1 looks up a line a clock: Nsight Compute, "Kernel Profiling Guide", L1TEX.
* L2: n × sectors / 2, that is 64 bytes a clock and multiprocessor: NVIDIA A100 whitepaper, "A100 L2 cache".
* latency: n / R × clocks of a warp alone (`warp`): Little's law, see V. Volkov there.
* memory: bytes over the bandwidth, where the arrays do not fit L2 (`footprint`).

The units work at the same time, but not perfectly: the longest part alone is too little, the sum of all too much. The
time is (Σ partᵖ)^(1/p), with the one constant that is fitted, p = `OVERLAP_EXPONENT`: of 1 nothing would overlap, of
infinity everything. Each step adds a launch.
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

SCHEDULERS, INTEGER_LANES = 4, 64  # of a multiprocessor
CLOCKS_PER_MATRIX_MULTIPLY = 1.6  # of a multiplication of 16×8×16
L1_SECTORS_PER_CLOCK, L2_SECTORS_PER_CLOCK = 4, 2  # a clock and multiprocessor
OVERLAP_EXPONENT = 2.0  # fitted on four layers: tuning_logs/nvidia-h200/bounds-direct.md
QUARTILES = (0.86, 1.11)  # of measured over predicted times, on layers on which nothing was fitted: the same


@dataclass(frozen=True)
class TimeComponent:
    """What one unit, or latency, would take by itself.

    Attributes:
        name: of it.
        seconds: by itself, over all steps.
        added_seconds: seconds of the predicted time that are its share: those of all parts and the launches add up to
            it.
        formula: in words.
    """

    name: str
    seconds: float
    added_seconds: float
    formula: str


@dataclass(frozen=True)
class PredictedTime:
    """A predicted time.

    Attributes:
        seconds: of a launch of all steps.
        components: what it is made of, the part that adds most to the time first.
    """

    seconds: float
    components: tuple[TimeComponent, ...]

    def get_added_seconds(self, name: str) -> float:
        """The seconds that the part of a name adds."""
        return next(component.added_seconds for component in self.components if component.name == name)

    @property
    def launch_seconds(self) -> float:
        """The seconds of which no part is the cause."""
        return self.seconds - sum(component.added_seconds for component in self.components)


def predict_kernel_time(kernel: Kernel, device_spec: DeviceSpec, max_instructions: int | None = None) -> PredictedTime:
    """Predict how long a kernel takes.

    Args:
        kernel: for an NVIDIA architecture.
        device_spec: the GPU.
        max_instructions: number of instructions of a block that are executed at most; by default a million.

    Raises:
        AnalysisError: what it does cannot be counted, depends on the data, or is done by TMA and wgmma.
        CompileError: the kernel does not compile, or there is no disassembler.
    """
    return predict_time(count_kernel_work(kernel, max_instructions), device_spec)


def predict_time(
    kernel_works: Sequence[KernelWork], device_spec: DeviceSpec, overlap: float = OVERLAP_EXPONENT
) -> PredictedTime:
    """Predict how long steps take, one after the other.

    Args:
        kernel_works: what each does.
        device_spec: the GPU.
        overlap: the exponent.
    """
    total = LAUNCH_SECONDS * len(kernel_works)
    separate_seconds, added_seconds = dict.fromkeys(FORMULAS, 0.0), dict.fromkeys(FORMULAS, 0.0)
    for kernel_work in kernel_works:
        unit_seconds = _compute_unit_seconds(kernel_work, device_spec)
        combined_seconds = sum(value**overlap for value in unit_seconds.values()) ** (1 / overlap)
        total += combined_seconds
        for name, value in unit_seconds.items():
            separate_seconds[name] += value
            added_seconds[name] += value * (value / combined_seconds) ** (overlap - 1)  # by which the sum grows with it
    components = [
        TimeComponent(name, seconds, added_seconds[name], FORMULAS[name]) for name, seconds in separate_seconds.items()
    ]
    return PredictedTime(
        total, tuple(sorted(components, key=lambda component: (-component.added_seconds, -component.seconds)))
    )


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
    clocks = (
        kernel_work.issued / SCHEDULERS,
        kernel_work.floats * WARP_SIZE / num_fp32_lanes,
        kernel_work.integers * WARP_SIZE / INTEGER_LANES,
        kernel_work.matrices * CLOCKS_PER_MATRIX_MULTIPLY,
        kernel_work.wavefronts
        + kernel_work.spilled
        + max(kernel_work.lines, kernel_work.l1_sectors / L1_SECTORS_PER_CLOCK),
        kernel_work.l2_sectors / L2_SECTORS_PER_CLOCK,
        kernel_work.alone / concurrent_blocks,
    )
    seconds = [blocks_per_sm * unit_clocks / clock_hz for unit_clocks in clocks]
    return dict(zip(FORMULAS, (*seconds, kernel_work.dram_bytes / device_spec.bandwidth), strict=True))
