"""What is known of an NVIDIA GPU, whoever runs kernels on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from tvmconv.devices.arch import cuda_target
from tvmconv.devices.base import Device

if TYPE_CHECKING:
    from tvm.target import Target


@dataclass(frozen=True)
class Gpu(Device):
    """An NVIDIA GPU.

    Attributes:
        index: its number, as CUDA counts.
    """

    index: int

    kind: ClassVar[str] = "cuda"

    def target(self) -> Target:
        """The CUDA target of this GPU's architecture."""
        return cuda_target(str(self.arch), self.max_threads_per_block, self.shared_bytes_per_block)
