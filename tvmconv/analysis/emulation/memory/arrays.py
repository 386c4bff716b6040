"""Arrays in global memory, as pointers and tensor maps give them to a kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tvmconv.analysis.emulation.errors import ExecutionError, RaceError
from tvmconv.arithmetic import round_up
from tvmconv.gpu import VECTOR_BYTES

if TYPE_CHECKING:
    from tvmconv.tensor_map import TensorMap

Bytes = NDArray[np.uint8]


@dataclass
class Array:
    """An array in global memory.

    Attributes:
        name: of the parameter.
        dtype: of an element.
        size: elements.
        raw: its bytes, filled up to whole 16.
    """

    name: str
    dtype: np.dtype[Any]
    size: int
    raw: Bytes

    @classmethod
    def of(cls, name: str, values: NDArray[Any]) -> Array:
        """A copy of an array."""
        found = cls.unwritten(name, values.dtype, values.size)
        found.raw[: values.nbytes] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        return found

    @classmethod
    def unwritten(cls, name: str, dtype: np.dtype[Any], size: int) -> Array:
        """An array that nobody has written."""
        nbytes = size * dtype.itemsize
        return cls(name, dtype, size, np.full(round_up(nbytes, VECTOR_BYTES), 0xFF, np.uint8))

    @classmethod
    def zeros(cls, name: str, dtype: np.dtype[Any], size: int) -> Array:
        """An array of zeros, which takes no memory where nothing is written."""
        nbytes = size * dtype.itemsize
        return cls(name, dtype, size, np.zeros(round_up(nbytes, VECTOR_BYTES), np.uint8))

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.size * self.dtype.itemsize

    @property
    def values(self) -> NDArray[Any]:
        """The elements: a view."""
        return self.raw[: self.nbytes].view(self.dtype)

    def check(self, offsets: NDArray[np.int64], nbytes: int) -> None:
        """Raise ExecutionError unless accesses of so many bytes lie in the array, and are aligned to their size."""
        check_aligned(offsets, nbytes, self.name)
        if offsets.size and (int(offsets.min()) < 0 or int(offsets.max()) + nbytes > self.nbytes):
            at = int(offsets.min()) if int(offsets.min()) < 0 else int(offsets.max())
            raise ExecutionError(
                f"out of bounds: {nbytes} bytes at byte {at} of {self.name}, which has {self.nbytes} bytes"
            )

    def read(self, offsets: NDArray[np.int64], nbytes: int) -> Bytes:
        """The bytes at offsets, of shape (accesses, nbytes)."""
        self.check(offsets, nbytes)
        unit = np.dtype(f"u{_unit(nbytes)}")
        first = offsets // unit.itemsize
        found = self.raw.view(unit)[first[:, None] + np.arange(nbytes // unit.itemsize)]
        return found.view(np.uint8)

    def write(self, offsets: NDArray[np.int64], given: Bytes) -> None:
        """Write rows of bytes at offsets."""
        nbytes = given.shape[1]
        self.check(offsets, nbytes)
        unit = np.dtype(f"u{_unit(nbytes)}")
        where = (offsets // unit.itemsize)[:, None] + np.arange(nbytes // unit.itemsize)
        words = given.view(unit)
        self.raw.view(unit)[where] = words
        if not np.array_equal(self.raw.view(unit)[where], words):
            raise RaceError(f"race: threads store different values to one element of {self.name} at a time")


@dataclass(frozen=True)
class Mapped:
    """An array as TMA is told of it: what a kernel is given that takes a tensor map.

    Attributes:
        array: the array.
        told: how it lies, and what one copy takes.

    Raises:
        ExecutionError: the array is smaller than that.
    """

    array: Array
    told: TensorMap

    def __post_init__(self) -> None:
        if self.told.nbytes > self.array.nbytes:
            raise ExecutionError(f"{self.told}, of {self.told.nbytes} bytes: {self.array.name} has {self.array.nbytes}")

    @property
    def name(self) -> str:
        """Of the array."""
        return self.array.name


def check_aligned(offsets: NDArray[np.int64], nbytes: int, name: str) -> None:
    """Raise ExecutionError unless accesses are aligned to their size, or to 16 bytes if they are wider."""
    aligned = min(nbytes & -nbytes, VECTOR_BYTES)
    if offsets.size and np.bitwise_or.reduce(offsets) & (aligned - 1):
        raise ExecutionError(f"misaligned: {nbytes} bytes at byte {int(offsets[offsets % aligned != 0][0])} of {name}")


def _unit(nbytes: int) -> int:
    """The widest integer, in bytes, that bytes are whole numbers of."""
    return next(unit for unit in (8, 4, 2, 1) if nbytes % unit == 0)


Argument = Array | Mapped  # what a parameter is given
