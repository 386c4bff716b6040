"""Plain data of a built kernel, with which a device can run it without TVM and in another process."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy
import numpy as np

from tvmconv.compiler.nvrtc import Resources
from tvmconv.errors import DeviceError
from tvmconv.target import BlockLimits
from tvmconv.tensor_map import TensorMap


@dataclass(frozen=True)
class LaunchConfig:
    """Launch shape of a kernel; all extents are (x, y, z)."""

    grid: tuple[int, int, int]  # blocks per grid
    block: tuple[int, int, int]  # threads per block
    # blocks per cluster, which the code fixes, so that a launch need not specify them
    cluster: tuple[int, int, int] = (1, 1, 1)

    @property
    def threads_per_block(self) -> int:
        """Number of threads per block."""
        return math.prod(self.block)

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the grid."""
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
        """Size in bytes."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class CompiledKernel:
    """One device function, compiled as far as possible without the device."""

    code: bytes  # cubin for CUDA, source for OpenCL; device functions of one module share it
    name: str  # symbol of the function in the code
    launch: LaunchConfig  # launch shape
    # buffer index of each parameter, in the order of the function. Indices below the number of `arrays` of the
    # executable denote those, and larger ones its `workspace`
    arguments: tuple[int, ...]
    shared_bytes: int  # static shared memory per block
    dynamic_shared_bytes: int = 0  # dynamic shared memory per block
    # arrays that CUDA code reads from constant memory, as pairs of an index into `arrays` and the symbol
    constants: tuple[tuple[int, str], ...] = ()
    # indices of `arrays` that the function reads through texture objects of float elements, with the first axis as
    # height and the others as width
    textures: tuple[int, ...] = ()
    # parameters that are tensor maps instead of addresses, as pairs of a position in `arguments` and the map
    tensor_maps: tuple[tuple[int, TensorMap], ...] = ()
    # whether the function may be launched before its predecessor has ended, because it waits for that end by itself.
    # It must read the predecessor's results with instructions that compilers do not move before the wait
    uses_pdl: bool = False
    resources: Resources | None = None  # resource usage by ptxas; None for OpenCL


@dataclass(frozen=True)
class Executable:
    """Device functions that are launched one after another."""

    kernels: tuple[CompiledKernel, ...]  # device functions in launch order, at least one
    arrays: tuple[ArrayType, ...]  # arguments of the PrimFunc: the inputs, then the output
    # memory between device functions, which the caller allocates without initializing it
    workspace: tuple[ArrayType, ...] = ()
    # number of leading device functions that read only constant arguments such as weights. Further launches with the
    # same arguments and workspace can skip them. Timings exclude them
    num_prepack_kernels: int = 0

    @property
    def output(self) -> ArrayType:
        """Output, the last of `arrays`."""
        return self.arrays[-1]

    @property
    def nbytes(self) -> int:
        """Size of all arrays and the workspace in bytes."""
        return sum(array.nbytes for array in (*self.arrays, *self.workspace))

    @property
    def launch_text(self) -> str:
        """Launch shapes of all device functions, for messages."""
        return ", then ".join(str(kernel.launch) for kernel in self.kernels)


def check_block_limits(kernels: Sequence[Any], limits: BlockLimits, device_name: str) -> None:
    """Raise DeviceError if a lowered or compiled kernel exceeds the limits of a device with the given name."""
    for kernel in kernels:
        static_bytes, total_bytes = kernel.shared_bytes, kernel.shared_bytes + kernel.dynamic_shared_bytes
        num_threads, num_blocks = kernel.launch.threads_per_block, math.prod(kernel.launch.cluster)
        if num_threads > limits.max_threads:
            raise DeviceError(
                f"{device_name} runs at most {limits.max_threads} threads a block and the kernel has {num_threads}: "
                "choose a smaller tile"
            )
        if static_bytes > limits.shared_bytes:
            raise DeviceError(
                f"{device_name} has {limits.shared_bytes} bytes of static shared memory a block and the kernel takes "
                f"{static_bytes}: choose a smaller tile"
            )
        if total_bytes > limits.max_shared_bytes:
            raise DeviceError(
                f"{device_name} has {limits.max_shared_bytes} bytes of shared memory a block, static and dynamic "
                f"together, and the kernel takes {total_bytes}: choose a smaller tile"
            )
        if num_blocks > limits.max_cluster_blocks:
            raise DeviceError(
                f"{device_name} has clusters of at most {limits.max_cluster_blocks} blocks and the kernel has "
                f"{num_blocks}"
            )
