"""What a kernel's time is bound by: for each unit of a GPU, the least time in which it could do its part.

A unit of a multiprocessor does the work of the blocks that come to that multiprocessor: of a grid of B blocks on M
multiprocessors, the busiest has the next integer above B / M of them. Arithmetic in float32 is an instruction a lane
and clock, a multiply-add at most ("Arithmetic Instructions" in the CUDA C++ Programming Guide), and tensor cores do
many times that: both of what the machine code does, with lanes that idle, or the text where that is not known. Shared
memory serves a wavefront of 128 bytes a clock ("Shared Memory" there); L1 moves 4 sectors of 32 bytes a clock, and what
comes from the memory goes at the device's bandwidth: each array once, and again where L2 does not keep it
(`footprint`). A launch takes some 2 µs, but that of a step that comes up while the one before it ends nothing. None of
these can be beaten, but that of memory by a kernel whose arrays lie in L2 already; how near a kernel comes to the
largest is told by `predicted_time`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tvmconv.analysis.asked import Asked, asked_by
from tvmconv.analysis.counts import counts
from tvmconv.analysis.machine_code.arithmetic import lane_clocks, lane_flops, matrix_flops
from tvmconv.analysis.memory.footprint import dram_bytes
from tvmconv.gpu import WARP, fp32_lanes
from tvmconv.knowledge.features import LAUNCH_SECONDS, TENSOR_CORES, Machine

if TYPE_CHECKING:
    from tvmconv.compiler.lowered import LoweredStep
    from tvmconv.kernel import Kernel

SECTORS_A_CLOCK = 4  # of L1, a multiprocessor
WAVEFRONTS_A_CLOCK = 1  # of shared memory, a multiprocessor
ARITHMETIC, SHARED, L1, DRAM, LAUNCH = "arithmetic", "shared memory", "L1", "memory", "launch"


@dataclass(frozen=True)
class Bound:
    """The least time of one unit.

    Attributes:
        unit: its name.
        amount: what it has to do for the whole kernel, such as "1.2 GFLOP".
        seconds: in which it could.
    """

    unit: str
    amount: str
    seconds: float


def bounds(kernel: Kernel, machine: Machine) -> list[Bound]:
    """The least times of a kernel's units, over all its timed steps, the longest first.

    Args:
        kernel: for an NVIDIA architecture.
        machine: the GPU.

    Raises:
        AnalysisError: what the kernel does cannot be counted, or depends on the data.
    """
    w = kernel.workload
    lanes = fp32_lanes(machine.arch) or 128
    clock = machine.flops / (2 * lanes * machine.multiprocessors)
    flops = clocks = wavefronts = shared = found = moved = 0.0
    for step in kernel.timed_steps:
        most = _of_a_multiprocessor(step, machine.multiprocessors)
        blocks = math.prod(step.launch.grid)
        asks = asked_by(kernel, step)
        done = _arithmetic(kernel, step, asks)
        flops += (done.flops + done.of_matrices) * blocks
        clocks += most * (done.lane_clocks + done.of_matrices / 2 / TENSOR_CORES.get(w.dtype, 1)) / lanes
        own = sum(access.wavefronts for access in asks.shared)
        wavefronts += own * blocks
        shared += most * own / WAVEFRONTS_A_CLOCK / clock
        touched = sum(access.sectors for access in asks.touched)
        found += touched * blocks
        moved += most * touched / SECTORS_A_CLOCK / clock
    memory = dram_bytes(kernel)
    launches = _launches(kernel)
    units = [
        Bound(ARITHMETIC, f"{flops / 1e9:.3g} GFLOP", clocks / clock),
        Bound(SHARED, f"{wavefronts / 1e6:.3g} million wavefronts", shared),
        Bound(L1, f"{found / 1e6:.3g} million sectors", moved),
        Bound(DRAM, f"{memory / 1e6:.3g} MB", memory / machine.bandwidth),
        Bound(LAUNCH, f"{launches}", LAUNCH_SECONDS * launches),
    ]
    return sorted(units, key=lambda each: -each.seconds)


def _launches(kernel: Kernel) -> int:
    """How many launches take their time: not of steps that come up while the one before them ends."""
    program = kernel.program
    return 1 + sum(not step.overlaps for step in program.steps[program.prepared + 1 :])


def _of_a_multiprocessor(step: LoweredStep, multiprocessors: int) -> int:
    """Blocks that the busiest multiprocessor has in all."""
    return -(-math.prod(step.launch.grid) // multiprocessors)


@dataclass(frozen=True)
class _Arithmetic:
    """Floating point of a block.

    Attributes:
        lane_clocks: of all lanes of float32 together.
        flops: multiplications and additions that these are.
        of_matrices: those of tensor cores.
    """

    lane_clocks: float
    flops: int
    of_matrices: int


def _arithmetic(kernel: Kernel, step: LoweredStep, asks: Asked) -> _Arithmetic:
    if asks.executed is None:
        done = counts(kernel, step).done.flops
        on_tensor_cores = "mma" in step.text
        return _Arithmetic(0, 0, done) if on_tensor_cores else _Arithmetic(done / 2, done, 0)
    return _Arithmetic(
        lane_clocks=WARP * sum(lane_clocks(instruction) * each.executed for instruction, each in asks.executed),
        flops=sum(lane_flops(instruction) * each.executed for instruction, each in asks.executed),
        of_matrices=sum(matrix_flops(instruction) * each.executed for instruction, each in asks.executed),
    )
