"""How long a kernel takes at least to write and read its threads' local memory: what does not fit in registers.

Arrays of a thread that are too large for registers, or are indexed by what is not known at compile time, lie in local
memory, which is global memory of each thread's own ("Local Memory" in the CUDA C++ Programming Guide). A config whose
tile was fast with a small filter may have thousands of bytes of it with a large one.
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
L1_BYTES_PER_CLOCK, L2_BYTES_PER_CLOCK = 128, 64  # of a multiprocessor; sources as in `predict_kernel_time`


def estimate_seconds_from_text(kernel: Kernel, device_spec: DeviceSpec) -> float:
    """Estimate the seconds that local memory takes by the arrays of a thread that no registers can hold.

    The kernel need not be compiled, which takes long where such arrays make its text long.

    Args:
        kernel: for an NVIDIA architecture.
        device_spec: the GPU.
    """
    max_register_bytes = MAX_REGISTERS_PER_THREAD * REGISTER_BYTES
    return sum(
        _estimate_seconds(
            lowered_kernel,
            max(0, sum_allocated_bytes(lowered_kernel.function, "local") - max_register_bytes),
            device_spec,
        )
        for lowered_kernel in kernel.timed_kernels
    )


def estimate_seconds_from_cubin(kernel: Kernel, device_spec: DeviceSpec) -> float:
    """Estimate the seconds that local memory takes by the stack that ptxas reports, spilled registers included.

    Args:
        kernel: for an NVIDIA architecture.
        device_spec: the GPU.

    Raises:
        CompileError: the kernel does not compile.
    """
    return sum(
        _estimate_seconds(lowered_kernel, kernel.cubin.kernels[lowered_kernel.name].stack_bytes, device_spec)
        for lowered_kernel in kernel.timed_kernels
    )


def _estimate_seconds(lowered_kernel: LoweredKernel, nbytes: int, device_spec: DeviceSpec) -> float:
    """The seconds in which each thread writes so many bytes once and reads them once."""
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
