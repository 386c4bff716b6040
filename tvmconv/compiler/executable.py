"""A built kernel as plain data: all that a device needs to run it, without TVM and in another process."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import ml_dtypes  # noqa: F401  lets NumPy know bfloat16 by its name
import numpy as np

from tvmconv.errors import DeviceError

if TYPE_CHECKING:
    from tvmconv.compiler.nvrtc import Resources
    from tvmconv.gpu_specs import BlockLimits
    from tvmconv.tensor_map import TensorMap


@dataclass(frozen=True)
class LaunchConfig:
    """A kernel's launch shape, each as (x, y, z).

    Attributes:
        grid: blocks.
        block: threads of a block.
        cluster: blocks of a cluster, which the code has fixed; whoever launches need not tell them.
    """

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int] = (1, 1, 1)

    @property
    def threads_per_block(self) -> int:
        """Threads of one block."""
        return math.prod(self.block)

    @property
    def num_blocks(self) -> int:
        """Blocks of the grid."""
        return math.prod(self.grid)

    def __str__(self) -> str:
        grid, block, cluster = ("·".join(map(str, extents)) for extents in (self.grid, self.block, self.cluster))
        return f"{grid} × {block}" + (f" in clusters of {cluster}" if math.prod(self.cluster) > 1 else "")


@dataclass(frozen=True)
class ArrayType:
    """Shape and dtype of a dense array in C order."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class CompiledKernel:
    """One device function, compiled as far as it can be without its device.

    Attributes:
        code: a cubin for CUDA, the text for OpenCL; steps that were generated together have the same.
        name: the kernel's symbol in it.
        launch: grid and block.
        arguments: for each parameter of the device function, in its order, the index of what goes there: of one of the
            program's `arrays`, or behind these of one of its `scratch`.
        shared_bytes: static shared memory of a block.
        dynamic_shared_bytes: shared memory of a block that the launch asks for.
        constants: arrays that CUDA code reads from constant memory, each the index of one of `arrays` and the symbol to
            fill with it.
        textures: indices of those of `arrays` that the function takes as texture objects: of float elements, as wide as
            what is behind the first axis.
        tensor_maps: parameters that are no address but a tensor map over the array, each its position among
            `arguments` and the map.
        uses_pdl: whether it may be launched before the step before it is done, for whose end it waits by itself. What
            that one writes it has to read by instructions that no compiler moves to before the wait.
        resources: what ptxas reports; None for OpenCL.
    """

    code: bytes
    name: str
    launch: LaunchConfig
    arguments: tuple[int, ...]
    shared_bytes: int
    dynamic_shared_bytes: int = 0
    constants: tuple[tuple[int, str], ...] = ()
    textures: tuple[int, ...] = ()
    tensor_maps: tuple[tuple[int, TensorMap], ...] = ()
    uses_pdl: bool = False
    resources: Resources | None = None


@dataclass(frozen=True)
class Executable:
    """Steps that are launched one after another, each when the one before it is done.

    Attributes:
        kernels: in their order, at least one.
        arrays: the PrimFunc's arguments, inputs first and the output last.
        workspace: memory that one step leaves for the next, allocated by whoever launches; nothing is in it before.
        num_prepack_kernels: how many steps, at the beginning, read nothing but arguments that stay as they are, a
            weight, say: whoever launches again with the same ones, and with the same scratch memory, may leave these
            steps out. They are in no time.
    """

    kernels: tuple[CompiledKernel, ...]
    arrays: tuple[ArrayType, ...]
    workspace: tuple[ArrayType, ...] = ()
    num_prepack_kernels: int = 0

    @property
    def output(self) -> ArrayType:
        """The last of `arrays`."""
        return self.arrays[-1]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays and of the scratch memory."""
        return sum(array.nbytes for array in (*self.arrays, *self.workspace))

    @property
    def launch_text(self) -> str:
        """The launch shape of each step, for messages."""
        return ", then ".join(str(kernel.launch) for kernel in self.kernels)


class BlockResources(Protocol):
    """What a block of a step takes of a device."""

    @property
    def launch(self) -> LaunchConfig:
        """Grid and block."""

    @property
    def shared_bytes(self) -> int:
        """Static shared memory of a block."""

    @property
    def dynamic_shared_bytes(self) -> int:
        """Shared memory of a block that the launch asks for."""


def check_block_limits(kernels: Sequence[BlockResources], limits: BlockLimits, device_name: str) -> None:
    """Raise DeviceError if a block of a step is larger than the limits of a device, which is called `device_name`,
    allow.
    """
    for kernel in kernels:
        static_bytes, dynamic_bytes = kernel.shared_bytes, kernel.dynamic_shared_bytes
        if kernel.launch.threads_per_block > limits.max_threads:
            raise DeviceError(
                f"{device_name} runs at most {limits.max_threads} threads a block and the kernel has "
                f"{kernel.launch.threads_per_block}: "
                "choose a smaller tile"
            )
        if static_bytes > limits.shared_bytes:
            raise DeviceError(
                f"{device_name} has {limits.shared_bytes} bytes of static shared memory a block and the kernel takes "
                f"{static_bytes}: choose a smaller tile"
            )
        if static_bytes + dynamic_bytes > limits.max_shared_bytes:
            raise DeviceError(
                f"{device_name} has {limits.max_shared_bytes} bytes of shared memory a block, static "
                "and dynamic together, "
                f"and the kernel takes {static_bytes + dynamic_bytes}: choose a smaller tile"
            )
        if math.prod(kernel.launch.cluster) > limits.max_cluster_blocks:
            raise DeviceError(
                f"{device_name} has clusters of at most {limits.max_cluster_blocks} blocks and the kernel has "
                f"{math.prod(kernel.launch.cluster)}"
            )
