"""NVIDIA architectures to compile for with no GPU of that kind, or none at all."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from tvmconv import gpu
from tvmconv.compiler import nvrtc
from tvmconv.devices.base import Device
from tvmconv.errors import DeviceError

if TYPE_CHECKING:
    from tvm.target import Target

    from tvmconv.compiler.program import Program


class Arch(Device):
    """An architecture such as "sm_90" to compile for."""

    kind: ClassVar[str] = "cuda"

    def __init__(self, text: str) -> None:
        match = re.fullmatch(r"sm_([0-9]{2,3})a?", text)
        known = nvrtc.architectures()
        if match is None or (known and int(match[1]) not in known):
            expected = ", ".join(f"sm_{number}" for number in known) or "one such as sm_90"
            raise DeviceError(f"unknown architecture {text!r}: expected {expected}")
        limits = gpu.limits(text)
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

    def target(self) -> Target:
        """The CUDA target of this architecture."""
        return cuda_target(self.text, self.max_threads_per_block, self.shared_bytes_per_block)

    def load(self, program: Program) -> NoReturn:
        """Refuse."""
        self._refuse()

    def bench(self, inputs: Sequence[Any], reference: Any) -> NoReturn:
        """Refuse."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise DeviceError(f"{self.text} is to compile for only: to run the kernel choose cuda:N, opencl:N or auto")


def cuda_target(arch: str, threads_per_block: int, shared_bytes_per_block: int) -> Target:
    """A CUDA target of TVM with the LLVM host."""
    from tvm.target import Target

    return Target(
        {
            "kind": "cuda",
            "arch": arch,
            "max_threads_per_block": threads_per_block,
            "max_shared_memory_per_block": shared_bytes_per_block,
            "thread_warp_size": gpu.WARP,
            "host": "llvm",
        }
    )
