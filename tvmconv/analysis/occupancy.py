"""Occupancy: how many blocks of a kernel a multiprocessor holds at a time, which limit decides that, and the waves.

The rules are those of NVIDIA's occupancy calculator, cuda_occupancy.h in CUDA 13.0: a block takes whole warps, whose
registers come in multiples of 256 and from one of four partitions; its shared memory comes in multiples of 128 bytes
(256 before compute capability 8.0), with 1 KiB for the system since 8.0. What clusters take away, as they stay within
a group of multiprocessors, is not in these rules: `cuOccupancyMaxActiveClusters` asks the driver for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tvmconv.arithmetic import ceil_div, round_up
from tvmconv.errors import AnalysisError
from tvmconv.gpu import MAX_REGISTERS, MAX_THREADS, REGISTERS, WARP, limits, multiprocessor

if TYPE_CHECKING:
    from tvmconv.compiler.lowered import LoweredStep
    from tvmconv.kernel import Kernel

WARPS, BLOCKS, BY_REGISTERS, SHARED_MEMORY = "warps", "blocks", "registers", "shared memory"


@dataclass(frozen=True)
class Occupancy:
    """How full a multiprocessor is of one kernel.

    Attributes:
        threads: of a block.
        blocks: on a multiprocessor at a time; 0 for a kernel that cannot be launched.
        warps: of these.
        most_warps: that a multiprocessor can hold.
        limits: how many blocks each limit would allow by itself.
    """

    threads: int
    blocks: int
    warps: int
    most_warps: int
    limits: Mapping[str, int]

    @property
    def share(self) -> float:
        """Theoretical occupancy: warps over the most that there can be, 0 to 1."""
        return self.warps / self.most_warps

    @property
    def binding(self) -> list[str]:
        """The limits that decide; several, where they allow equally many blocks."""
        return [name for name, blocks in self.limits.items() if blocks == self.blocks]


@dataclass(frozen=True)
class Waves:
    """How a grid is dealt out to a GPU.

    Attributes:
        blocks: of the grid.
        at_a_time: blocks that the GPU holds at a time.
        multiprocessors: of the GPU.
    """

    blocks: int
    at_a_time: int
    multiprocessors: int

    @property
    def count(self) -> float:
        """Waves: a grid of one and a half takes as long as two full ones, where blocks take equally long."""
        return self.blocks / self.at_a_time

    @property
    def efficiency(self) -> float:
        """The share of the time for which multiprocessors have as many blocks as they can, 0 to 1."""
        return self.count / math.ceil(self.count)

    @property
    def busy(self) -> float:
        """The share of multiprocessors that have a block at all, 0 to 1."""
        return min(1.0, self.blocks / self.multiprocessors)


def occupancy(arch: str, threads: int, registers: int, shared_bytes: int) -> Occupancy:
    """The theoretical occupancy of a kernel.

    Args:
        arch: NVIDIA architecture, such as "sm_90".
        threads: of a block.
        registers: of a thread, as ptxas reports them.
        shared_bytes: of a block, static and dynamic.

    Raises:
        AnalysisError: the architecture is not known.
    """
    there = multiprocessor(arch)
    if there is None:
        raise AnalysisError(f"what a multiprocessor of {arch} holds is not known")
    warps = ceil_div(threads, WARP)
    most_warps = there.threads // WARP
    found = {
        WARPS: most_warps // warps if threads <= MAX_THREADS else 0,
        BLOCKS: there.blocks,
        BY_REGISTERS: _by_registers(warps, registers, there.partitions, there.register_granularity),
    }
    taken = _multiple(shared_bytes + there.reserved_shared_bytes, there.shared_granularity)
    fits = shared_bytes <= limits(arch).all_shared_bytes
    found[SHARED_MEMORY] = (there.shared_bytes // taken if taken else there.blocks) if fits else 0
    blocks = min(found.values())
    return Occupancy(threads, blocks, blocks * warps, most_warps, found)


def _by_registers(warps: int, registers: int, partitions: int, granularity: int) -> int:
    """Blocks for which there are registers; a launch is refused as if each partition took equally many warps."""
    of_a_warp = _multiple(registers * WARP, granularity)
    if registers > MAX_REGISTERS or of_a_warp * _multiple(warps, partitions) > REGISTERS:
        return 0
    if not of_a_warp:
        return REGISTERS
    return REGISTERS // partitions // of_a_warp * partitions // warps


def occupancy_of(kernel: Kernel, step: LoweredStep | None = None) -> Occupancy:
    """The theoretical occupancy of a built kernel's step, by what ptxas reports of it.

    Args:
        kernel: for CUDA.
        step: one of `kernel.steps`; the first by default.

    Raises:
        AnalysisError: the architecture is not known.
        CompileError: the kernel is not for CUDA, or does not compile.
    """
    step = step or kernel.steps[0]
    resources = kernel.cubin.kernels[step.name]
    shared = resources.shared_bytes + step.dynamic_shared_bytes
    return occupancy(str(kernel.device.arch), step.launch.threads, resources.registers, shared)


def waves(found: Occupancy, blocks: int, multiprocessors: int) -> Waves:
    """How a grid of so many blocks is dealt out to the multiprocessors of a GPU.

    Raises:
        AnalysisError: not one block fits.
    """
    if not found.blocks:
        raise AnalysisError(f"not one block fits on a multiprocessor: {', '.join(found.binding)}")
    return Waves(blocks, found.blocks * multiprocessors, multiprocessors)


def _multiple(value: int, of: int) -> int:
    return round_up(value, of)
