"""`opencl:N`: any OpenCL device through pyopencl; with PoCL, which comes from PyPI, the CPU is one.

TVM's wheel generates OpenCL and has no runtime for it, so launch shape and parameters are set here.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from tvmconv.devices.base import AbsentError, BufferSets, Device, Loaded, Timing, first_line, poisoned, set_bytes
from tvmconv.errors import CompileError, DeviceError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from tvm.target import Target

    from tvmconv.compiler.lower import Lowered

MIN_SAMPLES, MAX_SAMPLES = 3, 1000


@dataclass(frozen=True)
class OpenclDevice(Device):
    """An OpenCL device.

    Attributes:
        index: its number in `devices()`.
    """

    index: int

    kind: ClassVar[str] = "opencl"

    def target(self) -> Target:
        """The OpenCL target with this device's limits."""
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

    def load(self, lowered: Lowered) -> OpenclLoaded:
        """Compile a kernel with the device's own compiler; errors as in `Device.load`."""
        self.check_fits(lowered)
        return OpenclLoaded(self, lowered)


class OpenclLoaded(Loaded):
    """A kernel on an OpenCL device."""

    device: OpenclDevice

    def __init__(self, device: OpenclDevice, lowered: Lowered) -> None:
        import pyopencl as cl

        self.device = device
        self._lowered = lowered
        self._queue = _queue(device.index)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", cl.CompilerWarning)  # PoCL's compiler speaks of unused variables
            try:
                # No cache of pyopencl's besides the driver's own: it would need a home directory to write to.
                program = cl.Program(self._queue.context, lowered.source).build(cache_dir=False)
            except cl.Error as error:
                raise CompileError(f"{device.text} rejects the kernel: {_first_error(str(error))}") from error
        self._kernel = cl.Kernel(program, lowered.name)

    def run(self, inputs: Sequence[NDArray[Any]], output_shape: Sequence[int], output_dtype: str) -> NDArray[Any]:
        """Run once; see `Loaded.run`."""
        import pyopencl as cl

        with self._border():
            output = poisoned(output_shape, output_dtype)
            buffers = self._upload([*inputs, output])
            self._launch(buffers).wait()
            cl.enqueue_copy(self._queue, output, buffers[-1])
            return output

    def time(
        self,
        inputs: Sequence[NDArray[Any]],
        output_shape: Sequence[int],
        output_dtype: str,
        *,
        cold: bool = False,
        seconds: float = 0.5,
    ) -> Timing:
        """Time launches by their profiling events; see `Loaded.time`."""
        size = set_bytes(inputs, output_shape, output_dtype)
        sets = BufferSets.choose(size, self.device.l2_bytes or 0, cold=cold)
        samples: list[float] = []
        with self._border():
            buffers = [self._upload([*inputs, poisoned(output_shape, output_dtype)]) for _ in range(sets.count)]
            self._launch(buffers[-1]).wait()  # PoCL compiles for the work-group's size at the first launch
            while len(samples) < MIN_SAMPLES or (sum(samples) < seconds and len(samples) < MAX_SAMPLES):
                event = self._launch(buffers[len(samples) % sets.count])
                event.wait()
                samples.append((event.profile.end - event.profile.start) / 1e9)
        method = f"OpenCL profiling events of {len(samples)} launches, {sets.describe('cache')}"
        return Timing(tuple(samples), method, cold)

    def _upload(self, arrays: Sequence[NDArray[Any]]) -> list[Any]:
        """Copies of the arrays on the device."""
        import pyopencl as cl

        flags = cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR
        return [cl.Buffer(self._queue.context, flags, hostbuf=np.ascontiguousarray(array)) for array in arrays]

    def _launch(self, buffers: Sequence[Any]) -> Any:
        """Queue the kernel on buffers in the order of the PrimFunc's arguments; its event."""
        import pyopencl as cl

        launch = self._lowered.launch
        self._kernel.set_args(*(buffers[i] for i in self._lowered.arguments))
        work_items = tuple(grid * block for grid, block in zip(launch.grid, launch.block, strict=True))
        return cl.enqueue_nd_range_kernel(self._queue, self._kernel, work_items, launch.block)

    @contextmanager
    def _border(self) -> Iterator[None]:
        """Turn errors of OpenCL into a DeviceError of one line."""
        import pyopencl as cl

        try:
            yield
        except cl.Error as error:
            launch = self._lowered.launch
            raise DeviceError(f"{self.device.text}: {first_line(error)}, launched as {launch}") from error


def devices() -> list[OpenclDevice]:
    """All OpenCL devices, at least one: GPUs first, then the others; among each, in the order of their platforms.

    Raises:
        AbsentError: there is none, with the reason.
    """
    return [
        OpenclDevice(
            text=f"opencl:{index}",
            name=f"{device.name.strip()} ({device.platform.name.strip()})",
            arch=None,
            memory_bytes=device.global_mem_size,
            multiprocessors=device.max_compute_units,
            max_threads_per_block=device.max_work_group_size,
            shared_bytes_per_block=device.local_mem_size,
            peak_flops=None,
            peak_bandwidth=None,
            l2_bytes=device.global_mem_cache_size,
            index=index,
        )
        for index, device in enumerate(_devices())
    ]


@functools.cache
def _devices() -> tuple[Any, ...]:
    try:
        import pyopencl as cl
    except ImportError as error:
        raise AbsentError("opencl", f"pyopencl does not import ({first_line(error)})", _INSTALL) from error
    _let_pocl_cache()
    try:
        found = [device for platform in cl.get_platforms() for device in platform.get_devices()]
    except cl.Error as error:
        raise AbsentError("opencl", f"no OpenCL driver ({first_line(error)})", _INSTALL) from error
    if not found:
        raise AbsentError("opencl", "no OpenCL driver has a device", _INSTALL)
    return tuple(sorted(found, key=lambda device: not device.type & cl.device_type.GPU))


_INSTALL = 'pip install "pyopencl[pocl]"'


def _let_pocl_cache() -> None:
    """Give PoCL a cache in the temporary directory where its own is not writable: it finds no device without one."""
    if "POCL_CACHE_DIR" in os.environ:
        return
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pocl" / "kcache"
        cache.mkdir(parents=True, exist_ok=True)
        writable = os.access(cache, os.W_OK)
    except (OSError, RuntimeError):  # RuntimeError: no home directory
        writable = False
    if not writable:
        temporary = os.environ["POCL_CACHE_DIR"] = tempfile.mkdtemp(prefix="pocl-")
        atexit.register(shutil.rmtree, temporary, ignore_errors=True)


@functools.cache
def _queue(index: int) -> Any:
    """The device's queue with profiling, one a process."""
    import pyopencl as cl

    context = cl.Context([_devices()[index]])
    return cl.CommandQueue(context, properties=cl.command_queue_properties.PROFILING_ENABLE)


def _first_error(log: str) -> str:
    """The first line of a build log that tells an error."""
    lines = [line.strip() for line in log.splitlines() if "error:" in line]
    return (lines or log.strip().splitlines())[0]
