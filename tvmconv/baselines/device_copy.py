"""A copy on the device: what the memory gives, and so what nothing that moves as many bytes can exceed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tvmconv.arithmetic import ceil_div
from tvmconv.baselines.base import Baseline, baseline, require_gpu
from tvmconv.compiler import nvrtc
from tvmconv.compiler.executable import ArrayType, LaunchConfig
from tvmconv.devices.cuda.graphs import check_cuda, create_stream, make_capture, time_buffer_sets
from tvmconv.devices.cuda.loaded_kernel import CudaFunction, DeviceArrays, translate_errors
from tvmconv.devices.device import BufferSets, Device, sum_buffer_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tvmconv.workloads import Workload

_THREADS_PER_BLOCK = 256
_VECTOR_ELEMENTS = 4  # elements of a float4, one a thread
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
    """Time a copy that reads and writes as many bytes, half each, as X and Y have.

    CUDA's own copy and a kernel whose threads copy a `float4` each are timed, and the faster counts: from some size on
    CUDA's takes a third longer than the kernel on some GPUs.

    Args:
        w: the workload.
        inputs: X and K, of `w.argument_shapes` and `w.storage`.
        device: an NVIDIA GPU.
        cold: as for `LoadedKernel.time`.
        seconds: as for `LoadedKernel.time`.

    Returns:
        A baseline without an output.

    Raises:
        UnsupportedDeviceError: `device` is no NVIDIA GPU.
        DeviceError: CUDA fails.
    """
    gpu = require_gpu(device, "copy")
    x, output = inputs[0], ArrayType(w.argument_shapes[-1], w.storage)
    count = max(1, (x.nbytes + output.nbytes) // 2 // _ITEMSIZE_BYTES)
    source, target = np.resize(x.reshape(-1).view(np.uint8), count * _ITEMSIZE_BYTES), ArrayType((count,), "float32")
    sets = BufferSets.choose_count(sum_buffer_bytes([source], target.shape, target.dtype), gpu.l2_bytes or 0, cold=cold)
    cubin = nvrtc.compile_cubin(_COPY_SOURCE, str(gpu.arch))
    with translate_errors(gpu), DeviceArrays() as arrays, create_stream(gpu.index) as stream:
        copies = [arrays.upload_all([source], target) for _ in range(sets.num_sets)]
        copy_functions = {
            "cudaMemcpyAsync": _make_runtime_copy(target.nbytes),
            "a float4 kernel": _make_kernel_copy(cubin.image, count),
        }
        timings = {}
        for name, copy in copy_functions.items():

            def launch(i: int, copy: Callable[[int, int, int], None] = copy) -> None:
                source_pointer, target_pointer = copies[i % sets.num_sets]
                copy(source_pointer, target_pointer, stream)

            launch(0)
            timings[name] = time_buffer_sets(make_capture(stream, launch), stream, sets, seconds / len(copy_functions))
    fastest = min(timings, key=lambda name: timings[name].median)
    return Baseline(timings[fastest], None, f"by {fastest}, the faster of {' and '.join(copy_functions)}")


def _make_runtime_copy(nbytes: int) -> Callable[[int, int, int], None]:
    """From source, target and stream: queue CUDA's own copy."""
    from cuda.bindings import runtime

    kind = runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice
    return lambda source, target, stream: check_cuda(runtime.cudaMemcpyAsync(target, source, nbytes, kind, stream))


def _make_kernel_copy(cubin: bytes, count: int) -> Callable[[int, int, int], None]:
    """From source, target and stream: queue the kernel, for `count` elements."""
    function = CudaFunction(cubin, "copy")
    shape = LaunchConfig(
        grid=(ceil_div(count, _VECTOR_ELEMENTS * _THREADS_PER_BLOCK), 1, 1), block=(_THREADS_PER_BLOCK, 1, 1)
    )
    return lambda source, target, stream: function.launch(shape, (source, target, count), stream)
