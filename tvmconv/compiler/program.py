"""A built kernel as plain data: all that a device needs to run it, without TVM and in another process."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tvmconv.compiler.nvrtc import Resources


@dataclass(frozen=True)
class Launch:
    """A kernel's launch shape, each as (x, y, z)."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]

    @property
    def threads(self) -> int:
        """Threads of one block."""
        return math.prod(self.block)

    @property
    def blocks(self) -> int:
        """Blocks of the grid."""
        return math.prod(self.grid)

    def __str__(self) -> str:
        return "{} × {}".format("·".join(map(str, self.grid)), "·".join(map(str, self.block)))


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
class Program:
    """One device function, compiled as far as it can be without its device.

    Attributes:
        code: a cubin for CUDA, the text for OpenCL.
        name: the kernel's symbol in it.
        launch: grid and block.
        arrays: the PrimFunc's arguments, inputs first and the output last.
        arguments: for each parameter of the device function, in its order, the index of the one of `arrays` that goes
            there.
        shared_bytes: static shared memory of a block.
        constants: arrays that CUDA code reads from constant memory, each the index of one of `arrays` and the symbol to
            fill with it.
        textures: indices of those of `arrays` that the function takes as texture objects: of float elements, as wide as
            what is behind the first axis.
        resources: what ptxas reports; None for OpenCL.
    """

    code: bytes
    name: str
    launch: Launch
    arrays: tuple[ArrayType, ...]
    arguments: tuple[int, ...]
    shared_bytes: int
    constants: tuple[tuple[int, str], ...] = ()
    textures: tuple[int, ...] = ()
    resources: Resources | None = None

    @property
    def output(self) -> ArrayType:
        """The last of `arrays`."""
        return self.arrays[-1]
