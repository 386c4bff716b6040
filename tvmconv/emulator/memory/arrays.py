"""Arrays in global memory, as pointers and tensor maps give them to a kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tvmconv.arithmetic import round_up
from tvmconv.emulator.errors import ExecutionError, RaceError
from tvmconv.gpu_specs import VECTOR_BYTES

if TYPE_CHECKING:
    from tvmconv.tensor_map import TensorMap

Bytes = NDArray[np.uint8]


@dataclass
class GlobalArray:
    """An array in global memory.

    Attributes:
        name: of the parameter.
        dtype: of an element.
        size: elements.
        raw_bytes: its bytes, filled up to whole 16.
    """

    name: str
    dtype: np.dtype[Any]
    size: int
    raw_bytes: Bytes

    @classmethod
    def from_values(cls, name: str, values: NDArray[Any]) -> GlobalArray:
        """A copy of an array."""
        array = cls.allocate_unwritten(name, values.dtype, values.size)
        array.raw_bytes[: values.nbytes] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        return array

    @classmethod
    def allocate_unwritten(cls, name: str, dtype: np.dtype[Any], size: int) -> GlobalArray:
        """An array that nobody has written."""
        nbytes = size * dtype.itemsize
        return cls(name, dtype, size, np.full(round_up(nbytes, VECTOR_BYTES), 0xFF, np.uint8))

    @classmethod
    def allocate_zeros(cls, name: str, dtype: np.dtype[Any], size: int) -> GlobalArray:
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
        return self.raw_bytes[: self.nbytes].view(self.dtype)

    def check_access(self, byte_offsets: NDArray[np.int64], nbytes: int) -> None:
        """Raise ExecutionError unless accesses of so many bytes lie in the array, and are aligned to their size."""
        check_aligned(byte_offsets, nbytes, self.name)
        if byte_offsets.size and (int(byte_offsets.min()) < 0 or int(byte_offsets.max()) + nbytes > self.nbytes):
            byte_offset = int(byte_offsets.min()) if int(byte_offsets.min()) < 0 else int(byte_offsets.max())
            raise ExecutionError(
                f"out of bounds: {nbytes} bytes at byte {byte_offset} of {self.name}, which has {self.nbytes} bytes"
            )

    def read(self, byte_offsets: NDArray[np.int64], nbytes: int) -> Bytes:
        """The bytes at offsets, of shape (accesses, nbytes)."""
        self.check_access(byte_offsets, nbytes)
        unit = np.dtype(f"u{_widest_unit_bytes(nbytes)}")
        first_units = byte_offsets // unit.itemsize
        units = self.raw_bytes.view(unit)[first_units[:, None] + np.arange(nbytes // unit.itemsize)]
        return units.view(np.uint8)

    def write(self, byte_offsets: NDArray[np.int64], stored_bytes: Bytes) -> None:
        """Write rows of bytes at offsets."""
        nbytes = stored_bytes.shape[1]
        self.check_access(byte_offsets, nbytes)
        unit = np.dtype(f"u{_widest_unit_bytes(nbytes)}")
        unit_indices = (byte_offsets // unit.itemsize)[:, None] + np.arange(nbytes // unit.itemsize)
        words = stored_bytes.view(unit)
        self.raw_bytes.view(unit)[unit_indices] = words
        if not np.array_equal(self.raw_bytes.view(unit)[unit_indices], words):
            raise RaceError(f"race: threads store different values to one element of {self.name} at a time")


@dataclass(frozen=True)
class TensorMapArray:
    """An array as TMA is told of it: what a kernel is given that takes a tensor map.

    Attributes:
        array: the array.
        tensor_map: how it lies, and what one copy takes.

    Raises:
        ExecutionError: the array is smaller than that.
    """

    array: GlobalArray
    tensor_map: TensorMap

    def __post_init__(self) -> None:
        if self.tensor_map.nbytes > self.array.nbytes:
            raise ExecutionError(
                f"{self.tensor_map}, of {self.tensor_map.nbytes} bytes: {self.array.name} has {self.array.nbytes}"
            )

    @property
    def name(self) -> str:
        """Of the array."""
        return self.array.name


def check_aligned(byte_offsets: NDArray[np.int64], nbytes: int, name: str) -> None:
    """Raise ExecutionError unless accesses are aligned to their size, or to 16 bytes if they are wider."""
    alignment_bytes = min(nbytes & -nbytes, VECTOR_BYTES)
    if byte_offsets.size and np.bitwise_or.reduce(byte_offsets) & (alignment_bytes - 1):
        raise ExecutionError(
            f"misaligned: {nbytes} bytes at byte {int(byte_offsets[byte_offsets % alignment_bytes != 0][0])} of {name}"
        )


def _widest_unit_bytes(nbytes: int) -> int:
    """The widest integer, in bytes, that bytes are whole numbers of."""
    return next(unit_bytes for unit_bytes in (8, 4, 2, 1) if nbytes % unit_bytes == 0)


Argument = GlobalArray | TensorMapArray  # what a parameter is given
