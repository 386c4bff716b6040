"""Theoretical occupancy of a kernel, the resource that limits it, and the number of waves of its grid.

The rules are those of NVIDIA's occupancy calculator, cuda_occupancy.h in CUDA 13.0. A block takes whole warps. Their
registers are allocated in multiples of 256 from one of four partitions. Shared memory is allocated in multiples of 128
bytes (256 before compute capability 8.0), with 1 KiB for the system since 8.0. The rules leave out clusters, whose
blocks must lie within one group of multiprocessors; the driver's `cuOccupancyMaxActiveClusters` counts those.
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
    """Theoretical occupancy of a multiprocessor by one device kernel.

    Attributes:
        threads_per_block: Number of threads per block.
        resident_blocks: Number of blocks per multiprocessor at a time; 0 if the kernel cannot be launched.
        resident_warps: Number of warps of the resident blocks.
        max_warps: Maximum number of warps per multiprocessor.
        block_limits: Number of blocks that each resource alone allows, by resource.
    """

    threads_per_block: int
    resident_blocks: int
    resident_warps: int
    max_warps: int
    block_limits: Mapping[str, int]

    @property
    def warp_fraction(self) -> float:
        """Resident warps divided by the maximum number of warps, from 0 to 1."""
        return self.resident_warps / self.max_warps

    @property
    def limiting_resources(self) -> list[str]:
        """Names of the resources that allow the fewest blocks."""
        return [name for name, blocks in self.block_limits.items() if blocks == self.resident_blocks]


@dataclass(frozen=True)
class Waves:
    """Distribution of a grid over the multiprocessors of a GPU.

    Attributes:
        num_blocks: Number of blocks of the grid.
        max_active_blocks: Number of blocks that the GPU holds at a time.
        num_multiprocessors: Number of multiprocessors of the GPU.
    """

    num_blocks: int
    max_active_blocks: int
    num_multiprocessors: int

    @property
    def num_waves(self) -> float:
        """Grid divided by resident blocks; 1.5 waves take as long as 2 if all blocks take equally long."""
        return self.num_blocks / self.max_active_blocks

    @property
    def busy_time_fraction(self) -> float:
        """Fraction of the time in which the multiprocessors are full, from 0 to 1, if all blocks take equally long."""
        return self.num_waves / math.ceil(self.num_waves)

    @property
    def busy_multiprocessor_fraction(self) -> float:
        """Fraction of the multiprocessors that execute at least one block, from 0 to 1."""
        return min(1.0, self.num_blocks / self.num_multiprocessors)


def compute_occupancy(arch: str, threads: int, registers: int, shared_bytes: int) -> Occupancy:
    """Compute the theoretical occupancy of a device kernel.

    Args:
        arch: NVIDIA architecture, such as "sm_90".
        threads: Number of threads per block.
        registers: Number of registers per thread, as ptxas reports it.
        shared_bytes: Static and dynamic shared memory per block in bytes.

    Returns:
        The resident blocks and warps with the limit of each resource.

    Raises:
        AnalysisError: The architecture is unknown.

    Example:
        >>> from tvmconv.analysis.occupancy import compute_occupancy
        >>> compute_occupancy("sm_90", threads=256, registers=64, shared_bytes=49152).resident_blocks
        4
    """
    sm = get_multiprocessor_spec(arch)
    if sm is None:
        raise AnalysisError(f"the occupancy of {arch!r} cannot be computed: its multiprocessor's limits are not known")
    warps = ceil_div(threads, WARP_SIZE)
    max_warps = sm.max_threads // WARP_SIZE
    block_limits = {
        WARPS: max_warps // warps if threads <= MAX_THREADS_PER_BLOCK else 0,
        BLOCKS: sm.max_blocks,
        REGISTERS_LIMIT: _count_blocks_by_registers(warps, registers, sm.partitions, sm.register_granularity),
    }
    allocated_shared_bytes = round_up(shared_bytes + sm.reserved_shared_bytes, sm.shared_granularity)
    if shared_bytes > get_block_limits(arch).max_shared_bytes:
        block_limits[SHARED_MEMORY] = 0
    else:
        max_blocks = sm.shared_bytes // allocated_shared_bytes if allocated_shared_bytes else sm.max_blocks
        block_limits[SHARED_MEMORY] = max_blocks
    blocks = min(block_limits.values())
    return Occupancy(threads, blocks, blocks * warps, max_warps, block_limits)


def _count_blocks_by_registers(warps: int, registers: int, partitions: int, granularity: int) -> int:
    """Return the number of blocks whose registers fit; a launch fails unless equally many warps fit each partition."""
    registers_per_warp = round_up(registers * WARP_SIZE, granularity)
    needed_registers = registers_per_warp * round_up(warps, partitions)
    if registers > MAX_REGISTERS_PER_THREAD or needed_registers > REGISTERS_PER_MULTIPROCESSOR:
        return 0
    if not registers_per_warp:
        return REGISTERS_PER_MULTIPROCESSOR
    return REGISTERS_PER_MULTIPROCESSOR // partitions // registers_per_warp * partitions // warps


def compute_kernel_occupancy(kernel: Kernel, lowered_kernel: LoweredKernel | None = None) -> Occupancy:
    """Compute the theoretical occupancy of a device kernel from the resources that ptxas reports.

    Args:
        kernel: Kernel for CUDA.
        lowered_kernel: One of `kernel.kernels`; the first by default.

    Raises:
        AnalysisError: The architecture is unknown.
        CompileError: The kernel is not for CUDA, or it does not compile.
    """
    lowered_kernel = lowered_kernel or kernel.kernels[0]
    resources = kernel.cubin.kernels[lowered_kernel.name]
    shared_bytes = resources.shared_bytes + lowered_kernel.dynamic_shared_bytes
    threads = lowered_kernel.launch.threads_per_block
    return compute_occupancy(str(kernel.device.arch), threads, resources.registers, shared_bytes)


def compute_waves(kernel_occupancy: Occupancy, blocks: int, multiprocessors: int) -> Waves:
    """Compute the waves of a grid of `blocks` blocks on a GPU with `multiprocessors` multiprocessors.

    Args:
        kernel_occupancy: Occupancy of the device kernel.
        blocks: Number of blocks of the grid.
        multiprocessors: Number of multiprocessors of the GPU.

    Raises:
        AnalysisError: Not one block fits on a multiprocessor.
    """
    if not kernel_occupancy.resident_blocks:
        raise AnalysisError(f"not one block fits on a multiprocessor: {', '.join(kernel_occupancy.limiting_resources)}")
    return Waves(blocks, kernel_occupancy.resident_blocks * multiprocessors, multiprocessors)
