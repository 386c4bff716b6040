"""A copy on the device: what the memory gives, and so what nothing that moves as many bytes can exceed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tvmconv.arithmetic import ceil_div
from tvmconv.baselines.base import Baseline, baseline, check_gpu
from tvmconv.compiler import nvrtc
from tvmconv.compiler.program import ArrayType, Launch
from tvmconv.devices.base import BufferSets, Device, set_bytes
from tvmconv.devices.cuda.graphs import capture_on, check, new_stream, time_sets
from tvmconv.devices.cuda.kernel import Arrays, Function, border

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tvmconv.workloads import Workload

_THREADS = 256
_VECTOR = 4  # elements of a float4, one a thread
_ITEMSIZE = 4  # bytes of an element
_COPY = """
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
        cold: as for `Loaded.time`.
        seconds: as for `Loaded.time`.

    Returns:
        A baseline without an output.

    Raises:
        WrongDeviceError: `device` is no NVIDIA GPU.
        DeviceError: CUDA fails.
    """
    gpu = check_gpu(device, "copy")
    x, output = inputs[0], ArrayType(w.argument_shapes[-1], w.storage)
    count = max(1, (x.nbytes + output.nbytes) // 2 // _ITEMSIZE)
    source, target = np.resize(x.reshape(-1).view(np.uint8), count * _ITEMSIZE), ArrayType((count,), "float32")
    sets = BufferSets.choose(set_bytes([source], target.shape, target.dtype), gpu.l2_bytes or 0, cold=cold)
    cubin = nvrtc.compile_cubin(_COPY, str(gpu.arch))
    with border(gpu), Arrays() as arrays, new_stream(gpu.index) as stream:
        copies = [arrays.uploaded([source], target) for _ in range(sets.count)]
        ways = {"cudaMemcpyAsync": _runtime_copy(target.nbytes), "a float4 kernel": _kernel_copy(cubin.image, count)}
        timings = {}
        for name, copy in ways.items():

            def launch(i: int, copy: Callable[[int, int, int], None] = copy) -> None:
                from_, to = copies[i % sets.count]
                copy(from_, to, stream)

            launch(0)
            timings[name] = time_sets(capture_on(stream, launch), stream, sets, seconds / len(ways))
    fastest = min(timings, key=lambda name: timings[name].median)
    return Baseline(timings[fastest], None, f"by {fastest}, the faster of {' and '.join(ways)}")


def _runtime_copy(nbytes: int) -> Callable[[int, int, int], None]:
    """From source, target and stream: queue CUDA's own copy."""
    from cuda.bindings import runtime

    kind = runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice
    return lambda source, target, stream: check(runtime.cudaMemcpyAsync(target, source, nbytes, kind, stream))


def _kernel_copy(cubin: bytes, count: int) -> Callable[[int, int, int], None]:
    """From source, target and stream: queue the kernel, for `count` elements."""
    function = Function(cubin, "copy")
    shape = Launch(grid=(ceil_div(count, _VECTOR * _THREADS), 1, 1), block=(_THREADS, 1, 1))
    return lambda source, target, stream: function.launch(shape, (source, target, count), stream)
