"""Devices `opencl:N`: all OpenCL devices that pyopencl finds; with PoCL from PyPI, this includes the CPU.

TVM's wheel generates OpenCL but has no OpenCL runtime, so this module sets parameters and launch shapes itself.
"""

from __future__ import annotations

import atexit
import functools
import os
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from tvmconv.compiler.executable import Executable
from tvmconv.compiler.source import adapt_to_cpu
from tvmconv.devices.comparison import OutputComparison, ReferenceOutput, make_reference
from tvmconv.devices.device import (
    LONG_LAUNCH_SECONDS,
    Benchmark,
    BufferSets,
    Device,
    DeviceNotFoundError,
    LoadedKernel,
    Timing,
    check_inputs,
    get_first_line,
    measurement_fraction,
    nan_filled,
)
from tvmconv.devices.pocl import patch_cpu_name
from tvmconv.errors import CompileError, DeviceError
from tvmconv.tempdir import ProcessTempDir

if TYPE_CHECKING:
    from tvm.target import Target

PROBE_BYTES = 1 << 20  # more than the cached data of a kernel
MIN_SAMPLES, MAX_SAMPLES = 3, 1000
MAX_SLOW_SECONDS = 1.0  # after this time MIN_SAMPLES are enough
BENCHMARK_SECONDS, MAX_BENCHMARK_SAMPLES = 0.2, 20  # limits for a kernel that may become the best
_INSTALL_COMMAND = 'pip install "pyopencl[pocl]"'


@dataclass(frozen=True)
class OpenclDevice(Device):
    """An OpenCL device."""

    kind: ClassVar[str] = "opencl"

    def make_target(self) -> Target:
        """Return the OpenCL target with the limits of this device."""
        from tvm.target import Target

        return Target(
            {
                "kind": "opencl",
                "max_num_threads": self.max_threads_per_block,
                "max_threads_per_block": self.max_threads_per_block,
                "max_shared_memory_per_block": self.shared_bytes_per_block,
                "host": "llvm",
            }
        )

    def load(self, executable: Executable) -> OpenclLoadedKernel:
        """Compile an executable with the compiler of the device; see `Device.load`."""
        self.check_block_limits(executable)
        return OpenclLoadedKernel(self, executable, _get_queue(self.index))

    def create_benchmark(
        self, inputs: Sequence[NDArray[Any]], reference: ReferenceOutput | NDArray[np.float64]
    ) -> OpenclBenchmark:
        """Copy the inputs to the device; see `Device.create_benchmark`."""
        return OpenclBenchmark(self, _get_queue(self.index), inputs, reference)


def list_opencl_devices() -> list[OpenclDevice]:
    """Return all OpenCL devices, at least one: GPUs first, and otherwise in the order of their platforms."""
    return [
        OpenclDevice(
            text=f"opencl:{index}",
            name=f"{device.name.strip()} ({device.platform.name.strip()})",
            arch=None,
            memory_bytes=device.global_mem_size,
            multiprocessors=device.max_compute_units,
            max_threads_per_block=device.max_work_group_size,
            shared_bytes_per_block=device.local_mem_size,
            l2_bytes=device.global_mem_cache_size,
            index=index,
            has_float16="cl_khr_fp16" in device.extensions.split(),
        )
        for index, device in enumerate(_query_devices())
    ]


@functools.cache
def _query_devices() -> tuple[Any, ...]:
    use_writable_caches()
    try:
        import pyopencl as cl
    except ImportError as error:
        reason = f"pyopencl does not import ({get_first_line(error)})"
        raise DeviceNotFoundError("opencl", reason, _INSTALL_COMMAND) from error
    patch_cpu_name()
    try:
        all_devices = [device for platform in cl.get_platforms() for device in platform.get_devices()]
    except cl.Error as error:
        raise DeviceNotFoundError("opencl", f"no OpenCL driver ({get_first_line(error)})", _INSTALL_COMMAND) from error
    if not all_devices:
        raise DeviceNotFoundError("opencl", "no OpenCL driver has a device", _INSTALL_COMMAND)
    return tuple(sorted(all_devices, key=lambda device: not device.type & cl.device_type.GPU))


def use_writable_caches() -> None:
    """Redirect the caches of PoCL and PyOpenCL if their folders are not writable, before PyOpenCL is imported.

    PoCL finds no device or aborts the process without a cache, so it gets a temporary folder. PyOpenCL raises
    AttributeError, so its cache is disabled. Environment variables that are already set stay unchanged.
    """
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # no home directory
        caches = None
    if "POCL_CACHE_DIR" not in os.environ and not (caches and _is_writable(caches / "pocl" / "kcache")):
        temp_dir = ProcessTempDir("pocl-")
        os.environ["POCL_CACHE_DIR"] = str(temp_dir.path)
        atexit.register(temp_dir.close)
    if "PYOPENCL_NO_CACHE" not in os.environ and not (caches and _is_writable(caches / "pytools")):
        os.environ["PYOPENCL_NO_CACHE"] = "1"


def _is_writable(folder: Path) -> bool:
    """Return whether a file of `PROBE_BYTES` can be written to a folder, which is created if necessary."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(PROBE_BYTES))
            probe.flush()
    except OSError:
        return False
    return True


@functools.cache
def _get_queue(index: int) -> Any:
    """Return the command queue of a device, with profiling; there is one per device and process."""
    device = _query_devices()[index]  # also prepares the import of PyOpenCL
    import pyopencl as cl

    context = cl.Context([device])
    return cl.CommandQueue(context, properties=cl.command_queue_properties.PROFILING_ENABLE)


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
                    code: cl.Program(queue.context, _make_program_text(code.decode(), queue)).build(cache_dir=False)
                    for code in {kernel.code for kernel in executable.kernels}
                }
            except cl.Error as error:
                raise CompileError(f"{device.text} rejects the kernel: {_find_first_error(str(error))}") from error
        self._kernels = [cl.Kernel(built_programs[kernel.code], kernel.name) for kernel in executable.kernels]

    def run(self, inputs: Sequence[NDArray[Any]], written: NDArray[Any] | None = None) -> NDArray[Any]:
        """Run once; see `LoadedKernel.run`."""
        check_inputs(self.executable, inputs)
        output = nan_filled(self.executable.output)
        with self.translate_errors():
            return self.run_on_buffers(upload_arrays(self._queue, [*inputs, output]), output)

    def run_on_buffers(self, buffers: Sequence[Any], output: NDArray[Any]) -> NDArray[Any]:
        """Run once on device buffers, copy the last one to `output` and return it; within `translate_errors`."""
        import pyopencl as cl

        self._launch_kernels([*buffers, *self.allocate_workspace(buffers)])[-1].wait()
        cl.enqueue_copy(self._queue, _view_bytes(output), buffers[-1])
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

    def translate_errors(self) -> AbstractContextManager[None]:
        """Return a context of `_translate_errors` that adds this kernel's launch shape to messages."""
        return _translate_errors(self.device, f", launched as {self.executable.launch_text}")


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
        with _translate_errors(self._device):
            self._buffers = upload_arrays(self._queue, self._inputs)

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


@contextmanager
def _translate_errors(device: Device, context: str = "") -> Iterator[None]:
    """Translate OpenCL errors of the block to a one-line DeviceError."""
    import pyopencl as cl

    try:
        yield
    except cl.Error as error:
        raise DeviceError(f"{device.text}: {get_first_line(error)}{context}") from error


def _needs_more_samples(samples: Sequence[float], seconds: float) -> bool:
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


def _make_program_text(source: str, queue: Any) -> str:
    """Return a generated source as it is compiled for the device of `queue`."""
    import pyopencl as cl

    is_cpu = queue.device.type & cl.device_type.CPU
    return read_source_header() + (adapt_to_cpu(source) if is_cpu else source)


def upload_arrays(queue: Any, arrays: Sequence[NDArray[Any]]) -> list[Any]:
    """Copy arrays to new buffers on the device of `queue`."""
    import pyopencl as cl

    flags = cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR
    return [cl.Buffer(queue.context, flags, hostbuf=_view_bytes(np.ascontiguousarray(array))) for array in arrays]


def _view_bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    """Return an array as bytes, because Python's buffer protocol has no bfloat16."""
    return array.reshape(-1).view(np.uint8)


def _find_first_error(log: str) -> str:
    """Return the first line of a build log with an error."""
    lines = [line.strip() for line in log.splitlines() if "error:" in line]
    return (lines or log.strip().splitlines())[0]
