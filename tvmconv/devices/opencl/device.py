"""`opencl:N`: any OpenCL device through pyopencl; with PoCL, which comes from PyPI, the CPU is one."""

from __future__ import annotations

import atexit
import functools
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from tvmconv.devices.base import AbsentError, Device, first_line
from tvmconv.devices.opencl.kernel import OpenclBench, OpenclLoaded
from tvmconv.devices.opencl.pocl import patch_cpu_name
from tvmconv.scratch import Scratch

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from tvm.target import Target

    from tvmconv.compiler.program import Program
    from tvmconv.devices.comparison import Reference

PROBE_BYTES = 1 << 20  # more than what is cached of a kernel


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

    def load(self, program: Program) -> OpenclLoaded:
        """Compile a kernel with the device's own compiler; errors as in `Device.load`."""
        self.check_fits(program)
        return OpenclLoaded(self, program, _queue(self.index))

    def bench(self, inputs: Sequence[NDArray[Any]], reference: Reference | NDArray[np.float64]) -> OpenclBench:
        """Bring the inputs into the device's memory; see `Device.bench`."""
        return OpenclBench(self, _queue(self.index), inputs, reference)


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
            has_float16="cl_khr_fp16" in device.extensions.split(),
        )
        for index, device in enumerate(_devices())
    ]


@functools.cache
def _devices() -> tuple[Any, ...]:
    use_writable_caches()
    try:
        import pyopencl as cl
    except ImportError as error:
        raise AbsentError("opencl", f"pyopencl does not import ({first_line(error)})", _INSTALL) from error
    patch_cpu_name()
    try:
        found = [device for platform in cl.get_platforms() for device in platform.get_devices()]
    except cl.Error as error:
        raise AbsentError("opencl", f"no OpenCL driver ({first_line(error)})", _INSTALL) from error
    if not found:
        raise AbsentError("opencl", "no OpenCL driver has a device", _INSTALL)
    return tuple(sorted(found, key=lambda device: not device.type & cl.device_type.GPU))


_INSTALL = 'pip install "pyopencl[pocl]"'


def use_writable_caches() -> None:
    """Keep PoCL and PyOpenCL from caches that cannot be written to; call it before PyOpenCL is first imported.

    PoCL finds no device or ends the process without a cache, and gets one in the temporary directory. PyOpenCL raises
    AttributeError, and does without. Variables that are set already are left alone.
    """
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # there is no home directory
        caches = None
    if "POCL_CACHE_DIR" not in os.environ and not (caches and _is_writable(caches / "pocl" / "kcache")):
        scratch = Scratch("pocl-")
        os.environ["POCL_CACHE_DIR"] = str(scratch.path)
        atexit.register(scratch.close)
    if "PYOPENCL_NO_CACHE" not in os.environ and not (caches and _is_writable(caches / "pytools")):
        os.environ["PYOPENCL_NO_CACHE"] = "1"


def _is_writable(folder: Path) -> bool:
    """Return whether a file of `PROBE_BYTES` can be written to a folder, which is made if need be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(PROBE_BYTES))
            probe.flush()
    except OSError:
        return False
    return True


@functools.cache
def _queue(index: int) -> Any:
    """The device's queue with profiling, one a process."""
    device = _devices()[index]  # which prepares the import of PyOpenCL
    import pyopencl as cl

    context = cl.Context([device])
    return cl.CommandQueue(context, properties=cl.command_queue_properties.PROFILING_ENABLE)
