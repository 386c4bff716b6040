"""Estimates of the time that a kernel needs at least to write and read its threads' local memory.

Arrays of a thread that exceed the register file, or that the kernel indexes by values unknown at compile time, lie in
local memory. This is global memory that is private to a thread ("Local Memory" in the CUDA C++ Programming Guide). A
config whose tile is fast with a small filter may need thousands of bytes of it with a large filter.
"""

from __future__ import annotations

import math

from tvmconv.compiler.device_lowering import sum_allocated_bytes
from tvmconv.compiler.lowered_module import LoweredKernel
from tvmconv.kernel import Kernel
from tvmconv.target import L1_BYTES_PER_CLOCK, L2_BYTES_PER_CLOCK, MAX_REGISTERS_PER_THREAD, Target

REGISTER_BYTES = 4


def estimate_seconds_from_text(kernel: Kernel, device_spec: Target) -> float:
    """Estimate the seconds that local memory takes, from the TIR's thread-local arrays that exceed the registers.

    The kernel is not compiled, because long arrays make its generated code long and slow to compile.
    """
    seconds = 0.0
    for lowered_kernel in kernel.timed_kernels:
        excess_bytes = sum_allocated_bytes(lowered_kernel.function, "local") - MAX_REGISTERS_PER_THREAD * REGISTER_BYTES
        seconds += _estimate_seconds(lowered_kernel, max(0, excess_bytes), device_spec)
    return seconds


def estimate_seconds_from_cubin(kernel: Kernel, device_spec: Target) -> float:
    """Estimate the seconds that local memory takes, from the stack that ptxas reports, spilled registers included."""
    return sum(
        _estimate_seconds(lowered_kernel, kernel.cubin.kernels[lowered_kernel.name].stack_bytes, device_spec)
        for lowered_kernel in kernel.timed_kernels
    )


def _estimate_seconds(lowered_kernel: LoweredKernel, nbytes: int, device_spec: Target) -> float:
    """Return the seconds in which each thread writes `nbytes` bytes once and reads them once."""
    blocks, threads = math.prod(lowered_kernel.launch.grid), lowered_kernel.launch.threads_per_block
    architecture, sms = device_spec.architecture, device_spec.multiprocessors
    max_threads = architecture.max_threads or threads
    resident_threads = min(device_spec.count_blocks_per_sm(blocks) * threads, max_threads)
    if resident_threads * nbytes <= architecture.l1_bytes:
        bytes_per_second = L1_BYTES_PER_CLOCK * device_spec.clock_hz * sms
    elif resident_threads * nbytes * sms <= architecture.l2_bytes:
        bytes_per_second = L2_BYTES_PER_CLOCK * device_spec.clock_hz * sms
    else:
        bytes_per_second = device_spec.bandwidth
    return 2 * nbytes * threads * blocks / bytes_per_second
