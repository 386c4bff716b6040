"""Verification of many kernels in the memory of one GPU, and their timing with CUDA graphs."""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvmconv.arithmetic import ceil_div
from tvmconv.compiler import nvrtc
from tvmconv.compiler.executable import LaunchConfig
from tvmconv.devices import cuda, sharing
from tvmconv.devices.comparison import (
    OutputComparison,
    ReferenceOutput,
    compare_stats,
    compute_stats,
    make_reference,
)
from tvmconv.devices.cuda.function import CudaFunction
from tvmconv.devices.cuda.graphs import (
    IDLE_WARM_UP_SECONDS,
    WARM_UP_SECONDS,
    capture_until_long_enough,
    check_cuda,
    create_stream,
    make_capture,
    time_between_events,
    time_replays,
    warm_up,
)
from tvmconv.devices.cuda.loaded_kernel import (
    BoundKernel,
    CudaLoadedKernel,
    DeviceArrays,
    copy_on_device,
    copy_to_device,
    fill_nan,
    translate_errors,
)
from tvmconv.devices.device import (
    LONG_LAUNCH_SECONDS,
    Benchmark,
    BufferSets,
    Device,
    LoadedKernel,
    measurement_fraction,
)

FULL_REPLAY_SECONDS = 5e-3  # replay time for a kernel that may become the best
MIN_REPLAYS = 3
FINAL_SECONDS, NUM_FINAL_SAMPLES = 0.05, 20  # replay time of final timings, and number of quantiles kept
IDLE_SECONDS = 0.1  # after a longer pause the GPU may have lowered its clocks

# A kernel that compares elements of the output, at some positions or all, with a reference. Without a reference, it
# looks for elements that are not finite. The results are two float64 numbers: the sum of squared differences, which is
# NaN or infinite if an element is, and the largest difference relative to the allowed one. atomicMax works on the bits,
# which order non-negative doubles like integers.
_THREADS_PER_BLOCK = 256
_COMPARISON_SOURCE = """
extern "C" __global__ void compare(const T* output, const long long* positions, const double* reference,
                                   const float* allowed, long long count, double* results, long long adds_errors) {
  double sum = 0, worst = 0;
  long long step = (long long)gridDim.x * blockDim.x;
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < count; i += step) {
    double value = (double)(V)output[positions ? positions[i] : i];
    double difference = reference ? fabs(value - reference[i]) : isfinite(value) ? 0 : fabs(value);
    if (adds_errors) sum += difference * difference;
    if (allowed && difference > worst * allowed[i]) worst = difference / allowed[i];  // a NaN is in the sum
  }
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_down_sync(0xffffffff, sum, offset);
  if (threadIdx.x % 32 == 0 && sum != 0) atomicAdd(results, sum);  // true for NaN
  if (worst != 0) atomicMax((unsigned long long*)results + 1, (unsigned long long)__double_as_longlong(worst));
}
"""
_ELEMENT_DEFINITIONS = {  # T is the type of an element, and V one that has its value
    "float32": "#define T float\n#define V float",
    "float16": "#include <cuda_fp16.h>\n#define T __half\n#define V float",
    "bfloat16": "#include <cuda_bf16.h>\n#define T __nv_bfloat16\n#define V float",
    "int32": "#define T int\n#define V int",
    "int8": "#define T signed char\n#define V int",
    "float8_e4m3fn": "#include <cuda_fp8.h>\n#define T __nv_fp8_e4m3\n#define V float",
    "float8_e5m2": "#include <cuda_fp8.h>\n#define T __nv_fp8_e5m2\n#define V float",
}


class CudaBenchmark(Benchmark):
    """Arrays of a workload in the memory of a GPU; see `Benchmark`.

    If the arrays exceed the L2 cache, launches cycle through copies of them, as in a comparison with libraries.
    Otherwise a kernel would be preferred that leaves parts of its input in the cache for its next launch.
    """

    def __init__(
        self, device: Device, inputs: Sequence[NDArray[Any]], reference: ReferenceOutput | NDArray[np.float64]
    ) -> None:
        self._device = device
        self._inputs = [np.ascontiguousarray(array) for array in inputs]
        expected = make_reference(reference)
        full_output = expected.full_output
        self._full_output = None if full_output is None else np.ascontiguousarray(full_output, np.float64)
        self._sample = expected.sample
        self._stats_tolerance = expected.stats_tolerance if expected.returns_stats else None
        self._stats: NDArray[np.float64] | None = None  # of the output's channels, after the first comparison
        self._reference_norm = expected.l2_norm
        self._last_busy_at = -math.inf
        self._outputs: dict[str, tuple[int, CudaFunction]] = {}  # memory and comparison by dtype
        self._copies: dict[str, list[list[int]]] = {}  # further copies of inputs and output, by the output's dtype
        with translate_errors(device), ExitStack() as stack:
            self._arrays = stack.enter_context(DeviceArrays())
            self._pointers = [self._arrays.allocate(array.nbytes) for array in self._inputs]
            self._reference_pointers = [self._arrays.allocate(array.nbytes) for array in self._reference_arrays]
            self._results_pointer = self._arrays.allocate(16)
            self._stream = stack.enter_context(create_stream(device.index))
            self._exit_stack = stack.pop_all()
        self.restore_inputs()
        # Compile now, while the first kernel is still being built.
        _compile_comparison(self._inputs[0].dtype.name, str(device.arch))

    @property
    def _reference_arrays(self) -> list[NDArray[Any]]:
        """Arrays at `_reference_pointers`: the full output if any, then the arrays of the sample if any."""
        arrays: list[NDArray[Any]] = [] if self._full_output is None else [self._full_output]
        if points := self._sample:
            arrays += [points.positions, points.values, points.max_errors]
        return arrays

    def restore_inputs(self) -> None:
        """Copy inputs and reference to the GPU; see `Benchmark.restore_inputs`."""
        with translate_errors(self._device):
            pointers, arrays = [*self._pointers, *self._reference_pointers], [*self._inputs, *self._reference_arrays]
            for pointer, array in zip(pointers, arrays, strict=True):
                copy_to_device(pointer, array)
            for copy in itertools.chain.from_iterable(self._copies.values()):
                self._copy_inputs(copy)

    def compare(self, kernel: LoadedKernel) -> OutputComparison:
        """Run once and compare on the GPU; see `Benchmark.compare`."""
        assert isinstance(kernel, CudaLoadedKernel)
        results = np.zeros(2)
        with kernel.translate_errors():
            pointer, comparison = self._get_output(kernel)
            fill_nan(pointer, kernel.executable.output.nbytes, self._stream)
            if self._stats_tolerance is not None:
                fill_nan(self._pointers[-1], self._inputs[-1].nbytes, self._stream)
            check_cuda(cuda.runtime.cudaMemsetAsync(self._results_pointer, 0, 16, self._stream))
            with kernel.bind([*self._pointers, pointer], self._stream) as bound:
                bound.launch()
                self._queue_comparison(comparison, pointer, math.prod(kernel.executable.output.shape))
                check_cuda(cuda.runtime.cudaStreamSynchronize(self._stream))
                self._arrays.download(self._results_pointer, results)
            comparison_result = OutputComparison(math.sqrt(results[0]) / self._reference_norm, float(results[1]))
            if self._stats_tolerance is not None and comparison_result.is_within_tolerance(self._stats_tolerance):
                stats_ratio = self._compare_stats(kernel, pointer, self._stats_tolerance)
                return replace(comparison_result, max_error_ratio=float(np.maximum(results[1], stats_ratio)))
        return comparison_result

    def _compare_stats(self, kernel: CudaLoadedKernel, output_pointer: int, tolerance: float) -> float:
        """Compare the statistics that a kernel returned with those of the first correct output."""
        if self._stats is None:
            output = np.empty(kernel.executable.output.shape, kernel.executable.output.dtype)
            self._arrays.download(output_pointer, output)
            self._stats = compute_stats(output)
        stats = np.empty_like(self._inputs[-1])
        self._arrays.download(self._pointers[-1], stats)
        return compare_stats(stats, self._stats, tolerance)

    def time(self, kernel: LoadedKernel, best_seconds: float) -> tuple[float, ...]:
        """Time replays of a CUDA graph; see `Benchmark.time`."""
        assert isinstance(kernel, CudaLoadedKernel)
        stream = self._stream
        with kernel.translate_errors(), ExitStack() as stack:
            bound = self._bind_copies(kernel, stack)
            capture_launches = make_capture(stream, lambda i: bound[i % len(bound)].launch())
            (launch_seconds,) = time_between_events(stream, capture_launches(1), 1)
            if launch_seconds >= LONG_LAUNCH_SECONDS:
                return (launch_seconds,)
            replay, launches = capture_until_long_enough(capture_launches, stream, launch_multiple=len(bound))
            if self._is_idle:
                warm_up(replay, stream)
            (first_seconds,) = time_between_events(stream, replay, 1)
            samples = [first_seconds]
            if fraction := measurement_fraction(first_seconds / launches, best_seconds):
                # The first replay does not count, because the GPU was idle before it.
                count = max(MIN_REPLAYS, round(fraction * FULL_REPLAY_SECONDS / first_seconds))
                samples = time_between_events(stream, replay, count)
        self._last_busy_at = time.monotonic()
        return tuple(sample / launches for sample in samples)

    def time_final(self, kernel: LoadedKernel) -> tuple[float, ...]:
        """Time replays as in a comparison with libraries; see `Benchmark.time_final`."""
        assert isinstance(kernel, CudaLoadedKernel)
        stream = self._stream
        warm_up_seconds = IDLE_WARM_UP_SECONDS if self._is_idle else WARM_UP_SECONDS
        with kernel.translate_errors(), ExitStack() as stack:
            bound = self._bind_copies(kernel, stack)
            capture = make_capture(stream, lambda i: bound[i % len(bound)].launch())
            seconds = time_replays(
                capture, stream, launch_multiple=len(bound), seconds=FINAL_SECONDS, warm_up_seconds=warm_up_seconds
            ).seconds
        self._last_busy_at = time.monotonic()
        return tuple(np.quantile(seconds, np.linspace(0, 1, NUM_FINAL_SAMPLES + 1), method="nearest").tolist())

    def close(self) -> None:
        """Free the GPU's memory."""
        self._exit_stack.close()

    @property
    def _is_idle(self) -> bool:
        """Whether the GPU may have lowered its clocks since the last timing, or since the start of the process."""
        return time.monotonic() - max(self._last_busy_at, sharing.get_last_use()) > IDLE_SECONDS

    def _bind_copies(self, kernel: CudaLoadedKernel, stack: ExitStack) -> list[BoundKernel]:
        """Bind a kernel to all copies of the arrays, of which there is one unless they exceed the L2 cache."""
        own_arrays = [*self._pointers, self._get_output(kernel)[0]]
        output, l2_bytes = kernel.executable.output, self._device.l2_bytes or 0
        if output.dtype not in self._copies:
            set_bytes = sum(array.nbytes for array in self._inputs) + output.nbytes
            sets = BufferSets.choose_count(set_bytes, l2_bytes, cold=set_bytes > l2_bytes)
            sizes = [*(array.nbytes for array in self._inputs), output.nbytes]
            copies = [[self._arrays.allocate(nbytes) for nbytes in sizes] for _ in range(sets.num_sets - 1)]
            self._copies[output.dtype] = copies
            for copy in copies:
                self._copy_inputs(copy)
        return [
            stack.enter_context(kernel.bind(pointers, self._stream))
            for pointers in (own_arrays, *self._copies[output.dtype])
        ]

    def _copy_inputs(self, pointers: Sequence[int]) -> None:
        """Copy the inputs to other arrays on the GPU, whose last one is an output."""
        for pointer, source, array in zip(pointers[:-1], self._pointers, self._inputs, strict=True):
            copy_on_device(pointer, source, array.nbytes)

    def _get_output(self, kernel: CudaLoadedKernel) -> tuple[int, CudaFunction]:
        """Return the address of a kernel's output, which kernels of one output dtype share, and its comparison."""
        output = kernel.executable.output
        if output.dtype not in self._outputs:
            function = CudaFunction(_compile_comparison(output.dtype, str(self._device.arch)), "compare")
            self._outputs[output.dtype] = self._arrays.allocate(output.nbytes), function
        return self._outputs[output.dtype]

    def _queue_comparison(self, function: CudaFunction, output: int, num_elements: int) -> None:
        """Queue the comparison of the `num_elements` elements of an output."""

        def launch(count: int, positions: int, reference: int, allowed: int, *, adds_errors: bool) -> None:
            blocks = min(ceil_div(count, _THREADS_PER_BLOCK), 8 * (self._device.multiprocessors or 1))
            shape = LaunchConfig(grid=(blocks, 1, 1), block=(_THREADS_PER_BLOCK, 1, 1))
            parameters = (output, positions, reference, allowed, count, self._results_pointer, int(adds_errors))
            function.launch(shape, parameters, self._stream)

        has_full = self._full_output is not None
        launch(num_elements, 0, self._reference_pointers[0] if has_full else 0, 0, adds_errors=True)
        if self._sample is not None:
            launch(self._sample.values.size, *self._reference_pointers[-3:], adds_errors=not has_full)


@functools.cache
def _compile_comparison(dtype: str, arch: str) -> bytes:
    return nvrtc.compile_cubin(format_comparison_source(dtype), arch).image


def format_comparison_source(dtype: str) -> str:
    """Return the CUDA source that compares an output of a dtype with a reference."""
    return _ELEMENT_DEFINITIONS[dtype] + _COMPARISON_SOURCE
