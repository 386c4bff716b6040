"""Execution and measurement of kernels on an OpenCL device.

TVM's wheel generates OpenCL but has no OpenCL runtime, so this module sets parameters and launch shapes itself.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tvmconv.devices.comparison import OutputComparison, ReferenceOutput, make_reference
from tvmconv.devices.device import (
    LONG_LAUNCH_SECONDS,
    Benchmark,
    BufferSets,
    Device,
    LoadedKernel,
    Timing,
    check_inputs,
    get_first_line,
    measurement_fraction,
    nan_filled,
)
from tvmconv.errors import CompileError, DeviceError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tvmconv.compiler.executable import Executable

MIN_SAMPLES, MAX_SAMPLES = 3, 1000
MAX_SLOW_SECONDS = 1.0  # after this time MIN_SAMPLES are enough
BENCHMARK_SECONDS, MAX_BENCHMARK_SAMPLES = 0.2, 20  # limits for a kernel that may become the best


class OpenclLoadedKernel(LoadedKernel):
    """An executable that is loaded on an OpenCL device; see `LoadedKernel`."""

    def __init__(self, device: Device, executable: Executable, queue: Any) -> None:
        import pyopencl as cl

        self.device = device
        self.executable = executable
        self._queue = queue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", cl.CompilerWarning)  # PoCL warns of unused variables
            try:
                # The driver has its own cache; that of pyopencl would need a writable home directory.
                built_programs = {
                    code: cl.Program(queue.context, read_source_header() + code.decode()).build(cache_dir=False)
                    for code in {kernel.code for kernel in executable.kernels}
                }
            except cl.Error as error:
                raise CompileError(f"{device.text} rejects the kernel: {_find_first_error(str(error))}") from error
        self._kernels = [cl.Kernel(built_programs[kernel.code], kernel.name) for kernel in executable.kernels]

    def run(self, inputs: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """Run once; see `LoadedKernel.run`."""
        check_inputs(self.executable, inputs)
        output = nan_filled(self.executable.output)
        with self.translate_errors():
            return self.run_on_buffers(upload_arrays(self._queue, [*inputs, output]), output)

    def run_on_buffers(self, buffers: Sequence[Any], output: NDArray[Any]) -> NDArray[Any]:
        """Run once on device buffers, copy the last one to `output` and return it; within `translate_errors`."""
        self._launch_kernels([*buffers, *self.allocate_workspace(buffers)])[-1].wait()
        download_array(self._queue, output, buffers[-1])
        return output

    def time(self, inputs: Sequence[NDArray[Any]], *, cold: bool = False, seconds: float = 0.5) -> Timing:
        """Time launches by their profiling events; see `LoadedKernel.time`."""
        check_inputs(self.executable, inputs)
        output = nan_filled(self.executable.output)
        sets = BufferSets.choose_count(self.executable.nbytes, self.device.l2_bytes or 0, cold=cold)
        samples: list[float] = []
        with self.translate_errors():
            arrays = [upload_arrays(self._queue, [*inputs, output]) for _ in range(sets.num_sets)]
            buffers = [[*array_set, *self.allocate_workspace(array_set)] for array_set in arrays]
            self._launch_kernels(buffers[-1])[-1].wait()  # PoCL compiles for the work-group size at the first launch
            while _needs_more_samples(samples, seconds):
                samples.append(self.time_launch(buffers[len(samples) % sets.num_sets]))
        method = f"OpenCL profiling events of {len(samples)} launches, {sets.describe('cache')}"
        return Timing(tuple(samples), method, cold)

    def time_launch(self, buffers: Sequence[Any]) -> float:
        """Return the seconds from the start of the first timed device function to the end of the last.

        The result is at least a nanosecond, because the device's clock may be coarse. Call it within
        `translate_errors`.

        `buffers`: buffers of the executable's `arrays`, followed by those of `allocate_workspace`.
        """
        events = self._launch_kernels(buffers)
        events[-1].wait()
        return max(events[-1].profile.end - events[0].profile.start, 1) / 1e9

    def allocate_workspace(self, buffers: Sequence[Any]) -> list[Any]:
        """Allocate the workspace, filled with NaN, and launch the prepack kernels on it and the `arrays`."""
        workspace = upload_arrays(self._queue, [nan_filled(array) for array in self.executable.workspace])
        self._launch_kernels([*buffers, *workspace], range(self.executable.num_prepack_kernels))
        return workspace

    def _launch_kernels(self, buffers: Sequence[Any], kernel_indices: range | None = None) -> list[Any]:
        """Queue device functions and return their events.

        `buffers`: buffers of the executable's `arrays`, followed by those of `allocate_workspace`.
        `kernel_indices`: indices of the device functions; all except the prepack kernels by default.
        """
        import pyopencl as cl

        if kernel_indices is None:
            kernel_indices = range(self.executable.num_prepack_kernels, len(self.executable.kernels))
        events: list[Any] = []
        for index in kernel_indices:
            compiled_kernel, kernel = self.executable.kernels[index], self._kernels[index]
            grid, block = compiled_kernel.launch.grid, compiled_kernel.launch.block
            kernel.set_args(*(buffers[i] for i in compiled_kernel.arguments))
            work_items = tuple(blocks * threads for blocks, threads in zip(grid, block, strict=True))
            events.append(cl.enqueue_nd_range_kernel(self._queue, kernel, work_items, block))
        return events

    @contextmanager
    def translate_errors(self) -> Iterator[None]:
        """Translate OpenCL errors of the block to a one-line DeviceError."""
        import pyopencl as cl

        try:
            yield
        except cl.Error as error:
            message = f"{self.device.text}: {get_first_line(error)}, launched as {self.executable.launch_text}"
            raise DeviceError(message) from error


class OpenclBenchmark(Benchmark):
    """Arrays of a workload in the memory of an OpenCL device; see `Benchmark`."""

    def __init__(
        self,
        device: Device,
        queue: Any,
        inputs: Sequence[NDArray[Any]],
        reference: ReferenceOutput | NDArray[np.float64],
    ) -> None:
        self._device = device
        self._queue = queue
        self._inputs = inputs
        self._reference = make_reference(reference)
        self.restore_inputs()

    def restore_inputs(self) -> None:
        """Copy the inputs to the device; see `Benchmark.restore_inputs`."""
        import pyopencl as cl

        try:
            self._buffers = upload_arrays(self._queue, self._inputs)
        except cl.Error as error:
            raise DeviceError(f"{self._device.text}: {get_first_line(error)}") from error

    def compare(self, kernel: LoadedKernel) -> OutputComparison:
        """Run once and compare on the host; see `Benchmark.compare`."""
        assert isinstance(kernel, OpenclLoadedKernel)
        output = nan_filled(kernel.executable.output)
        with kernel.translate_errors():
            kernel.run_on_buffers([*self._buffers, *upload_arrays(self._queue, [output])], output)
        return self._reference.compare(output)

    def time(self, kernel: LoadedKernel, best_seconds: float) -> tuple[float, ...]:
        """Time single launches by their profiling events; see `Benchmark.time`."""
        assert isinstance(kernel, OpenclLoadedKernel)
        with kernel.translate_errors():
            output = upload_arrays(self._queue, [nan_filled(kernel.executable.output)])
            arrays = [*self._buffers, *output]
            buffers = [*arrays, *kernel.allocate_workspace(arrays)]
            samples = [kernel.time_launch(buffers)]
            seconds = measurement_fraction(samples[0], best_seconds) * BENCHMARK_SECONDS
            if seconds and samples[0] < LONG_LAUNCH_SECONDS:
                count = min(max(seconds / samples[0], MIN_SAMPLES), MAX_BENCHMARK_SAMPLES)
                samples += [kernel.time_launch(buffers) for _ in range(int(count))]
        return tuple(samples)

    def close(self) -> None:
        """Free the memory on the device."""
        for buffer in self._buffers:
            buffer.release()


def _needs_more_samples(samples: Sequence[float], seconds: float) -> bool:
    """Return whether a timing of about `seconds` needs more samples."""
    if not samples:
        return True
    if samples[0] >= LONG_LAUNCH_SECONDS:
        return False
    min_total_seconds = seconds if len(samples) >= MIN_SAMPLES else max(seconds, MAX_SLOW_SECONDS)
    return sum(samples) < min_total_seconds and len(samples) < MAX_SAMPLES


def read_source_header() -> str:
    """Return the text that precedes every OpenCL program: the file that `TVMCONV_OPENCL_HEADER` names, or nothing."""
    name = os.environ.get("TVMCONV_OPENCL_HEADER")
    return f"{Path(name).read_text(encoding='utf-8')}\n" if name else ""


def upload_arrays(queue: Any, arrays: Sequence[NDArray[Any]]) -> list[Any]:
    """Copy arrays to new buffers on the device of `queue`."""
    import pyopencl as cl

    flags = cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR
    return [cl.Buffer(queue.context, flags, hostbuf=_view_bytes(np.ascontiguousarray(array))) for array in arrays]


def download_array(queue: Any, array: NDArray[Any], buffer: Any) -> None:
    """Copy a buffer to a C-contiguous array."""
    import pyopencl as cl

    cl.enqueue_copy(queue, _view_bytes(array), buffer)


def _view_bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    """Return an array as bytes, because Python's buffer protocol has no bfloat16."""
    return array.reshape(-1).view(np.uint8)


def _find_first_error(log: str) -> str:
    """Return the first line of a build log with an error."""
    lines = [line.strip() for line in log.splitlines() if "error:" in line]
    return (lines or log.strip().splitlines())[0]
