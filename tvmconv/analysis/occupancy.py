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
from tvmconv.gpu_specs import (
    MAX_REGISTERS_PER_THREAD,
    MAX_THREADS_PER_BLOCK,
    REGISTERS_PER_MULTIPROCESSOR,
    WARP_SIZE,
    get_block_limits,
    get_multiprocessor_spec,
)

if TYPE_CHECKING:
    from tvmconv.compiler.lowered_module import LoweredKernel
    from tvmconv.kernel import Kernel

WARPS, BLOCKS, REGISTERS_LIMIT, SHARED_MEMORY = "warps", "blocks", "registers", "shared memory"


@dataclass(frozen=True)
class Occupancy:
    """How full a multiprocessor is of one kernel.

    Attributes:
        threads_per_block: of a block.
        resident_blocks: on a multiprocessor at a time; 0 for a kernel that cannot be launched.
        resident_warps: of these.
        max_warps: that a multiprocessor can hold.
        block_limits: how many blocks each limit would allow by itself.
    """

    threads_per_block: int
    resident_blocks: int
    resident_warps: int
    max_warps: int
    block_limits: Mapping[str, int]

    @property
    def warp_fraction(self) -> float:
        """Theoretical occupancy: warps over the most that there can be, 0 to 1."""
        return self.resident_warps / self.max_warps

    @property
    def limiting_resources(self) -> list[str]:
        """The limits that decide; several, where they allow equally many blocks."""
        return [name for name, blocks in self.block_limits.items() if blocks == self.resident_blocks]


@dataclass(frozen=True)
class Waves:
    """How a grid is dealt out to a GPU.

    Attributes:
        num_blocks: of the grid.
        max_active_blocks: blocks that the GPU holds at a time.
        num_multiprocessors: of the GPU.
    """

    num_blocks: int
    max_active_blocks: int
    num_multiprocessors: int

    @property
    def num_waves(self) -> float:
        """Waves: a grid of one and a half takes as long as two full ones, where blocks take equally long."""
        return self.num_blocks / self.max_active_blocks

    @property
    def busy_time_fraction(self) -> float:
        """The share of the time for which multiprocessors have as many blocks as they can, 0 to 1."""
        return self.num_waves / math.ceil(self.num_waves)

    @property
    def busy_multiprocessor_fraction(self) -> float:
        """The share of multiprocessors that have a block at all, 0 to 1."""
        return min(1.0, self.num_blocks / self.num_multiprocessors)


def compute_occupancy(arch: str, threads: int, registers: int, shared_bytes: int) -> Occupancy:
    """The theoretical occupancy of a kernel.

    Args:
        arch: NVIDIA architecture, such as "sm_90".
        threads: of a block.
        registers: of a thread, as ptxas reports them.
        shared_bytes: of a block, static and dynamic.

    Raises:
        AnalysisError: the architecture is not known.
    """
    sm = get_multiprocessor_spec(arch)
    if sm is None:
        raise AnalysisError(f"what a multiprocessor of {arch} holds is not known")
    warps = ceil_div(threads, WARP_SIZE)
    max_warps = sm.max_threads // WARP_SIZE
    block_limits = {
        WARPS: max_warps // warps if threads <= MAX_THREADS_PER_BLOCK else 0,
        BLOCKS: sm.max_blocks,
        REGISTERS_LIMIT: _count_blocks_by_registers(warps, registers, sm.partitions, sm.register_granularity),
    }
    allocated_shared_bytes = _round_up(shared_bytes + sm.reserved_shared_bytes, sm.shared_granularity)
    is_within_limit = shared_bytes <= get_block_limits(arch).max_shared_bytes
    block_limits[SHARED_MEMORY] = (
        (sm.shared_bytes // allocated_shared_bytes if allocated_shared_bytes else sm.max_blocks)
        if is_within_limit
        else 0
    )
    blocks = min(block_limits.values())
    return Occupancy(threads, blocks, blocks * warps, max_warps, block_limits)


def _count_blocks_by_registers(warps: int, registers: int, partitions: int, granularity: int) -> int:
    """Blocks for which there are registers; a launch is refused as if each partition took equally many warps."""
    registers_per_warp = _round_up(registers * WARP_SIZE, granularity)
    if (
        registers > MAX_REGISTERS_PER_THREAD
        or registers_per_warp * _round_up(warps, partitions) > REGISTERS_PER_MULTIPROCESSOR
    ):
        return 0
    if not registers_per_warp:
        return REGISTERS_PER_MULTIPROCESSOR
    return REGISTERS_PER_MULTIPROCESSOR // partitions // registers_per_warp * partitions // warps


def compute_kernel_occupancy(kernel: Kernel, lowered_kernel: LoweredKernel | None = None) -> Occupancy:
    """The theoretical occupancy of a built kernel's step, by what ptxas reports of it.

    Args:
        kernel: for CUDA.
        lowered_kernel: one of `kernel.steps`; the first by default.

    Raises:
        AnalysisError: the architecture is not known.
        CompileError: the kernel is not for CUDA, or does not compile.
    """
    lowered_kernel = lowered_kernel or kernel.kernels[0]
    resources = kernel.cubin.kernels[lowered_kernel.name]
    shared_bytes = resources.shared_bytes + lowered_kernel.dynamic_shared_bytes
    return compute_occupancy(
        str(kernel.device.arch), lowered_kernel.launch.threads_per_block, resources.registers, shared_bytes
    )


def compute_waves(kernel_occupancy: Occupancy, blocks: int, multiprocessors: int) -> Waves:
    """How a grid of so many blocks is dealt out to the multiprocessors of a GPU.

    Raises:
        AnalysisError: not one block fits.
    """
    if not kernel_occupancy.resident_blocks:
        raise AnalysisError(f"not one block fits on a multiprocessor: {', '.join(kernel_occupancy.limiting_resources)}")
    return Waves(blocks, kernel_occupancy.resident_blocks * multiprocessors, multiprocessors)


def _round_up(value: int, granularity: int) -> int:
    return round_up(value, granularity)
