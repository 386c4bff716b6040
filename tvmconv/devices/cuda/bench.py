"""Measuring many kernels on one GPU: verified where their output lies, timed from CUDA graphs."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tvmconv.compiler import nvrtc
from tvmconv.compiler.program import Launch
from tvmconv.devices.base import Bench, Loaded, effort
from tvmconv.devices.cuda.function import Function
from tvmconv.devices.cuda.gpu import Gpu
from tvmconv.devices.cuda.graphs import (
    between,
    capture_enough,
    capture_on,
    check,
    new_stream,
    time_replays,
    warm_up,
)
from tvmconv.devices.cuda.kernel import Arrays, CudaLoaded, border, copy_to_device, poison

if TYPE_CHECKING:
    from numpy.typing import NDArray

FULL_SECONDS = 5e-3  # of replays, for a kernel that may become the best
MIN_REPLAYS = 3
LONG_SECONDS, LONG_SAMPLES = 0.1, 20  # of replays in the last timings, and how many of their times are kept
IDLE_SECONDS = 0.1  # after a longer pause the GPU may have lowered its clocks

# The sum of squared differences in float64. A NaN or an infinity in the output makes the sum one too.
_THREADS = 256
_SQUARED_ERROR = """
extern "C" __global__ void squared_error(const T* output, const double* reference, long long count, double* sum) {
  double mine = 0;
  long long step = (long long)gridDim.x * blockDim.x;
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < count; i += step) {
    double difference = (double)(float)output[i] - reference[i];
    mine += difference * difference;
  }
  for (int offset = 16; offset > 0; offset /= 2) mine += __shfl_down_sync(0xffffffff, mine, offset);
  if (threadIdx.x % 32 == 0) atomicAdd(sum, mine);
}
"""
_ELEMENT = {
    "float32": "#define T float",
    "float16": "#include <cuda_fp16.h>\n#define T __half",
    "bfloat16": "#include <cuda_bf16.h>\n#define T __nv_bfloat16",
}


@dataclass(frozen=True)
class _Output:
    """Where kernels write to, and what compares it with the reference."""

    pointer: int
    nbytes: int
    squared_error: Function


class CudaBench(Bench):
    """A workload's arrays in a GPU's memory; see `Bench`."""

    def __init__(self, device: Gpu, inputs: Sequence[NDArray[Any]], reference: NDArray[np.float64]) -> None:
        self._device = device
        self._inputs = [np.ascontiguousarray(array) for array in inputs]
        self._reference = np.ascontiguousarray(reference, np.float64)
        self._norm = float(np.linalg.norm(self._reference)) or 1.0
        self._last_busy = -math.inf
        self._outputs: dict[str, _Output] = {}
        with border(device), ExitStack() as stack:
            self._arrays = stack.enter_context(Arrays())
            self._pointers = [self._arrays.allocate(array.nbytes) for array in self._inputs]
            self._reference_pointer = self._arrays.allocate(self._reference.nbytes)
            self._sum = self._arrays.allocate(8)
            self._stream = stack.enter_context(new_stream(device.index))
            self._resources = stack.pop_all()
        self.restore()
        _squared_error(self._inputs[0].dtype.name, str(device.arch))  # while the first program is still being built

    def restore(self) -> None:
        """Copy inputs and reference to the GPU again; see `Bench.restore`."""
        with border(self._device):
            for pointer, array in zip(self._pointers, self._inputs, strict=True):
                copy_to_device(pointer, array)
            copy_to_device(self._reference_pointer, self._reference)

    def deviation(self, kernel: Loaded) -> float:
        """Run once and compare on the GPU; see `Bench.deviation`."""
        from cuda.bindings import runtime

        assert isinstance(kernel, CudaLoaded)
        sum_of_squares = np.zeros(1)
        with kernel.border():
            output = self._output(kernel)
            poison(output.pointer, output.nbytes, self._stream)
            check(runtime.cudaMemsetAsync(self._sum, 0, 8, self._stream))
            with kernel.bind([*self._pointers, output.pointer], self._stream) as bound:
                bound.launch()
                self._queue_comparison(output)
                kind = runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
                check(runtime.cudaMemcpyAsync(sum_of_squares.ctypes.data, self._sum, 8, kind, self._stream))
                check(runtime.cudaStreamSynchronize(self._stream))
        return math.sqrt(sum_of_squares[0]) / self._norm

    def time(self, kernel: Loaded, best: float) -> tuple[float, ...]:
        """Time replays of a CUDA graph, as `CudaLoaded.time` does; see `Bench.time`."""
        assert isinstance(kernel, CudaLoaded)
        stream = self._stream
        with kernel.border(), kernel.bind([*self._pointers, self._output(kernel).pointer], stream) as bound:
            launch = capture_on(stream, lambda i: bound.launch())
            replay, launches = capture_enough(launch, stream, multiple=1)
            if time.monotonic() - self._last_busy > IDLE_SECONDS:
                warm_up(replay, stream)
            (first,) = between(stream, replay, 1)
            samples = [first]
            if share := effort(first / launches, best):
                # The first replay is not among those that count: the GPU had been waiting for it.
                samples = between(stream, replay, max(MIN_REPLAYS, round(share * FULL_SECONDS / first)))
        self._last_busy = time.monotonic()
        return tuple(sample / launches for sample in samples)

    def time_long(self, kernel: Loaded) -> tuple[float, ...]:
        """Time replays as a comparison with libraries does; see `Bench.time_long`."""
        assert isinstance(kernel, CudaLoaded)
        stream = self._stream
        with kernel.border(), kernel.bind([*self._pointers, self._output(kernel).pointer], stream) as bound:
            capture = capture_on(stream, lambda i: bound.launch())
            seconds = time_replays(capture, stream, multiple=1, seconds=LONG_SECONDS).seconds
        self._last_busy = time.monotonic()
        return tuple(np.quantile(seconds, np.linspace(0, 1, LONG_SAMPLES + 1), method="nearest").tolist())

    def close(self) -> None:
        """Free the GPU's memory."""
        self._resources.close()

    def _output(self, kernel: CudaLoaded) -> _Output:
        """Memory for a kernel's output, one for each dtype."""
        output = kernel.program.output
        if output.dtype not in self._outputs:
            squared_error = Function(_squared_error(output.dtype, str(self._device.arch)), "squared_error")
            self._outputs[output.dtype] = _Output(self._arrays.allocate(output.nbytes), output.nbytes, squared_error)
        return self._outputs[output.dtype]

    def _queue_comparison(self, output: _Output) -> None:
        count = self._reference.size
        blocks = min(-(-count // _THREADS), 8 * (self._device.multiprocessors or 1))
        output.squared_error.launch(
            Launch(grid=(blocks, 1, 1), block=(_THREADS, 1, 1)),
            (output.pointer, self._reference_pointer, count, self._sum),
            self._stream,
        )


@functools.cache
def _squared_error(dtype: str, arch: str) -> bytes:
    """The machine code that compares an output of `dtype` with a float64 reference."""
    return nvrtc.compile_cubin(squared_error_source(dtype), arch).image


def squared_error_source(dtype: str) -> str:
    """The CUDA text that compares an output of `dtype` with a float64 reference."""
    return _ELEMENT[dtype] + _SQUARED_ERROR
