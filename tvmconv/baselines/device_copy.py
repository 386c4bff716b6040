"""Baseline `copy`: a copy on the device, which bounds the speed of kernels that move as many bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvmconv.arithmetic import ceil_div
from tvmconv.baselines.base import Baseline, baseline, require_gpu
from tvmconv.compiler import nvrtc
from tvmconv.compiler.executable import ArrayType, LaunchConfig
from tvmconv.devices import cuda
from tvmconv.devices.cuda.graphs import check_cuda, create_stream, make_capture, time_buffer_sets
from tvmconv.devices.cuda.loaded_kernel import CudaFunction, DeviceArrays, translate_errors
from tvmconv.devices.device import BufferSets, Device
from tvmconv.workloads import Workload

_THREADS_PER_BLOCK = 256
_VECTOR_ELEMENTS = 4  # elements of the float4 that each thread copies
_ITEMSIZE_BYTES = 4  # bytes of an element
_COPY_SOURCE = """
extern "C" __global__ void copy(const float* __restrict__ x, float* __restrict__ y, long long count) {
  long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x, vectors = count / 4;
  if (i < vectors) reinterpret_cast<float4*>(y)[i] = reinterpret_cast<const float4*>(x)[i];
  if (i < count % 4) y[4 * vectors + i] = x[4 * vectors + i];
}
"""


@baseline("copy")
def time_copy(
    w: Workload, inputs: Sequence[NDArray[Any]], *, device: Device, cold: bool = False, seconds: float = 0.5
) -> Baseline:
    """Time a copy with as much traffic, half reads and half writes, as X and Y have bytes.

    The result is the faster one of cudaMemcpyAsync and a kernel whose threads copy a `float4` each. For large arrays,
    cudaMemcpyAsync takes a third longer than the kernel on some GPUs. The baseline has no output.
    """
    gpu = require_gpu(device, "copy")
    x, output = inputs[0], ArrayType(w.argument_shapes[-1], w.argument_dtypes[-1])
    count = max(1, (x.nbytes + output.nbytes) // 2 // _ITEMSIZE_BYTES)
    source, target = np.resize(x.reshape(-1).view(np.uint8), count * _ITEMSIZE_BYTES), ArrayType((count,), "float32")
    sets = BufferSets.choose_count(2 * target.nbytes, gpu.l2_bytes or 0, cold=cold)
    cubin = nvrtc.compile_cubin(_COPY_SOURCE, str(gpu.arch))
    with translate_errors(gpu), DeviceArrays() as arrays, create_stream(gpu.index) as stream:
        copies = [arrays.upload_all([source], target) for _ in range(sets.num_sets)]
        function, kind = CudaFunction(cubin.image, "copy"), cuda.runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        num_blocks = ceil_div(count, _VECTOR_ELEMENTS * _THREADS_PER_BLOCK)
        shape = LaunchConfig(grid=(num_blocks, 1, 1), block=(_THREADS_PER_BLOCK, 1, 1))

        def copy_by_runtime(i: int) -> None:
            x_pointer, y_pointer = copies[i % sets.num_sets]
            check_cuda(cuda.runtime.cudaMemcpyAsync(y_pointer, x_pointer, target.nbytes, kind, stream))

        def copy_by_kernel(i: int) -> None:
            function.launch(shape, (*copies[i % sets.num_sets], count), stream)

        copy_functions, timings = {"cudaMemcpyAsync": copy_by_runtime, "a float4 kernel": copy_by_kernel}, {}
        for name, launch in copy_functions.items():
            launch(0)
            timings[name] = time_buffer_sets(make_capture(stream, launch), stream, sets, seconds / len(copy_functions))
    fastest = min(timings, key=lambda name: timings[name].median)
    return Baseline(timings[fastest], None, f"by {fastest}, the faster of {' and '.join(copy_functions)}")
