"""Devices `cuda:N`: the NVIDIA GPUs of this machine and their properties."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvmconv.devices.arch import NvidiaGpu
from tvmconv.devices.cuda.benchmark import CudaBenchmark
from tvmconv.devices.cuda.graphs import check_cuda
from tvmconv.devices.cuda.loaded_kernel import CudaLoadedKernel
from tvmconv.devices.device import DeviceNotFoundError, get_first_line
from tvmconv.optional_packages import format_install_command
from tvmconv.target import find_architecture

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tvmconv.compiler.executable import Executable
    from tvmconv.devices.comparison import ReferenceOutput

DRIVER_FILES = ("/dev/nvidiactl", "/proc/driver/nvidia/version")
_NO_GPU_REMEDY = "use opencl:0, or compile only, for an architecture such as sm_90"


@dataclass(frozen=True)
class CudaDevice(NvidiaGpu):
    """An NVIDIA GPU of this machine."""

    def load(self, executable: Executable) -> CudaLoadedKernel:
        """Load the cubin of an executable; see `Device.load`."""
        self.check_block_limits(executable)
        return CudaLoadedKernel(self, executable)

    def create_benchmark(
        self, inputs: Sequence[NDArray[Any]], reference: ReferenceOutput | NDArray[np.float64]
    ) -> CudaBenchmark:
        """Copy inputs and reference to the GPU; see `Device.create_benchmark`."""
        return CudaBenchmark(self, inputs, reference)


def list_cuda_devices() -> list[CudaDevice]:
    """Return all NVIDIA GPUs, at least one."""
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        reason = f"cuda-bindings does not import ({get_first_line(error)})"
        remedy = format_install_command("cuda.bindings")
        raise DeviceNotFoundError("cuda", reason, remedy, has_driver=has_driver()) from error
    status, count = runtime.cudaGetDeviceCount()
    if status == runtime.cudaError_t.cudaErrorInsufficientDriver:
        _, version = runtime.cudaDriverGetVersion()
        if version == 0:
            remedy = f"install one on a machine with an NVIDIA GPU, or {_NO_GPU_REMEDY}"
            raise DeviceNotFoundError("cuda", "no NVIDIA driver", remedy)
        driver = f"{version // 1000}.{version % 1000 // 10}"
        reason, remedy = f"the NVIDIA driver is of CUDA {driver}", f"update it to one of CUDA 13, or {_NO_GPU_REMEDY}"
        raise DeviceNotFoundError("cuda", reason, remedy, has_driver=True)
    if status != runtime.cudaError_t.cudaSuccess:
        reason = runtime.cudaGetErrorString(status)[1].decode()
        remedy = f"check nvidia-smi and CUDA_VISIBLE_DEVICES, or {_NO_GPU_REMEDY}"
        raise DeviceNotFoundError("cuda", reason, remedy)
    return [_query_device(index) for index in range(count)]


def has_driver() -> bool:
    """Return whether the operating system has loaded NVIDIA's driver."""
    return any(Path(file).exists() for file in DRIVER_FILES)


def _query_device(index: int) -> CudaDevice:
    from cuda.bindings import runtime

    properties = check_cuda(runtime.cudaGetDeviceProperties(index))
    arch = f"sm_{properties.major}{properties.minor}"
    lanes = find_architecture(arch).fp32_lanes
    attribute = runtime.cudaDeviceAttr
    # Clock rates are in kHz and the bus width in bits; memory transfers data twice per clock.
    clock = check_cuda(runtime.cudaDeviceGetAttribute(attribute.cudaDevAttrClockRate, index)) * 1e3
    memory_clock = check_cuda(runtime.cudaDeviceGetAttribute(attribute.cudaDevAttrMemoryClockRate, index)) * 1e3
    opt_in = check_cuda(runtime.cudaDeviceGetAttribute(attribute.cudaDevAttrMaxSharedMemoryPerBlockOptin, index))
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
