"""How long a kernel takes, predicted from its code: what each unit of a multiprocessor needs, and what latency adds.

Of a grid of B blocks on M multiprocessors the busiest has n, the next integer above B / M, and holds R = min(n, as many
as fit) of them at a time. In clocks of this multiprocessor, with all counts those of a block (`Work`):

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
time is (Σ partᵖ)^(1/p), with the one constant that is fitted, p = `OVERLAP`: of 1 nothing would overlap, of infinity
everything. Each step adds a launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tvmconv.analysis.work import Work, work
from tvmconv.arithmetic import ceil_div
from tvmconv.gpu import WARP, fp32_lanes
from tvmconv.knowledge.features import LAUNCH_SECONDS, Machine

if TYPE_CHECKING:
    from tvmconv.kernel import Kernel

SCHEDULERS, INTEGER_LANES = 4, 64  # of a multiprocessor
MATRIX_CLOCKS = 1.6  # of a multiplication of 16×8×16
L1_SECTORS, L2_SECTORS = 4, 2  # a clock and multiprocessor
OVERLAP = 2.0  # fitted on four layers: tuning_logs/nvidia-h200/bounds-direct.md
QUARTILES = (0.86, 1.11)  # of measured over predicted times, on layers on which nothing was fitted: the same


@dataclass(frozen=True)
class Part:
    """What one unit, or latency, would take by itself.

    Attributes:
        name: of it.
        seconds: by itself, over all steps.
        adds: seconds of the predicted time that are its share: those of all parts and the launches add up to it.
        formula: in words.
    """

    name: str
    seconds: float
    adds: float
    formula: str


@dataclass(frozen=True)
class PredictedTime:
    """A predicted time.

    Attributes:
        seconds: of a launch of all steps.
        parts: what it is made of, the part that adds most to the time first.
    """

    seconds: float
    parts: tuple[Part, ...]

    def share(self, name: str) -> float:
        """The seconds that the part of a name adds."""
        return next(part.adds for part in self.parts if part.name == name)

    @property
    def launches(self) -> float:
        """The seconds of which no part is the cause."""
        return self.seconds - sum(part.adds for part in self.parts)


def predicted_time(kernel: Kernel, machine: Machine, most: int | None = None) -> PredictedTime:
    """Predict how long a kernel takes.

    Args:
        kernel: for an NVIDIA architecture.
        machine: the GPU.
        most: number of instructions of a block that are executed at most; by default a million.

    Raises:
        AnalysisError: what it does cannot be counted, depends on the data, or is done by TMA and wgmma.
        CompileError: the kernel does not compile, or there is no disassembler.
    """
    return predict(work(kernel, most), machine)


def predict(steps: Sequence[Work], machine: Machine, overlap: float = OVERLAP) -> PredictedTime:
    """Predict how long steps take, one after the other.

    Args:
        steps: what each does.
        machine: the GPU.
        overlap: the exponent.
    """
    total = LAUNCH_SECONDS * len(steps)
    alone, shares = dict.fromkeys(FORMULAS, 0.0), dict.fromkeys(FORMULAS, 0.0)
    for step in steps:
        own = _seconds(step, machine)
        together = sum(value**overlap for value in own.values()) ** (1 / overlap)
        total += together
        for name, value in own.items():
            alone[name] += value
            shares[name] += value * (value / together) ** (overlap - 1)  # by which the sum grows with it
    parts = [Part(name, seconds, shares[name], FORMULAS[name]) for name, seconds in alone.items()]
    return PredictedTime(total, tuple(sorted(parts, key=lambda part: (-part.adds, -part.seconds))))


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


def _seconds(step: Work, machine: Machine) -> dict[str, float]:
    lanes = fp32_lanes(machine.arch) or 128
    clock = machine.flops / (2 * lanes * machine.multiprocessors)
    blocks = ceil_div(step.blocks, machine.multiprocessors)
    at_a_time = min(step.resident, blocks)
    clocks = (
        step.issued / SCHEDULERS,
        step.floats * WARP / lanes,
        step.integers * WARP / INTEGER_LANES,
        step.matrices * MATRIX_CLOCKS,
        step.wavefronts + step.spilled + max(step.lines, step.l1_sectors / L1_SECTORS),
        step.l2_sectors / L2_SECTORS,
        step.alone / at_a_time,
    )
    seconds = [blocks * each / clock for each in clocks]
    return dict(zip(FORMULAS, (*seconds, step.dram_bytes / machine.bandwidth), strict=True))
