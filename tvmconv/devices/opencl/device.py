"""Devices `opencl:N`: all OpenCL devices that pyopencl finds; with PoCL from PyPI, this includes the CPU."""

from __future__ import annotations

import atexit
import functools
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from tvmconv.devices.device import Device, DeviceNotFoundError, get_first_line
from tvmconv.devices.opencl.loaded_kernel import OpenclBenchmark, OpenclLoadedKernel
from tvmconv.devices.opencl.pocl import patch_cpu_name
from tvmconv.tempdir import ProcessTempDir

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from tvm.target import Target

    from tvmconv.compiler.executable import Executable
    from tvmconv.devices.comparison import ReferenceOutput

PROBE_BYTES = 1 << 20  # more than the cached data of a kernel


@dataclass(frozen=True)
class OpenclDevice(Device):
    """An OpenCL device."""

    index: int  # index in `list_opencl_devices()`

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
            peak_flops=None,
            peak_bandwidth=None,
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


_INSTALL_COMMAND = 'pip install "pyopencl[pocl]"'


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
