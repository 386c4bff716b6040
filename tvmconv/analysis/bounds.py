"""How long each unit of a GPU needs for its part of a kernel: an estimate of its time, and a time that is certain.

A unit of a multiprocessor does the work of the blocks that come to that multiprocessor: of a grid of B blocks on M
multiprocessors, the busiest has the next integer above B / M of them. Arithmetic in float32 is an instruction a lane
and clock, a multiply-add at most ("Arithmetic Instructions" in the CUDA C++ Programming Guide), and tensor cores do
many times that. Shared memory serves a wavefront of 128 bytes a clock ("Shared Memory" there), and L1 moves 4 sectors
of 32 bytes a clock. Memory moves its bytes at the device's bandwidth.

The estimate (`Bound.seconds`) takes all blocks to do what the middle one does. It takes each array to come from memory
once, and again where L2 does not keep it (`footprint`), and a launch to take what the smallest kernel takes.

The certain time (`Bound.at_least`) is a lower bound, which no run of the kernel undercuts:

* It exists for arithmetic, shared memory and L1 only where the machine code was executed. The text of a kernel has
  accesses and operations that the compiler merges or drops.
* Some multiprocessor has at least the next integer above B / M blocks, each of which does no less than the least of the
  middle block and the two at opposite corners of the grid. Some multiprocessor also has the middle block itself.
* Tensor cores and the lanes of float32 work at the same time, so that the longer of the two counts. So do steps that
  begin before the step in front of them has ended.
* Of memory it counts what the arrays have beyond the L2 cache, which may hold the rest from the launch before.
* A launch has none: how long an empty kernel takes differs between drivers and hosts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tvmconv.analysis.asked import asked_by, executed_by
from tvmconv.analysis.counts import counts
from tvmconv.analysis.machine_code.arithmetic import lane_clocks, lane_flops, matrix_flops
from tvmconv.analysis.memory.coalescing import middle_block
from tvmconv.analysis.memory.footprint import dram_bytes
from tvmconv.arithmetic import ceil_div
from tvmconv.errors import AnalysisError, CompileError
from tvmconv.gpu import WARP, fp32_lanes, l2_bytes
from tvmconv.knowledge.features import LAUNCH_SECONDS, TENSOR_CORES, Machine

if TYPE_CHECKING:
    from tvmconv.analysis.emulation.blocks import Block
    from tvmconv.analysis.machine_code.executed.asked import Counts
    from tvmconv.compiler.listing import Instruction
    from tvmconv.compiler.lowered import LoweredStep
    from tvmconv.kernel import Kernel

SECTORS_A_CLOCK = 4  # of L1, a multiprocessor
WAVEFRONTS_A_CLOCK = 1  # of shared memory, a multiprocessor
ARITHMETIC, SHARED, L1, DRAM, LAUNCH = "arithmetic", "shared memory", "L1", "memory", "launch"


@dataclass(frozen=True)
class Bound:
    """How long one unit needs for its part of a kernel.

    Attributes:
        unit: its name.
        amount: what it has to do for the whole kernel, such as "1.2 GFLOP", if all blocks do what the middle one does.
        seconds: an estimate of the time that it needs.
        at_least: seconds that it needs for certain; None where no such time is known.
    """

    unit: str
    amount: str
    seconds: float
    at_least: float | None = None


def bounds(kernel: Kernel, machine: Machine) -> list[Bound]:
    """Return how long each unit needs for a kernel, over all its timed steps, the longest estimate first.

    Args:
        kernel: for an NVIDIA architecture.
        machine: the GPU.

    Raises:
        AnalysisError: what the kernel does cannot be counted, or depends on the data.
    """
    lanes = fp32_lanes(machine.arch) or 128
    clock = machine.flops / (2 * lanes * machine.multiprocessors)
    rate = lanes * TENSOR_CORES.get(kernel.workload.dtype, 1)
    whole, clocks = _Work(0, 0, 0, 0, 0), dict.fromkeys((ARITHMETIC, SHARED, L1), 0.0)
    least: dict[str, float] | None = dict.fromkeys(clocks, 0.0)
    for step in kernel.timed_steps:
        blocks = math.prod(step.launch.grid)
        busiest = ceil_div(blocks, machine.multiprocessors)
        middle = _of_middle_block(kernel, step)
        whole = whole.plus(middle, blocks)
        clocks[ARITHMETIC] += busiest * (middle.lane_clocks / lanes + middle.of_matrices / 2 / rate)
        clocks[SHARED] += busiest * middle.wavefronts / WAVEFRONTS_A_CLOCK
        clocks[L1] += busiest * middle.sectors / SECTORS_A_CLOCK
        own = _least_clocks(kernel, step, middle, busiest, lanes, rate) if least is not None else None
        if own is None or least is None:
            least = None
        elif _overlaps(kernel, step):
            least = {unit: max(least[unit], own[unit]) for unit in least}
        else:
            least = {unit: least[unit] + own[unit] for unit in least}
    memory, launches = dram_bytes(kernel), _launches(kernel)
    beyond_l2 = max(0, kernel.workload.min_bytes - l2_bytes(machine.arch))
    certain = {unit: value / clock for unit, value in (least or {}).items()}
    flops = whole.flops + whole.of_matrices
    units = [
        Bound(ARITHMETIC, f"{flops / 1e9:.3g} GFLOP", clocks[ARITHMETIC] / clock, certain.get(ARITHMETIC)),
        Bound(SHARED, f"{whole.wavefronts / 1e6:.3g} million wavefronts", clocks[SHARED] / clock, certain.get(SHARED)),
        Bound(L1, f"{whole.sectors / 1e6:.3g} million sectors", clocks[L1] / clock, certain.get(L1)),
        Bound(DRAM, f"{memory / 1e6:.3g} MB", memory / machine.bandwidth, beyond_l2 / machine.bandwidth or None),
        Bound(LAUNCH, f"{launches}", LAUNCH_SECONDS * launches),
    ]
    return sorted(units, key=lambda each: -each.seconds)


def text_only(kernel: Kernel) -> str:
    """Return why the text of a kernel was counted in place of its machine code; empty where the machine code was.

    Raises:
        AnalysisError: what the kernel does cannot be counted, or depends on the data.
    """
    return next(filter(None, (asked_by(kernel, step).reason for step in kernel.timed_steps)), "")


def _launches(kernel: Kernel) -> int:
    """How many launches take their time: not of steps that come up while the one before them ends."""
    program = kernel.program
    return 1 + sum(not step.overlaps for step in program.steps[program.prepared + 1 :])


def _overlaps(kernel: Kernel, step: LoweredStep) -> bool:
    """Whether a timed step begins before the timed step in front of it has ended."""
    return step is not kernel.timed_steps[0] and kernel.program.steps[kernel.steps.index(step)].overlaps


@dataclass(frozen=True)
class _Work:
    """What one block, or several, ask of the units.

    Attributes:
        lane_clocks: clocks of all lanes of float32 together.
        flops: multiplications and additions that these are.
        of_matrices: multiplications and additions of tensor cores.
        wavefronts: of shared memory.
        sectors: of global memory.
    """

    lane_clocks: float
    flops: float
    of_matrices: float
    wavefronts: float
    sectors: float

    def plus(self, other: _Work, times: int) -> _Work:
        """Return this work and that of so many blocks."""
        return _Work(
            self.lane_clocks + times * other.lane_clocks,
            self.flops + times * other.flops,
            self.of_matrices + times * other.of_matrices,
            self.wavefronts + times * other.wavefronts,
            self.sectors + times * other.sectors,
        )


def _of_middle_block(kernel: Kernel, step: LoweredStep) -> _Work:
    """What the middle block asks: by its machine code, or by its text where that is not known."""
    asks = asked_by(kernel, step)
    if asks.executed is not None:
        return _of_instructions(asks.executed)
    done = counts(kernel, step).done.flops
    wavefronts = sum(access.wavefronts for access in asks.shared)
    sectors = sum(access.sectors for access in asks.touched)
    if "mma" in step.text:
        return _Work(0, 0, done, wavefronts, sectors)
    return _Work(done / 2, done, 0, wavefronts, sectors)


def _of_instructions(executed: Iterable[tuple[Instruction, Counts]]) -> _Work:
    found = list(executed)
    return _Work(
        lane_clocks=WARP * sum(lane_clocks(instruction) * each.executed for instruction, each in found),
        flops=sum(lane_flops(instruction) * each.executed for instruction, each in found),
        of_matrices=sum(matrix_flops(instruction) * each.executed for instruction, each in found),
        wavefronts=sum(each.wavefronts for _, each in found),
        sectors=sum(each.sectors for _, each in found),
    )


def _least_clocks(
    kernel: Kernel, step: LoweredStep, middle: _Work, busiest: int, lanes: int, rate: int
) -> dict[str, float] | None:
    """Clocks that the units of some multiprocessor need for certain; None where the machine code is not known.

    Args:
        kernel: the kernel.
        step: one of its steps.
        middle: what the middle block of its grid asks.
        busiest: blocks of the multiprocessor that has most.
        lanes: of float32.
        rate: multiply-adds a clock of tensor cores.
    """
    if asked_by(kernel, step).executed is None:
        return None
    works = [middle]
    try:
        works += [_of_instructions(executed_by(kernel, step, block)) for block in _corners(step)]
    except (AnalysisError, CompileError):
        return None

    def clocks(work: _Work) -> dict[str, float]:
        return {
            ARITHMETIC: max(work.lane_clocks / lanes, work.of_matrices / 2 / rate),
            SHARED: work.wavefronts / WAVEFRONTS_A_CLOCK,
            L1: work.sectors / SECTORS_A_CLOCK,
        }

    each = [clocks(work) for work in works]
    return {unit: max(each[0][unit], busiest * min(own[unit] for own in each)) for unit in each[0]}


def _corners(step: LoweredStep) -> list[Block]:
    """The first and the last block of a grid, but for those that are its middle one."""
    x, y, z = step.launch.grid
    corners: dict[Block, None] = dict.fromkeys([(0, 0, 0), (x - 1, y - 1, z - 1)])
    return [block for block in corners if block != middle_block(step)]
