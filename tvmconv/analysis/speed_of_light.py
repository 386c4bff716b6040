"""Time that each unit of a GPU needs for its part of a kernel: an estimate, and a lower bound (NCU's "Speed of Light").

The busiest of M multiprocessors executes ceil(B / M) blocks of a grid of B blocks. A float32 lane executes one
instruction per clock, at most a multiply-add. Tensor cores execute `TENSOR_CORE_RATE` times as many operations. Shared
memory serves a wavefront of 128 bytes per clock. L1 moves 4 sectors of 32 bytes per clock. DRAM moves its bytes at the
device's bandwidth. The rates and their sources are in `tvmconv.target`.

The estimate (`UnitLowerBound.seconds`) assumes that all blocks do the work of the middle block. In a gradient with a
stride, the number of taps differs between blocks, so that the mean of some blocks is taken. The estimate counts each
array once for DRAM, and again where L2 does not keep it (`memory.footprint`). A launch takes as long as the smallest
kernel.

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
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from tvmconv.analysis.block_accesses import (
    count_block,
    count_block_accesses,
    count_instructions,
    count_several_blocks,
)
from tvmconv.analysis.memory.footprint import count_dram_bytes
from tvmconv.analysis.sass.instruction_mix import count_lane_clocks, count_lane_flops, count_matrix_flops
from tvmconv.analysis.sass.interpreter.request_counts import InstructionCounts
from tvmconv.analysis.tir.accesses import select_middle_block
from tvmconv.analysis.tir.scopes import has_instructions
from tvmconv.compiler.lowered_module import LoweredKernel
from tvmconv.compiler.sass_listing import SassInstruction
from tvmconv.emulator.threads import BlockIndex
from tvmconv.errors import AnalysisError, CompileError
from tvmconv.kernel import Kernel
from tvmconv.target import L1_SECTORS_PER_CLOCK, TENSOR_CORE_RATE, WARP_SIZE, WAVEFRONTS_PER_CLOCK, Target
from tvmconv.workloads.conv_gradient import InputGradient

NUM_SAMPLED_BLOCKS = 8  # blocks whose mean work is taken where blocks differ
ARITHMETIC, SHARED, L1, DRAM, LAUNCH = "arithmetic", "shared memory", "L1", "memory", "launch"


@dataclass(frozen=True)
class UnitLowerBound:
    """Time that one unit needs for its part of a kernel."""

    unit: str
    amount: str  # work of the whole kernel, such as "1.2 GFLOP", if all blocks do the work of the counted ones
    seconds: float  # estimate
    min_seconds: float | None = None  # None if there is no lower bound


class _BlockWork(NamedTuple):
    lane_clocks: float  # clocks of float32 arithmetic, summed over all lanes
    flops: float  # float32 multiplications and additions
    matrix_flops: float  # tensor-core multiplications and additions
    wavefronts: float  # of shared memory
    sectors: float  # of global memory


def compute_unit_times(kernel: Kernel, device_spec: Target, *, with_bounds: bool = False) -> list[UnitLowerBound]:
    """Return the time that each unit needs for all timed device kernels, the longest estimate first.

    The lower bounds of arithmetic, shared memory and L1 are left out unless they are asked for, because two more blocks
    of each device kernel are interpreted for them.
    """
    flops = wavefronts = sectors = 0.0
    clocks, min_clocks = dict.fromkeys((ARITHMETIC, SHARED, L1), 0.0), dict.fromkeys((ARITHMETIC, SHARED, L1), 0.0)
    has_bound = with_bounds
    count_unit_blocks(kernel, with_bounds=with_bounds)
    for lowered_kernel in kernel.timed_kernels:
        blocks = math.prod(lowered_kernel.launch.grid)
        work = _count_middle_block(kernel, lowered_kernel)
        mean_work = _count_mean_block(kernel, lowered_kernel, work)
        flops += blocks * (mean_work.flops + mean_work.matrix_flops)
        wavefronts += blocks * mean_work.wavefronts
        sectors += blocks * mean_work.sectors
        for unit, value in _compute_clocks(mean_work, kernel, device_spec, sum).items():
            clocks[unit] += device_spec.count_blocks_per_sm(blocks) * value
        kernel_clocks = _compute_min_clocks(kernel, lowered_kernel, work, device_spec) if has_bound else None
        has_bound = kernel_clocks is not None
        is_overlapped = _uses_pdl(kernel, lowered_kernel)
        for unit, value in (kernel_clocks or {}).items():
            min_clocks[unit] = max(min_clocks[unit], value) if is_overlapped else min_clocks[unit] + value
    amounts = {
        ARITHMETIC: f"{flops / 1e9:.3g} GFLOP",
        SHARED: f"{wavefronts / 1e6:.3g} million wavefronts",
        L1: f"{sectors / 1e6:.3g} million sectors",
    }
    hertz = device_spec.clock_hz
    unit_times = [
        UnitLowerBound(unit, amount, clocks[unit] / hertz, min_clocks[unit] / hertz if has_bound else None)
        for unit, amount in amounts.items()
    ]
    dram_bytes, launches = count_dram_bytes(kernel), _count_exposed_launches(kernel)
    bytes_beyond_l2 = max(0, kernel.workload.min_bytes - device_spec.architecture.l2_bytes)
    dram_seconds, min_dram_seconds = (nbytes / device_spec.bandwidth for nbytes in (dram_bytes, bytes_beyond_l2))
    unit_times.append(UnitLowerBound(DRAM, f"{dram_bytes / 1e6:.3g} MB", dram_seconds, min_dram_seconds or None))
    unit_times.append(UnitLowerBound(LAUNCH, f"{launches}", device_spec.launch_seconds * launches))
    return sorted(unit_times, key=lambda unit_time: -unit_time.seconds)


def count_unit_blocks(kernel: Kernel, *, with_bounds: bool) -> None:
    """Interpret the blocks whose counts `compute_unit_times` needs together, which is quicker than one by one."""
    for lowered_kernel in kernel.timed_kernels:
        blocks = [select_middle_block(lowered_kernel)]
        if with_bounds:
            blocks += _select_corner_blocks(lowered_kernel)
        if _is_uneven(kernel, lowered_kernel):
            blocks += _sample_blocks(lowered_kernel)
        count_several_blocks(kernel, lowered_kernel, blocks)


def explain_text_counts(kernel: Kernel) -> str:
    """Return the reason why a kernel's TIR was counted instead of its machine code; empty if the latter was counted."""
    reasons = (count_block_accesses(kernel, lowered_kernel).fallback_reason for lowered_kernel in kernel.timed_kernels)
    return next(filter(None, reasons), "")


def _count_exposed_launches(kernel: Kernel) -> int:
    """Return the number of launches whose time counts; programmatic dependent launches overlap the previous kernel."""
    program = kernel.executable
    return 1 + sum(not compiled.uses_pdl for compiled in program.kernels[program.num_prepack_kernels + 1 :])


def _uses_pdl(kernel: Kernel, lowered_kernel: LoweredKernel) -> bool:
    """Return whether a timed device kernel starts before the previous one ends (programmatic dependent launch)."""
    is_first = lowered_kernel is kernel.timed_kernels[0]
    return not is_first and kernel.executable.kernels[kernel.kernels.index(lowered_kernel)].uses_pdl


def _count_middle_block(kernel: Kernel, lowered_kernel: LoweredKernel) -> _BlockWork:
    """Return the work of the middle block, from its machine code if that could be interpreted, else from its TIR."""
    access_counts = count_block_accesses(kernel, lowered_kernel)
    if access_counts.instruction_counts is not None:
        return _sum_instructions(access_counts.instruction_counts)
    flops = count_block(kernel, lowered_kernel).traffic.flops
    wavefronts = sum(access.wavefronts for access in access_counts.shared_accesses)
    sectors = sum(access.sectors for access in access_counts.global_accesses)
    if "mma" in lowered_kernel.text:
        return _BlockWork(0, 0, flops, wavefronts, sectors)
    return _BlockWork(flops / 2, flops, 0, wavefronts, sectors)


def _count_mean_block(kernel: Kernel, lowered_kernel: LoweredKernel, middle_work: _BlockWork) -> _BlockWork:
    """Return the mean work of some blocks if blocks differ and could be interpreted, else that of the middle block."""
    if not _is_uneven(kernel, lowered_kernel):
        return middle_work
    if count_block_accesses(kernel, lowered_kernel).instruction_counts is None:
        return middle_work
    blocks = _sample_blocks(lowered_kernel)
    try:
        works = [_sum_instructions(count_instructions(kernel, lowered_kernel, block)) for block in blocks]
    except (AnalysisError, CompileError):
        return middle_work
    return _BlockWork(*(sum(values) / len(works) for values in zip(*works, strict=True)))


def _is_uneven(kernel: Kernel, lowered_kernel: LoweredKernel) -> bool:
    """Return whether the blocks of a device kernel do different amounts of work."""
    w = kernel.workload
    # Only kernels on tensor cores have tiles of residue classes; the blocks of others multiply zeros or all classes.
    return isinstance(w, InputGradient) and max(w.stride) > 1 and has_instructions(lowered_kernel.function)


def _sample_blocks(lowered_kernel: LoweredKernel) -> list[BlockIndex]:
    """Return blocks that are spread over the grid."""
    num_x, num_y, num_z = lowered_kernel.launch.grid
    blocks = {
        ((2 * index + 1) * num_x // (2 * NUM_SAMPLED_BLOCKS), index % num_y, index % num_z)
        for index in range(NUM_SAMPLED_BLOCKS)
    }
    return sorted(blocks)


def _select_corner_blocks(lowered_kernel: LoweredKernel) -> list[BlockIndex]:
    """Return the blocks at two opposite corners of the grid."""
    x, y, z = lowered_kernel.launch.grid
    return [(0, 0, 0), (x - 1, y - 1, z - 1)]


def _sum_instructions(instruction_counts: Iterable[tuple[SassInstruction, InstructionCounts]]) -> _BlockWork:
    counts_list = list(instruction_counts)

    def sum_executed(count: Callable[[SassInstruction], int]) -> int:
        return sum(count(instruction) * counts.num_executed for instruction, counts in counts_list)

    return _BlockWork(
        lane_clocks=WARP_SIZE * sum_executed(count_lane_clocks),
        flops=sum_executed(count_lane_flops),
        matrix_flops=sum_executed(count_matrix_flops),
        wavefronts=sum(counts.num_wavefronts for _, counts in counts_list),
        sectors=sum(counts.num_sectors for _, counts in counts_list),
    )


def _compute_clocks(
    work: _BlockWork, kernel: Kernel, device_spec: Target, combine: Callable[[Iterable[float]], float]
) -> dict[str, float]:
    """Return the clocks of each unit, with a function that combines those of float32 lanes and of tensor cores."""
    tensor_macs_per_clock = device_spec.fp32_lanes * TENSOR_CORE_RATE.get(kernel.workload.dtype, 1)
    return {
        ARITHMETIC: combine([work.lane_clocks / device_spec.fp32_lanes, work.matrix_flops / 2 / tensor_macs_per_clock]),
        SHARED: work.wavefronts / WAVEFRONTS_PER_CLOCK,
        L1: work.sectors / L1_SECTORS_PER_CLOCK,
    }


def _compute_min_clocks(
    kernel: Kernel, lowered_kernel: LoweredKernel, middle_work: _BlockWork, device_spec: Target
) -> dict[str, float] | None:
    """Return lower bounds of the clocks per unit; None if the machine code could not be interpreted."""
    if count_block_accesses(kernel, lowered_kernel).instruction_counts is None:
        return None
    other_blocks = {*_select_corner_blocks(lowered_kernel)} - {select_middle_block(lowered_kernel)}
    works = [middle_work]
    try:
        works += [_sum_instructions(count_instructions(kernel, lowered_kernel, block)) for block in other_blocks]
    except (AnalysisError, CompileError):
        return None
    middle_clocks, *other_clocks = (_compute_clocks(work, kernel, device_spec, max) for work in works)
    blocks_per_sm = device_spec.count_blocks_per_sm(math.prod(lowered_kernel.launch.grid))
    return {
        unit: max(value, blocks_per_sm * min([value, *(clocks[unit] for clocks in other_clocks)]))
        for unit, value in middle_clocks.items()
    }
