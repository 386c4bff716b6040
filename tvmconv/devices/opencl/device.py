"""`opencl:N`: any OpenCL device through pyopencl; with PoCL, which comes from PyPI, the CPU is one."""

from __future__ import annotations

import atexit
import functools
import os
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

    def bench(self, inputs: Sequence[NDArray[Any]], reference: NDArray[np.float64]) -> OpenclBench:
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
    try:
        import pyopencl as cl
    except ImportError as error:
        raise AbsentError("opencl", f"pyopencl does not import ({first_line(error)})", _INSTALL) from error
    _let_pocl_cache()
    patch_cpu_name()
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
        scratch = Scratch("pocl-")
        os.environ["POCL_CACHE_DIR"] = str(scratch.path)
        atexit.register(scratch.close)


@functools.cache
def _queue(index: int) -> Any:
    """The device's queue with profiling, one a process."""
    import pyopencl as cl

    context = cl.Context([_devices()[index]])
    return cl.CommandQueue(context, properties=cl.command_queue_properties.PROFILING_ENABLE)
