"""How long each unit of a GPU needs for its part of a kernel: an estimate of its time, and a time that is certain.

A unit of a multiprocessor does the work of the blocks that come to that multiprocessor: of a grid of B blocks on M
multiprocessors, the busiest has the next integer above B / M of them. Arithmetic in float32 is an instruction a lane
and clock, a multiply-add at most ("Arithmetic Instructions" in the CUDA C++ Programming Guide), and tensor cores do
many times that. Shared memory serves a wavefront of 128 bytes a clock ("Shared Memory" there), and L1 moves 4 sectors
of 32 bytes a clock. Memory moves its bytes at the device's bandwidth.

The estimate (`UnitLowerBound.seconds`) takes all blocks to do what the middle one does. It takes each array to come
from memory once, and again where L2 does not keep it (`footprint`), and a launch to take what the smallest kernel
takes.

The certain time (`UnitLowerBound.min_seconds`) is a lower bound, which no run of the kernel undercuts:

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

L1_SECTORS_PER_CLOCK = 4  # of L1, a multiprocessor
WAVEFRONTS_PER_CLOCK = 1  # of shared memory, a multiprocessor
ARITHMETIC, SHARED, L1, DRAM, LAUNCH = "arithmetic", "shared memory", "L1", "memory", "launch"


@dataclass(frozen=True)
class UnitLowerBound:
    """How long one unit needs for its part of a kernel.

    Attributes:
        unit: its name.
        amount: what it has to do for the whole kernel, such as "1.2 GFLOP", if all blocks do what the middle one does.
        seconds: an estimate of the time that it needs.
        min_seconds: seconds that it needs for certain; None where no such time is known.
    """

    unit: str
    amount: str
    seconds: float
    min_seconds: float | None = None


def compute_unit_times(kernel: Kernel, device_spec: DeviceSpec) -> list[UnitLowerBound]:
    """Return how long each unit needs for a kernel, over all its timed steps, the longest estimate first.

    Args:
        kernel: for an NVIDIA architecture.
        device_spec: the GPU.

    Raises:
        AnalysisError: what the kernel does cannot be counted, or depends on the data.
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
        clocks[ARITHMETIC] += max_blocks_per_sm * (
            block_work.lane_clocks / num_fp32_lanes + block_work.matrix_flops / 2 / tensor_rate
        )
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
    unit_times = [
        UnitLowerBound(
            ARITHMETIC, f"{flops / 1e9:.3g} GFLOP", clocks[ARITHMETIC] / clock_hz, min_seconds.get(ARITHMETIC)
        ),
        UnitLowerBound(
            SHARED,
            f"{total_work.wavefronts / 1e6:.3g} million wavefronts",
            clocks[SHARED] / clock_hz,
            min_seconds.get(SHARED),
        ),
        UnitLowerBound(
            L1, f"{total_work.sectors / 1e6:.3g} million sectors", clocks[L1] / clock_hz, min_seconds.get(L1)
        ),
        UnitLowerBound(
            DRAM,
            f"{dram_total_bytes / 1e6:.3g} MB",
            dram_total_bytes / device_spec.bandwidth,
            bytes_beyond_l2 / device_spec.bandwidth or None,
        ),
        UnitLowerBound(LAUNCH, f"{launches}", LAUNCH_SECONDS * launches),
    ]
    return sorted(unit_times, key=lambda unit_time: -unit_time.seconds)


def explain_text_counts(kernel: Kernel) -> str:
    """Return why the text of a kernel was counted in place of its machine code; empty where the machine code was.

    Raises:
        AnalysisError: what the kernel does cannot be counted, or depends on the data.
    """
    return next(
        filter(
            None,
            (count_block_accesses(kernel, lowered_kernel).fallback_reason for lowered_kernel in kernel.timed_kernels),
        ),
        "",
    )


def _count_exposed_launches(kernel: Kernel) -> int:
    """How many launches take their time: not of steps that come up while the one before them ends."""
    program = kernel.executable
    return 1 + sum(
        not compiled_kernel.uses_pdl for compiled_kernel in program.kernels[program.num_prepack_kernels + 1 :]
    )


def _uses_pdl(kernel: Kernel, lowered_kernel: LoweredKernel) -> bool:
    """Whether a timed step begins before the timed step in front of it has ended."""
    return (
        lowered_kernel is not kernel.timed_kernels[0]
        and kernel.executable.kernels[kernel.kernels.index(lowered_kernel)].uses_pdl
    )


@dataclass(frozen=True)
class _UnitWork:
    """What one block, or several, ask of the units.

    Attributes:
        lane_clocks: clocks of all lanes of float32 together.
        flops: multiplications and additions that these are.
        matrix_flops: multiplications and additions of tensor cores.
        wavefronts: of shared memory.
        sectors: of global memory.
    """

    lane_clocks: float
    flops: float
    matrix_flops: float
    wavefronts: float
    sectors: float

    def add_blocks(self, block_work: _UnitWork, num_blocks: int) -> _UnitWork:
        """Return this work and that of so many blocks."""
        return _UnitWork(
            self.lane_clocks + num_blocks * block_work.lane_clocks,
            self.flops + num_blocks * block_work.flops,
            self.matrix_flops + num_blocks * block_work.matrix_flops,
            self.wavefronts + num_blocks * block_work.wavefronts,
            self.sectors + num_blocks * block_work.sectors,
        )


def _count_middle_block(kernel: Kernel, lowered_kernel: LoweredKernel) -> _UnitWork:
    """What the middle block asks: by its machine code, or by its text where that is not known."""
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
    """Clocks that the units of some multiprocessor need for certain; None where the machine code is not known.

    Args:
        kernel: the kernel.
        lowered_kernel: one of its steps.
        middle_work: what the middle block of its grid asks.
        max_blocks_per_sm: blocks of the multiprocessor that has most.
        num_fp32_lanes: of float32.
        tensor_rate: multiply-adds a clock of tensor cores.
    """
    if count_block_accesses(kernel, lowered_kernel).instruction_counts is None:
        return None
    block_works = [middle_work]
    try:
        block_works += [
            _sum_instructions(count_instructions(kernel, lowered_kernel, block))
            for block in _select_corner_blocks(lowered_kernel)
        ]
    except (AnalysisError, CompileError):
        return None

    def compute_clocks(work: _UnitWork) -> dict[str, float]:
        return {
            ARITHMETIC: max(work.lane_clocks / num_fp32_lanes, work.matrix_flops / 2 / tensor_rate),
            SHARED: work.wavefronts / WAVEFRONTS_PER_CLOCK,
            L1: work.sectors / L1_SECTORS_PER_CLOCK,
        }

    clocks_by_block = [compute_clocks(work) for work in block_works]
    return {
        unit: max(
            clocks_by_block[0][unit], max_blocks_per_sm * min(block_clocks[unit] for block_clocks in clocks_by_block)
        )
        for unit in clocks_by_block[0]
    }


def _select_corner_blocks(lowered_kernel: LoweredKernel) -> list[BlockIndex]:
    """The first and the last block of a grid, but for those that are its middle one."""
    x, y, z = lowered_kernel.launch.grid
    corners: dict[BlockIndex, None] = dict.fromkeys([(0, 0, 0), (x - 1, y - 1, z - 1)])
    return [block for block in corners if block != select_middle_block(lowered_kernel)]
