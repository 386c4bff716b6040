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

from tvmconv.arithmetic import ceil_div
from tvmconv.compiler import nvrtc
from tvmconv.compiler.program import Launch
from tvmconv.devices.base import LONG_LAUNCH_SECONDS, Bench, Loaded, effort
from tvmconv.devices.comparison import Comparison, Reference, as_reference
from tvmconv.devices.cuda.function import Function
from tvmconv.devices.cuda.gpu import Gpu
from tvmconv.devices.cuda.graphs import (
    IDLE_WARM_UP_SECONDS,
    WARM_UP_SECONDS,
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
LONG_SECONDS, LONG_SAMPLES = 0.05, 20  # of replays in the last timings, and how many of their times are kept
IDLE_SECONDS = 0.1  # after a longer pause the GPU may have lowered its clocks

# Either all of an output is compared, or a sample, and whether the rest is finite. The results are two numbers in
# float64: the sum of squared differences, which becomes NaN or infinite where an element is, and the largest difference
# in the sample, relative to what is allowed there. The bits of non-negative numbers, as integers, have the same order.
_THREADS = 256
_COMPARISON = """
__device__ void add_up(double mine, double* sum) {
  for (int offset = 16; offset > 0; offset /= 2) mine += __shfl_down_sync(0xffffffff, mine, offset);
  if (threadIdx.x % 32 == 0 && mine != 0) atomicAdd(sum, mine);  // true for NaN
}

extern "C" __global__ void squared_error(const T* output, const double* reference, long long count, double* results) {
  double mine = 0;
  long long step = (long long)gridDim.x * blockDim.x;
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < count; i += step) {
    double difference = (double)(float)output[i] - reference[i];
    mine += difference * difference;
  }
  add_up(mine, results);
}

extern "C" __global__ void not_finite(const T* output, long long count, double* results) {
  double mine = 0;
  long long step = (long long)gridDim.x * blockDim.x;
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < count; i += step) {
    double value = (double)(float)output[i];
    if (isnan(value) || isinf(value)) mine += fabs(value);
  }
  add_up(mine, results);
}

extern "C" __global__ void compare_points(const T* output, const long long* positions, const double* values,
                                          const float* allowed, long long count, double* results, long long counts) {
  double mine = 0, worst = 0;
  long long step = (long long)gridDim.x * blockDim.x;
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < count; i += step) {
    double difference = fabs((double)(float)output[positions[i]] - values[i]);
    double relative = difference / allowed[i];
    if (relative > worst) worst = relative;  // a NaN is in the sum
    if (counts) mine += difference * difference;
  }
  add_up(mine, results);
  if (worst != 0) atomicMax((unsigned long long*)results + 1, (unsigned long long)__double_as_longlong(worst));
}
"""
_ELEMENT = {
    "float32": "#define T float",
    "float16": "#include <cuda_fp16.h>\n#define T __half",
    "bfloat16": "#include <cuda_bf16.h>\n#define T __nv_bfloat16",
}


@dataclass(frozen=True)
class _Output:
    """Where kernels write to, and the functions that compare it with the reference."""

    pointer: int
    nbytes: int
    squared_error: Function
    not_finite: Function
    compare_points: Function


class CudaBench(Bench):
    """A workload's arrays in a GPU's memory; see `Bench`."""

    def __init__(self, device: Gpu, inputs: Sequence[NDArray[Any]], reference: Reference | NDArray[np.float64]) -> None:
        self._device = device
        self._inputs = [np.ascontiguousarray(array) for array in inputs]
        right = as_reference(reference)
        self._whole = None if right.whole is None else np.ascontiguousarray(right.whole, np.float64)
        self._points = right.points
        self._norm = right.norm
        self._last_busy = -math.inf
        self._outputs: dict[str, _Output] = {}
        with border(device), ExitStack() as stack:
            self._arrays = stack.enter_context(Arrays())
            self._pointers = [self._arrays.allocate(array.nbytes) for array in self._inputs]
            self._right_pointers = [self._arrays.allocate(array.nbytes) for array in self._right]
            self._results = self._arrays.allocate(16)
            self._stream = stack.enter_context(new_stream(device.index))
            self._resources = stack.pop_all()
        self.restore()
        _comparison(self._inputs[0].dtype.name, str(device.arch))  # while the first program is still being built

    @property
    def _right(self) -> list[NDArray[Any]]:
        """The arrays of the reference, which lie at `_right_pointers`: the whole, then those of the sample."""
        arrays: list[NDArray[Any]] = [] if self._whole is None else [self._whole]
        if points := self._points:
            arrays += [points.positions, points.values, points.allowed]
        return arrays

    def restore(self) -> None:
        """Copy inputs and reference to the GPU again; see `Bench.restore`."""
        with border(self._device):
            pointers, arrays = [*self._pointers, *self._right_pointers], [*self._inputs, *self._right]
            for pointer, array in zip(pointers, arrays, strict=True):
                copy_to_device(pointer, array)

    def compare(self, kernel: Loaded) -> Comparison:
        """Run once and compare on the GPU; see `Bench.compare`."""
        from cuda.bindings import runtime

        assert isinstance(kernel, CudaLoaded)
        results = np.zeros(2)
        with kernel.border():
            output = self._output(kernel)
            poison(output.pointer, output.nbytes, self._stream)
            check(runtime.cudaMemsetAsync(self._results, 0, 16, self._stream))
            with kernel.bind([*self._pointers, output.pointer], self._stream) as bound:
                bound.launch()
                self._queue_comparison(output, math.prod(kernel.program.output.shape))
                kind = runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
                check(runtime.cudaMemcpyAsync(results.ctypes.data, self._results, 16, kind, self._stream))
                check(runtime.cudaStreamSynchronize(self._stream))
        return Comparison(math.sqrt(results[0]) / self._norm, float(results[1]))

    def time(self, kernel: Loaded, best: float) -> tuple[float, ...]:
        """Time replays of a CUDA graph, as `CudaLoaded.time` does; see `Bench.time`."""
        assert isinstance(kernel, CudaLoaded)
        stream = self._stream
        with kernel.border(), kernel.bind([*self._pointers, self._output(kernel).pointer], stream) as bound:
            launch = capture_on(stream, lambda i: bound.launch())
            (once,) = between(stream, launch(1), 1)
            if once >= LONG_LAUNCH_SECONDS:
                return (once,)
            replay, launches = capture_enough(launch, stream, multiple=1)
            if self._has_idled:
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
            least = IDLE_WARM_UP_SECONDS if self._has_idled else WARM_UP_SECONDS
            replays = time_replays(capture, stream, multiple=1, seconds=LONG_SECONDS, warm_up_seconds=least)
            seconds = replays.seconds
        self._last_busy = time.monotonic()
        return tuple(np.quantile(seconds, np.linspace(0, 1, LONG_SAMPLES + 1), method="nearest").tolist())

    def close(self) -> None:
        """Free the GPU's memory."""
        self._resources.close()

    @property
    def _has_idled(self) -> bool:
        """Whether the GPU may have lowered its clocks since the last timing; so right after a process has begun."""
        return time.monotonic() - self._last_busy > IDLE_SECONDS

    def _output(self, kernel: CudaLoaded) -> _Output:
        """Memory for a kernel's output, one for each dtype."""
        output = kernel.program.output
        if output.dtype not in self._outputs:
            cubin = _comparison(output.dtype, str(self._device.arch))
            functions = [Function(cubin, name) for name in ("squared_error", "not_finite", "compare_points")]
            self._outputs[output.dtype] = _Output(self._arrays.allocate(output.nbytes), output.nbytes, *functions)
        return self._outputs[output.dtype]

    def _queue_comparison(self, output: _Output, elements: int) -> None:
        """Queue what compares an output of so many elements."""

        def launch(function: Function, count: int, *parameters: int) -> None:
            blocks = min(ceil_div(count, _THREADS), 8 * (self._device.multiprocessors or 1))
            shape = Launch(grid=(blocks, 1, 1), block=(_THREADS, 1, 1))
            function.launch(shape, parameters, self._stream)

        right, has_whole = self._right_pointers, self._whole is not None
        if has_whole:
            launch(output.squared_error, elements, output.pointer, right[0], elements, self._results)
        else:
            launch(output.not_finite, elements, output.pointer, elements, self._results)
        if self._points is not None:
            count = self._points.values.size
            counts = int(not has_whole)  # whether the sample's errors are added up
            launch(output.compare_points, count, output.pointer, *right[-3:], count, self._results, counts)


@functools.cache
def _comparison(dtype: str, arch: str) -> bytes:
    """The machine code that compares an output of `dtype` with a reference."""
    return nvrtc.compile_cubin(comparison_source(dtype), arch).image


def comparison_source(dtype: str) -> str:
    """The CUDA text that compares an output of `dtype` with a reference."""
    return _ELEMENT[dtype] + _COMPARISON
