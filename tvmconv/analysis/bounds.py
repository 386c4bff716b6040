"""What a kernel's time is bound by: for each unit of a GPU, the least time in which it could do its part.

A unit of a multiprocessor does the work of the blocks that come to that multiprocessor: of a grid of B blocks on M
multiprocessors, the busiest has the next integer above B / M of them. Arithmetic in float32 is a multiply-add a lane
and clock ("Arithmetic Instructions" in the CUDA C++ Programming Guide); tensor cores do many times that; shared
memory serves a wavefront of 128 bytes a clock ("Shared Memory" there); L1 moves 4 sectors of 32 bytes a clock, and
what comes from the memory goes at the device's bandwidth: each array once, and again where L2 does not keep it
(`footprint`). A launch takes some 2 µs. None of these can be beaten, but that of memory by a kernel whose arrays lie in
L2 already; how near a kernel comes to the largest is told by `predicted_time`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tvmconv.analysis.asked import asked_by
from tvmconv.analysis.counts import counts
from tvmconv.analysis.memory.footprint import dram_bytes
from tvmconv.gpu import fp32_lanes
from tvmconv.knowledge.features import LAUNCH_SECONDS, TENSOR_CORES, Machine

if TYPE_CHECKING:
    from tvmconv.compiler.lower import LoweredStep
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
    flops = seconds = wavefronts = shared = found = moved = 0.0
    for step in kernel.timed_steps:
        most = _of_a_multiprocessor(step, machine.multiprocessors)
        blocks = math.prod(step.launch.grid)
        asks = asked_by(kernel, step)
        # To execute the text of a kernel of TMA and wgmma takes long, and its machine code tells the arithmetic.
        known = asks.matrix_flops if step.tensor_maps else None
        arithmetic = counts(kernel, step).done.flops if known is None else known
        times = TENSOR_CORES.get(w.dtype, 1) if _on_tensor_cores(step) else 1
        flops += arithmetic * blocks
        seconds += most * arithmetic / (2 * lanes * times) / clock
        own = sum(access.wavefronts for access in asks.shared)
        wavefronts += own * blocks
        shared += most * own / WAVEFRONTS_A_CLOCK / clock
        touched = sum(access.sectors for access in asks.touched)
        found += touched * blocks
        moved += most * touched / SECTORS_A_CLOCK / clock
    memory = dram_bytes(kernel)
    units = [
        Bound(ARITHMETIC, f"{flops / 1e9:.3g} GFLOP", seconds),
        Bound(SHARED, f"{wavefronts / 1e6:.3g} million wavefronts", shared),
        Bound(L1, f"{found / 1e6:.3g} million sectors", moved),
        Bound(DRAM, f"{memory / 1e6:.3g} MB", memory / machine.bandwidth),
        Bound(LAUNCH, f"{len(kernel.timed_steps)}", LAUNCH_SECONDS * len(kernel.timed_steps)),
    ]
    return sorted(units, key=lambda each: -each.seconds)


def _of_a_multiprocessor(step: LoweredStep, multiprocessors: int) -> int:
    """Blocks that the busiest multiprocessor has in all."""
    return -(-math.prod(step.launch.grid) // multiprocessors)


def _on_tensor_cores(step: LoweredStep) -> bool:
    text = step.function.script()
    return "mma" in text
