"""NVIDIA GPUs, and their architectures as compilation targets without a GPU."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from tvmconv.compiler import nvrtc
from tvmconv.devices.device import Device
from tvmconv.errors import DeviceError
from tvmconv.target import WARP_SIZE, get_block_limits

if TYPE_CHECKING:
    from tvm.target import Target

    from tvmconv.compiler.executable import Executable


class Arch(Device):
    """An NVIDIA architecture, such as "sm_90", for which kernels are compiled but not run."""

    kind: ClassVar[str] = "cuda"

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
            peak_flops=None,
            peak_bandwidth=None,
            l2_bytes=None,
            opt_in_shared_bytes_per_block=limits.opt_in_shared_bytes,
        )

    def make_target(self) -> Target:
        """Return the CUDA target of this architecture."""
        return make_cuda_target(self.text, self.max_threads_per_block, self.shared_bytes_per_block)

    def load(self, executable: Executable) -> NoReturn:
        """Raise DeviceError, because an architecture runs no kernels."""
        self._refuse_to_run()

    def create_benchmark(self, inputs: Sequence[Any], reference: Any) -> NoReturn:
        """Raise DeviceError, because an architecture runs no kernels."""
        self._refuse_to_run()

    def _refuse_to_run(self) -> NoReturn:
        raise DeviceError(f"{self.text} is to compile for only: to run the kernel choose cuda:N, opencl:N or auto")


@dataclass(frozen=True)
class NvidiaGpu(Device):
    """An NVIDIA GPU, local or remote."""

    index: int  # device index of CUDA

    kind: ClassVar[str] = "cuda"

    def make_target(self) -> Target:
        """Return the CUDA target of this GPU's architecture."""
        return make_cuda_target(str(self.arch), self.max_threads_per_block, self.shared_bytes_per_block)


def make_cuda_target(arch: str, threads_per_block: int, shared_bytes_per_block: int) -> Target:
    """Return a CUDA target of TVM with an LLVM host.

    `shared_bytes_per_block`: maximum static shared memory per block in bytes.
    """
    from tvm.target import Target

    return Target(
        {
            "kind": "cuda",
            "arch": arch,
            "max_threads_per_block": threads_per_block,
            "max_shared_memory_per_block": shared_bytes_per_block,
            "thread_warp_size": WARP_SIZE,
            "host": "llvm",
        }
    )
