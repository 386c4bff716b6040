"""Theoretical occupancy of a kernel, the resource that limits it, and the number of waves of its grid.

The rules are those of NVIDIA's occupancy calculator, cuda_occupancy.h in CUDA 13.0. A block takes whole warps. Their
registers are allocated in multiples of 256 from one of four partitions. Shared memory is allocated in multiples of 128
bytes (256 before compute capability 8.0), with 1 KiB for the system since 8.0. The rules leave out clusters, whose
blocks must lie within one group of multiprocessors; the driver's `cuOccupancyMaxActiveClusters` counts those.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tvmconv.arithmetic import ceil_div, round_up
from tvmconv.compiler.lowered_module import LoweredKernel
from tvmconv.errors import AnalysisError
from tvmconv.kernel import Kernel
from tvmconv.target import (
    MAX_REGISTERS_PER_THREAD,
    MAX_THREADS_PER_BLOCK,
    REGISTER_GRANULARITY,
    REGISTERS_PER_MULTIPROCESSOR,
    RESERVED_SHARED_BYTES,
    RESERVED_SHARED_MIN_ARCH,
    SCHEDULERS,
    WARP_SIZE,
    find_architecture,
    get_block_limits,
    parse_arch_number,
)

WARPS, BLOCKS, REGISTERS_LIMIT, SHARED_MEMORY = "warps", "blocks", "registers", "shared memory"


@dataclass(frozen=True)
class Occupancy:
    """Theoretical occupancy of a multiprocessor by one device kernel."""

    threads_per_block: int
    resident_blocks: int  # blocks per multiprocessor at a time; 0 if the kernel cannot be launched
    resident_warps: int  # warps of the resident blocks
    max_warps: int  # maximum number of warps per multiprocessor
    block_limits: Mapping[str, int]  # blocks that each resource alone allows, by resource

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
    """Distribution of a grid over the multiprocessors of a GPU."""

    num_blocks: int  # blocks of the grid
    max_active_blocks: int  # blocks that the GPU holds at a time
    num_multiprocessors: int  # multiprocessors of the GPU

    @property
    def num_waves(self) -> float:
        """Grid divided by resident blocks; 1.5 waves take as long as 2 if all blocks take equally long."""
        return self.num_blocks / self.max_active_blocks

    @property
    def busy_multiprocessor_fraction(self) -> float:
        """Fraction of the multiprocessors that execute at least one block, from 0 to 1."""
        return min(1.0, self.num_blocks / self.num_multiprocessors)


def compute_occupancy(arch: str, threads: int, registers: int, shared_bytes: int) -> Occupancy:
    """Compute the theoretical occupancy of a device kernel."""
    architecture = find_architecture(arch)
    if not architecture.max_threads:
        raise AnalysisError(f"the occupancy of {arch!r} cannot be computed: its multiprocessor's limits are not known")
    warps, max_warps = ceil_div(threads, WARP_SIZE), architecture.max_threads // WARP_SIZE
    block_limits = {
        WARPS: max_warps // warps if threads <= MAX_THREADS_PER_BLOCK else 0,
        BLOCKS: architecture.max_blocks,
        REGISTERS_LIMIT: _count_blocks_by_registers(warps, registers),
        SHARED_MEMORY: 0,
    }
    if shared_bytes <= get_block_limits(arch).max_shared_bytes:
        is_reserved = parse_arch_number(arch) >= RESERVED_SHARED_MIN_ARCH
        reserved_bytes, granularity = (RESERVED_SHARED_BYTES, 128) if is_reserved else (0, 256)
        allocated_bytes = round_up(shared_bytes + reserved_bytes, granularity)
        block_limits[SHARED_MEMORY] = (
            (architecture.shared_kib << 10) // allocated_bytes if allocated_bytes else architecture.max_blocks
        )
    blocks = min(block_limits.values())
    return Occupancy(threads, blocks, blocks * warps, max_warps, block_limits)


def _count_blocks_by_registers(warps: int, registers: int) -> int:
    """Return the number of blocks whose registers fit; a launch fails unless equally many warps fit each partition."""
    registers_per_warp = round_up(registers * WARP_SIZE, REGISTER_GRANULARITY)
    needed_registers = registers_per_warp * round_up(warps, SCHEDULERS)
    if registers > MAX_REGISTERS_PER_THREAD or needed_registers > REGISTERS_PER_MULTIPROCESSOR:
        return 0
    if not registers_per_warp:
        return REGISTERS_PER_MULTIPROCESSOR
    return REGISTERS_PER_MULTIPROCESSOR // SCHEDULERS // registers_per_warp * SCHEDULERS // warps


def compute_kernel_occupancy(kernel: Kernel, lowered_kernel: LoweredKernel | None = None) -> Occupancy:
    """Compute the theoretical occupancy of a device kernel from the resources that ptxas reports."""
    lowered_kernel = lowered_kernel or kernel.kernels[0]
    resources = kernel.cubin.kernels[lowered_kernel.name]
    shared_bytes = resources.shared_bytes + lowered_kernel.dynamic_shared_bytes
    threads = lowered_kernel.launch.threads_per_block
    return compute_occupancy(str(kernel.device.arch), threads, resources.registers, shared_bytes)


def compute_waves(kernel_occupancy: Occupancy, blocks: int, multiprocessors: int) -> Waves:
    """Compute the waves of a grid of `blocks` blocks on a GPU with `multiprocessors` multiprocessors."""
    if not kernel_occupancy.resident_blocks:
        raise AnalysisError(f"not one block fits on a multiprocessor: {', '.join(kernel_occupancy.limiting_resources)}")
    return Waves(blocks, kernel_occupancy.resident_blocks * multiprocessors, multiprocessors)
