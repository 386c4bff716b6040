"""How long a kernel takes at least to write and read its threads' local memory: what does not fit in registers.

Arrays of a thread that are too large for registers, or are indexed by what is not known at compile time, lie in local
memory, which is global memory of each thread's own ("Local Memory" in the CUDA C++ Programming Guide). A config whose
tile was fast with a small filter may have thousands of bytes of it with a large one.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tvmconv.arithmetic import ceil_div
from tvmconv.compiler.lower import buffer_bytes
from tvmconv.gpu import MAX_REGISTERS, fp32_lanes, l1_bytes, l2_bytes, multiprocessor
from tvmconv.knowledge.features import Machine

if TYPE_CHECKING:
    from tvmconv.compiler.lowered import LoweredStep
    from tvmconv.kernel import Kernel

REGISTER_BYTES = 4
L1_BYTES_A_CLOCK, L2_BYTES_A_CLOCK = 128, 64  # of a multiprocessor; sources as in `predicted_time`


def seconds_by_text(kernel: Kernel, machine: Machine) -> float:
    """Estimate the seconds that local memory takes by the arrays of a thread that no registers can hold.

    The kernel need not be compiled, which takes long where such arrays make its text long.

    Args:
        kernel: for an NVIDIA architecture.
        machine: the GPU.
    """
    registers = MAX_REGISTERS * REGISTER_BYTES
    return sum(
        _seconds(step, max(0, buffer_bytes(step.function, "local") - registers), machine) for step in kernel.timed_steps
    )


def seconds_by_code(kernel: Kernel, machine: Machine) -> float:
    """Estimate the seconds that local memory takes by the stack that ptxas reports, spilled registers included.

    Args:
        kernel: for an NVIDIA architecture.
        machine: the GPU.

    Raises:
        CompileError: the kernel does not compile.
    """
    return sum(_seconds(step, kernel.cubin.kernels[step.name].stack_bytes, machine) for step in kernel.timed_steps)


def _seconds(step: LoweredStep, nbytes: int, machine: Machine) -> float:
    """The seconds in which each thread writes so many bytes once and reads them once."""
    clock = machine.flops / (2 * (fp32_lanes(machine.arch) or 128) * machine.multiprocessors)
    blocks, threads = math.prod(step.launch.grid), step.launch.threads
    there = multiprocessor(machine.arch)
    resident = min(ceil_div(blocks, machine.multiprocessors) * threads, there.threads if there else threads)
    if resident * nbytes <= l1_bytes(machine.arch):
        rate = L1_BYTES_A_CLOCK * clock * machine.multiprocessors
    elif resident * nbytes * machine.multiprocessors <= l2_bytes(machine.arch):
        rate = L2_BYTES_A_CLOCK * clock * machine.multiprocessors
    else:
        rate = machine.bandwidth
    return 2 * nbytes * threads * blocks / rate
