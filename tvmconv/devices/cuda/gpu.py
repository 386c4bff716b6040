"""NVIDIA GPUs, local or remote."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from tvmconv.devices.arch import make_cuda_target
from tvmconv.devices.device import Device

if TYPE_CHECKING:
    from tvm.target import Target


@dataclass(frozen=True)
class NvidiaGpu(Device):
    """An NVIDIA GPU."""

    index: int  # device index of CUDA

    kind: ClassVar[str] = "cuda"

    def make_target(self) -> Target:
        """Return the CUDA target of this GPU's architecture."""
        return make_cuda_target(str(self.arch), self.max_threads_per_block, self.shared_bytes_per_block)
