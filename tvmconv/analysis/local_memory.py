"""Estimates of the time that a kernel needs at least to write and read its threads' local memory.

Arrays of a thread that exceed the register file, or that the kernel indexes by values unknown at compile time, lie in
local memory. This is global memory that is private to a thread ("Local Memory" in the CUDA C++ Programming Guide). A
config whose tile is fast with a small filter may need thousands of bytes of it with a large filter.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tvmconv.arithmetic import ceil_div
from tvmconv.compiler.device_lowering import sum_allocated_bytes
from tvmconv.cost_model.features import DeviceSpec
from tvmconv.gpu_specs import (
    MAX_REGISTERS_PER_THREAD,
    get_fp32_lanes,
    get_l1_bytes,
    get_l2_bytes,
    get_multiprocessor_spec,
)

if TYPE_CHECKING:
    from tvmconv.compiler.lowered_module import LoweredKernel
    from tvmconv.kernel import Kernel

REGISTER_BYTES = 4
L1_BYTES_PER_CLOCK, L2_BYTES_PER_CLOCK = 128, 64  # per multiprocessor; `predicted_time` names the sources


def estimate_seconds_from_text(kernel: Kernel, device_spec: DeviceSpec) -> float:
    """Estimate the seconds that local memory takes, from the TIR's thread-local arrays that exceed the registers.

    The kernel is not compiled, because long arrays make its generated code long and slow to compile.

    Args:
        kernel: Kernel for an NVIDIA architecture.
        device_spec: Rates of the GPU.
    """
    seconds = 0.0
    for lowered_kernel in kernel.timed_kernels:
        excess_bytes = sum_allocated_bytes(lowered_kernel.function, "local") - MAX_REGISTERS_PER_THREAD * REGISTER_BYTES
        seconds += _estimate_seconds(lowered_kernel, max(0, excess_bytes), device_spec)
    return seconds


def estimate_seconds_from_cubin(kernel: Kernel, device_spec: DeviceSpec) -> float:
    """Estimate the seconds that local memory takes, from the stack that ptxas reports, spilled registers included.

    Args:
        kernel: Kernel for an NVIDIA architecture.
        device_spec: Rates of the GPU.

    Raises:
        CompileError: The kernel does not compile.
    """
    return sum(
        _estimate_seconds(lowered_kernel, kernel.cubin.kernels[lowered_kernel.name].stack_bytes, device_spec)
        for lowered_kernel in kernel.timed_kernels
    )


def _estimate_seconds(lowered_kernel: LoweredKernel, nbytes: int, device_spec: DeviceSpec) -> float:
    """Return the seconds in which each thread writes `nbytes` bytes once and reads them once."""
    clock_hz = device_spec.flops / (2 * (get_fp32_lanes(device_spec.arch) or 128) * device_spec.multiprocessors)
    blocks, threads = math.prod(lowered_kernel.launch.grid), lowered_kernel.launch.threads_per_block
    sm = get_multiprocessor_spec(device_spec.arch)
    resident_threads = min(ceil_div(blocks, device_spec.multiprocessors) * threads, sm.max_threads if sm else threads)
    if resident_threads * nbytes <= get_l1_bytes(device_spec.arch):
        bytes_per_second = L1_BYTES_PER_CLOCK * clock_hz * device_spec.multiprocessors
    elif resident_threads * nbytes * device_spec.multiprocessors <= get_l2_bytes(device_spec.arch):
        bytes_per_second = L2_BYTES_PER_CLOCK * clock_hz * device_spec.multiprocessors
    else:
        bytes_per_second = device_spec.bandwidth
    return 2 * nbytes * threads * blocks / bytes_per_second
