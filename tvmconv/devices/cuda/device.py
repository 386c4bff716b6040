"""Devices `cuda:N`, the NVIDIA GPUs of this machine, and their architectures as compilation targets without a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import numpy as np
from numpy.typing import NDArray

from tvmconv.compiler import nvrtc
from tvmconv.compiler.executable import Executable
from tvmconv.devices import cuda
from tvmconv.devices.comparison import ReferenceOutput
from tvmconv.devices.cuda.benchmark import CudaBenchmark
from tvmconv.devices.cuda.graphs import check_cuda, query_attribute
from tvmconv.devices.cuda.loaded_kernel import CudaLoadedKernel, DeviceArrays, translate_errors
from tvmconv.devices.cuda.nvml import GpuSensors
from tvmconv.devices.device import Device, DeviceNotFoundError, get_first_line
from tvmconv.devices.power import PowerSample
from tvmconv.errors import DeviceError
from tvmconv.optional_packages import format_install_command
from tvmconv.target import WARP_SIZE, find_architecture, get_block_limits

if TYPE_CHECKING:
    import tvm

DRIVER_FILES = ("/dev/nvidiactl", "/proc/driver/nvidia/version")
_NO_GPU_REMEDY = "use opencl:0, or compile only, for an architecture such as sm_90"


@dataclass(frozen=True)
class _NvidiaDevice(Device):
    """An NVIDIA GPU or architecture."""

    kind: ClassVar[str] = "cuda"

    def make_target(self) -> tvm.target.Target:
        """Return the CUDA target of the architecture, with an LLVM host."""
        from tvm.target import Target

        return Target(
            {
                "kind": "cuda",
                "arch": str(self.arch),
                "max_threads_per_block": self.max_threads_per_block,
                "max_shared_memory_per_block": self.shared_bytes_per_block,
                "thread_warp_size": WARP_SIZE,
                "host": "llvm",
            }
        )


class Arch(_NvidiaDevice):
    """An NVIDIA architecture, such as "sm_90", for which kernels are compiled but not run."""

    def __init__(self, text: str) -> None:
        match = re.fullmatch(r"sm_([0-9]{2,3})a?", text)
        supported = nvrtc.list_architectures()
        if match is None or (supported and int(match[1]) not in supported):
            expected = ", ".join(f"sm_{number}" for number in supported) or "one such as sm_90"
            raise DeviceError(f"unknown architecture {text!r}: expected {expected}")
        limits = get_block_limits(text)
        super().__init__(
            text=text,
            name=f"{text}, to compile for only",
            arch=text,
            memory_bytes=None,
            multiprocessors=None,
            max_threads_per_block=limits.max_threads,
            shared_bytes_per_block=limits.shared_bytes,
            opt_in_shared_bytes_per_block=limits.opt_in_shared_bytes,
        )

    def load(self, *_: Any) -> NoReturn:
        """Raise DeviceError, because an architecture runs no kernels."""
        raise DeviceError(f"{self.text} is to compile for only: to run the kernel choose cuda:N, opencl:N or auto")

    def create_benchmark(self, *_: Any) -> NoReturn:
        """Raise DeviceError, as `load` does."""
        self.load()


@dataclass(frozen=True)
class CudaDevice(_NvidiaDevice):
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

    def open_sensors(self) -> Callable[[], PowerSample]:
        """Return a function that reads clock and energy by NVML; see `Device.open_sensors`."""
        bus_id = check_cuda(cuda.runtime.cudaDeviceGetPCIBusId(32, self.index))
        return GpuSensors(bus_id.decode().rstrip("\0")).read

    @contextmanager
    def occupy_memory(self, sizes_bytes: Sequence[int]) -> Iterator[None]:
        """Allocate arrays until the end of a `with` block; see `Device.occupy_memory`."""
        with translate_errors(self), DeviceArrays() as arrays:
            for nbytes in sizes_bytes:
                arrays.allocate(nbytes)
            yield


def list_cuda_devices() -> list[CudaDevice]:
    """Return all NVIDIA GPUs, at least one."""
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        reason = f"cuda-bindings does not import ({get_first_line(error)})"
        remedy = format_install_command("cuda.bindings")
        has_driver = any(Path(file).exists() for file in DRIVER_FILES)
        raise DeviceNotFoundError("cuda", reason, remedy, has_driver=has_driver) from error
    status, count = runtime.cudaGetDeviceCount()
    if status == runtime.cudaError_t.cudaErrorInsufficientDriver:
        _, version = runtime.cudaDriverGetVersion()
        if version == 0:
            remedy = f"install it on a machine with an NVIDIA GPU, or {_NO_GPU_REMEDY}"
            raise DeviceNotFoundError("cuda", "no NVIDIA driver", remedy)
        driver = f"{version // 1000}.{version % 1000 // 10}"
        reason, remedy = f"the NVIDIA driver is of CUDA {driver}", f"update it to one of CUDA 13, or {_NO_GPU_REMEDY}"
        raise DeviceNotFoundError("cuda", reason, remedy, has_driver=True)
    if status != runtime.cudaError_t.cudaSuccess:
        reason = runtime.cudaGetErrorString(status)[1].decode()
        remedy = f"check nvidia-smi and CUDA_VISIBLE_DEVICES, or {_NO_GPU_REMEDY}"
        raise DeviceNotFoundError("cuda", reason, remedy)
    return [_query_device(index) for index in range(count)]


def _query_device(index: int) -> CudaDevice:
    properties = check_cuda(cuda.runtime.cudaGetDeviceProperties(index))
    arch = f"sm_{properties.major}{properties.minor}"
    lanes = find_architecture(arch).fp32_lanes
    # Clock rates are in kHz and the bus width in bits; memory transfers data twice per clock.
    flops = 2 * (lanes or 0) * properties.multiProcessorCount * query_attribute("ClockRate", index) * 1e3
    bandwidth = 2 * query_attribute("MemoryClockRate", index) * 1e3 * properties.memoryBusWidth / 8
    return CudaDevice(
        text=f"cuda:{index}",
        name=properties.name.decode(),
        arch=arch,
        memory_bytes=properties.totalGlobalMem,
        multiprocessors=properties.multiProcessorCount,
        max_threads_per_block=properties.maxThreadsPerBlock,
        shared_bytes_per_block=properties.sharedMemPerBlock,
        peak_flops=flops or None,
        peak_bandwidth=bandwidth or None,
        l2_bytes=properties.l2CacheSize,
        index=index,
        opt_in_shared_bytes_per_block=query_attribute("MaxSharedMemoryPerBlockOptin", index) or None,
    )
