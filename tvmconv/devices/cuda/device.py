"""`cuda:N`: NVIDIA GPUs, and what is known of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvmconv.devices.base import AbsentError, first_line
from tvmconv.devices.cuda.bench import CudaBench
from tvmconv.devices.cuda.gpu import Gpu
from tvmconv.devices.cuda.graphs import check
from tvmconv.devices.cuda.kernel import CudaLoaded
from tvmconv.extras import how_to_install
from tvmconv.gpu import fp32_lanes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tvmconv.compiler.program import Program
    from tvmconv.devices.comparison import Reference

DRIVER_FILES = ("/dev/nvidiactl", "/proc/driver/nvidia/version")
_NO_GPU = "use opencl:0, or compile only, for an architecture such as sm_90"


@dataclass(frozen=True)
class CudaDevice(Gpu):
    """An NVIDIA GPU of this machine."""

    def load(self, program: Program) -> CudaLoaded:
        """Load a kernel's cubin; errors as in `Device.load`."""
        self.check_fits(program)
        return CudaLoaded(self, program)

    def bench(self, inputs: Sequence[NDArray[Any]], reference: Reference | NDArray[np.float64]) -> CudaBench:
        """Bring inputs and reference into the GPU's memory; see `Device.bench`."""
        return CudaBench(self, inputs, reference)


def devices() -> list[CudaDevice]:
    """All NVIDIA GPUs, at least one.

    Raises:
        AbsentError: there is none, with the reason.
    """
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        reason = f"cuda-bindings does not import ({first_line(error)})"
        raise AbsentError("cuda", reason, how_to_install("cuda.bindings"), has_driver=has_driver()) from error
    status, count = runtime.cudaGetDeviceCount()
    if status == runtime.cudaError_t.cudaErrorInsufficientDriver:
        _, version = runtime.cudaDriverGetVersion()
        if version == 0:
            raise AbsentError("cuda", "no NVIDIA driver", f"install one on a machine with an NVIDIA GPU, or {_NO_GPU}")
        driver = f"{version // 1000}.{version % 1000 // 10}"
        reason, remedy = f"the NVIDIA driver is of CUDA {driver}", f"update it to one of CUDA 13, or {_NO_GPU}"
        raise AbsentError("cuda", reason, remedy, has_driver=True)
    if status != runtime.cudaError_t.cudaSuccess:
        reason = runtime.cudaGetErrorString(status)[1].decode()
        raise AbsentError("cuda", reason, f"see what nvidia-smi and CUDA_VISIBLE_DEVICES say, or {_NO_GPU}")
    return [_describe(index) for index in range(count)]


def has_driver() -> bool:
    """Return whether the kernel of this machine has loaded NVIDIA's driver; needs no library."""
    return any(Path(file).exists() for file in DRIVER_FILES)


def _describe(index: int) -> CudaDevice:
    from cuda.bindings import runtime

    properties = check(runtime.cudaGetDeviceProperties(index))
    arch = f"sm_{properties.major}{properties.minor}"
    lanes = fp32_lanes(arch)
    attribute = runtime.cudaDeviceAttr
    # Clocks are in kHz, the bus width in bits; memory transfers twice a clock.
    clock = check(runtime.cudaDeviceGetAttribute(attribute.cudaDevAttrClockRate, index)) * 1e3
    memory_clock = check(runtime.cudaDeviceGetAttribute(attribute.cudaDevAttrMemoryClockRate, index)) * 1e3
    opt_in = check(runtime.cudaDeviceGetAttribute(attribute.cudaDevAttrMaxSharedMemoryPerBlockOptin, index))
    bandwidth = 2 * memory_clock * properties.memoryBusWidth / 8
    return CudaDevice(
        text=f"cuda:{index}",
        name=properties.name.decode(),
        arch=arch,
        memory_bytes=properties.totalGlobalMem,
        multiprocessors=properties.multiProcessorCount,
        max_threads_per_block=properties.maxThreadsPerBlock,
        shared_bytes_per_block=properties.sharedMemPerBlock,
        peak_flops=2 * lanes * properties.multiProcessorCount * clock if lanes else None,
        peak_bandwidth=bandwidth or None,
        l2_bytes=properties.l2CacheSize,
        opt_in_shared_bytes_per_block=opt_in or None,
        index=index,
    )
