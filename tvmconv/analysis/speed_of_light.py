"""Time that each unit of a GPU needs for its part of a kernel: an estimate, and a lower bound (NCU's "Speed of Light").

The busiest of M multiprocessors executes ceil(B / M) blocks of a grid of B blocks. A float32 lane executes one
instruction per clock, at most a multiply-add ("Arithmetic Instructions" in the CUDA C++ Programming Guide). Tensor
cores execute `TENSOR_CORE_RATE` times as many operations. Shared memory serves a wavefront of 128 bytes per clock
("Shared Memory" there). L1 moves 4 sectors of 32 bytes per clock. DRAM moves its bytes at the device's bandwidth.

The estimate (`UnitLowerBound.seconds`) assumes that all blocks do the work of the middle block. It counts each array
once for DRAM, and again where L2 does not keep it (`memory.footprint`). A launch takes as long as the smallest kernel.

The lower bound (`UnitLowerBound.min_seconds`) is a time that no run of the kernel can undercut:

* Arithmetic, shared memory and L1 have a bound only if the machine code was interpreted. The TIR has accesses and
  operations that the compiler merges or drops.
* Some multiprocessor executes at least ceil(B / M) blocks. Each does no less than the least of the middle block and the
  blocks at two opposite corners of the grid. Some multiprocessor also executes the middle block itself.
* Tensor cores and float32 lanes work at the same time, so only the longer time counts. The same holds for device
  kernels that start before the previous one ends.
* DRAM counts the bytes of the arrays beyond the size of L2, which may keep the rest from the previous launch.
* A launch has no bound, because the time of an empty kernel differs between drivers and hosts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tvmconv.analysis.block_accesses import count_block_accesses, count_instructions
from tvmconv.analysis.block_counts import count_block
from tvmconv.analysis.memory.coalescing import select_middle_block
from tvmconv.analysis.memory.footprint import count_dram_bytes
from tvmconv.analysis.sass.arithmetic import count_lane_clocks, count_lane_flops, count_matrix_flops
from tvmconv.arithmetic import ceil_div
from tvmconv.cost_model.features import LAUNCH_SECONDS, TENSOR_CORE_RATE, DeviceSpec
from tvmconv.errors import AnalysisError, CompileError
from tvmconv.gpu_specs import WARP_SIZE, get_fp32_lanes, get_l2_bytes

if TYPE_CHECKING:
    from tvmconv.analysis.sass.interpreter.request_counts import InstructionCounts
    from tvmconv.compiler.lowered_module import LoweredKernel
    from tvmconv.compiler.sass_listing import SassInstruction
    from tvmconv.emulator.blocks import BlockIndex
    from tvmconv.kernel import Kernel

L1_SECTORS_PER_CLOCK = 4  # per multiprocessor
WAVEFRONTS_PER_CLOCK = 1  # shared-memory wavefronts per multiprocessor
ARITHMETIC, SHARED, L1, DRAM, LAUNCH = "arithmetic", "shared memory", "L1", "memory", "launch"


@dataclass(frozen=True)
class UnitLowerBound:
    """Time that one unit needs for its part of a kernel.

    Attributes:
        unit: Name of the unit.
        amount: Work of the whole kernel, such as "1.2 GFLOP", if all blocks do the work of the middle block.
        seconds: Estimated time in seconds.
        min_seconds: Lower bound of the time in seconds; None if there is no bound.
    """

    unit: str
    amount: str
    seconds: float
    min_seconds: float | None = None


def compute_unit_times(kernel: Kernel, device_spec: DeviceSpec) -> list[UnitLowerBound]:
    """Return the time that each unit needs for all timed device kernels, the longest estimate first.

    Args:
        kernel: Kernel for an NVIDIA architecture.
        device_spec: Rates of the GPU.

    Returns:
        One entry each for arithmetic, shared memory, L1, DRAM and launches.

    Raises:
        AnalysisError: The work cannot be counted, or it depends on the data.
    """
    num_fp32_lanes = get_fp32_lanes(device_spec.arch) or 128
    clock_hz = device_spec.flops / (2 * num_fp32_lanes * device_spec.multiprocessors)
    tensor_rate = num_fp32_lanes * TENSOR_CORE_RATE.get(kernel.workload.dtype, 1)
    total_work, clocks = _UnitWork(0, 0, 0, 0, 0), dict.fromkeys((ARITHMETIC, SHARED, L1), 0.0)
    min_clocks: dict[str, float] | None = dict.fromkeys(clocks, 0.0)
    for lowered_kernel in kernel.timed_kernels:
        blocks = math.prod(lowered_kernel.launch.grid)
        max_blocks_per_sm = ceil_div(blocks, device_spec.multiprocessors)
        block_work = _count_middle_block(kernel, lowered_kernel)
        total_work = total_work.add_blocks(block_work, blocks)
        arithmetic_clocks = block_work.lane_clocks / num_fp32_lanes + block_work.matrix_flops / 2 / tensor_rate
        clocks[ARITHMETIC] += max_blocks_per_sm * arithmetic_clocks
        clocks[SHARED] += max_blocks_per_sm * block_work.wavefronts / WAVEFRONTS_PER_CLOCK
        clocks[L1] += max_blocks_per_sm * block_work.sectors / L1_SECTORS_PER_CLOCK
        kernel_min_clocks = (
            _compute_min_clocks(kernel, lowered_kernel, block_work, max_blocks_per_sm, num_fp32_lanes, tensor_rate)
            if min_clocks is not None
            else None
        )
        if kernel_min_clocks is None or min_clocks is None:
            min_clocks = None
        elif _uses_pdl(kernel, lowered_kernel):
            min_clocks = {unit: max(min_clocks[unit], kernel_min_clocks[unit]) for unit in min_clocks}
        else:
            min_clocks = {unit: min_clocks[unit] + kernel_min_clocks[unit] for unit in min_clocks}
    dram_total_bytes, launches = count_dram_bytes(kernel), _count_exposed_launches(kernel)
    bytes_beyond_l2 = max(0, kernel.workload.min_bytes - get_l2_bytes(device_spec.arch))
    min_seconds = {unit: value / clock_hz for unit, value in (min_clocks or {}).items()}
    flops = total_work.flops + total_work.matrix_flops
    amounts = {
        ARITHMETIC: f"{flops / 1e9:.3g} GFLOP",
        SHARED: f"{total_work.wavefronts / 1e6:.3g} million wavefronts",
        L1: f"{total_work.sectors / 1e6:.3g} million sectors",
    }
    unit_times = [
        UnitLowerBound(unit, amount, clocks[unit] / clock_hz, min_seconds.get(unit)) for unit, amount in amounts.items()
    ]
    dram_seconds, min_dram_seconds = (nbytes / device_spec.bandwidth for nbytes in (dram_total_bytes, bytes_beyond_l2))
    dram_amount = f"{dram_total_bytes / 1e6:.3g} MB"
    unit_times.append(UnitLowerBound(DRAM, dram_amount, dram_seconds, min_dram_seconds or None))
    unit_times.append(UnitLowerBound(LAUNCH, f"{launches}", LAUNCH_SECONDS * launches))
    return sorted(unit_times, key=lambda unit_time: -unit_time.seconds)


def explain_text_counts(kernel: Kernel) -> str:
    """Return the reason why a kernel's TIR was counted instead of its machine code; empty if the latter was counted.

    Args:
        kernel: Kernel for an NVIDIA architecture.

    Raises:
        AnalysisError: The accesses cannot be counted, or they depend on the data.
    """
    reasons = (count_block_accesses(kernel, lowered_kernel).fallback_reason for lowered_kernel in kernel.timed_kernels)
    return next(filter(None, reasons), "")


def _count_exposed_launches(kernel: Kernel) -> int:
    """Return the number of launches whose time counts; programmatic dependent launches overlap the previous kernel."""
    program = kernel.executable
    return 1 + sum(not compiled.uses_pdl for compiled in program.kernels[program.num_prepack_kernels + 1 :])


def _uses_pdl(kernel: Kernel, lowered_kernel: LoweredKernel) -> bool:
    """Return whether a timed device kernel starts before the previous one ends (programmatic dependent launch)."""
    return (
        lowered_kernel is not kernel.timed_kernels[0]
        and kernel.executable.kernels[kernel.kernels.index(lowered_kernel)].uses_pdl
    )


@dataclass(frozen=True)
class _UnitWork:
    """Work of one or more blocks for each unit.

    Attributes:
        lane_clocks: Clocks of float32 arithmetic, summed over all lanes.
        flops: Number of float32 multiplications and additions.
        matrix_flops: Number of tensor-core multiplications and additions.
        wavefronts: Number of shared-memory wavefronts.
        sectors: Number of global-memory sectors.
    """

    lane_clocks: float
    flops: float
    matrix_flops: float
    wavefronts: float
    sectors: float

    def add_blocks(self, block_work: _UnitWork, num_blocks: int) -> _UnitWork:
        """Return the sum of this work and that of `num_blocks` blocks."""
        return _UnitWork(
            self.lane_clocks + num_blocks * block_work.lane_clocks,
            self.flops + num_blocks * block_work.flops,
            self.matrix_flops + num_blocks * block_work.matrix_flops,
            self.wavefronts + num_blocks * block_work.wavefronts,
            self.sectors + num_blocks * block_work.sectors,
        )


def _count_middle_block(kernel: Kernel, lowered_kernel: LoweredKernel) -> _UnitWork:
    """Return the work of the middle block, from its machine code if that could be interpreted, else from its TIR."""
    access_counts = count_block_accesses(kernel, lowered_kernel)
    if access_counts.instruction_counts is not None:
        return _sum_instructions(access_counts.instruction_counts)
    flops = count_block(kernel, lowered_kernel).traffic.flops
    wavefronts = sum(access.wavefronts for access in access_counts.shared_accesses)
    sectors = sum(access.sectors for access in access_counts.global_accesses)
    if "mma" in lowered_kernel.text:
        return _UnitWork(0, 0, flops, wavefronts, sectors)
    return _UnitWork(flops / 2, flops, 0, wavefronts, sectors)


def _sum_instructions(instruction_counts: Iterable[tuple[SassInstruction, InstructionCounts]]) -> _UnitWork:
    counts_list = list(instruction_counts)
    return _UnitWork(
        lane_clocks=WARP_SIZE
        * sum(count_lane_clocks(instruction) * counts.num_executed for instruction, counts in counts_list),
        flops=sum(count_lane_flops(instruction) * counts.num_executed for instruction, counts in counts_list),
        matrix_flops=sum(count_matrix_flops(instruction) * counts.num_executed for instruction, counts in counts_list),
        wavefronts=sum(counts.num_wavefronts for _, counts in counts_list),
        sectors=sum(counts.num_sectors for _, counts in counts_list),
    )


def _compute_min_clocks(
    kernel: Kernel,
    lowered_kernel: LoweredKernel,
    middle_work: _UnitWork,
    max_blocks_per_sm: int,
    num_fp32_lanes: int,
    tensor_rate: int,
) -> dict[str, float] | None:
    """Return lower bounds of the clocks per unit; None if the machine code could not be interpreted.

    Args:
        kernel: The kernel.
        lowered_kernel: One of the kernel's device kernels.
        middle_work: Work of the middle block of its grid.
        max_blocks_per_sm: Number of blocks of the busiest multiprocessor.
        num_fp32_lanes: Number of float32 lanes per multiprocessor.
        tensor_rate: Tensor-core multiply-adds per clock and multiprocessor.
    """
    if count_block_accesses(kernel, lowered_kernel).instruction_counts is None:
        return None
    block_works = [middle_work]
    try:
        for block in _select_corner_blocks(lowered_kernel):
            block_works.append(_sum_instructions(count_instructions(kernel, lowered_kernel, block)))
    except (AnalysisError, CompileError):
        return None

    def compute_clocks(work: _UnitWork) -> dict[str, float]:
        return {
            ARITHMETIC: max(work.lane_clocks / num_fp32_lanes, work.matrix_flops / 2 / tensor_rate),
            SHARED: work.wavefronts / WAVEFRONTS_PER_CLOCK,
            L1: work.sectors / L1_SECTORS_PER_CLOCK,
        }

    clocks_by_block = [compute_clocks(work) for work in block_works]
    least = {unit: min(clocks[unit] for clocks in clocks_by_block) for unit in clocks_by_block[0]}
    return {unit: max(clocks, max_blocks_per_sm * least[unit]) for unit, clocks in clocks_by_block[0].items()}


def _select_corner_blocks(lowered_kernel: LoweredKernel) -> list[BlockIndex]:
    """Return the first and the last block of a grid without its middle block."""
    x, y, z = lowered_kernel.launch.grid
    corners: dict[BlockIndex, None] = dict.fromkeys([(0, 0, 0), (x - 1, y - 1, z - 1)])
    return [block for block in corners if block != select_middle_block(lowered_kernel)]
