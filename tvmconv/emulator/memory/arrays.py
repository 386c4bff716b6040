"""Arrays in global memory, which a kernel accesses through pointers and tensor maps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvmconv.arithmetic import round_up
from tvmconv.emulator.errors import ExecutionError, RaceError
from tvmconv.target import VECTOR_BYTES
from tvmconv.tensor_map import TensorMap

Bytes = NDArray[np.uint8]


@dataclass
class GlobalArray:
    """Array in global memory, of `size` elements; its bytes are padded to a multiple of 16."""

    name: str
    dtype: np.dtype[Any]
    size: int
    raw_bytes: Bytes

    @classmethod
    def from_values(cls, name: str, values: NDArray[Any]) -> GlobalArray:
        """Return a copy of a NumPy array."""
        array = cls.allocate_unwritten(name, values.dtype, values.size)
        array.raw_bytes[: values.nbytes] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        return array

    @classmethod
    def allocate_unwritten(cls, name: str, dtype: np.dtype[Any], size: int) -> GlobalArray:
        """Return an array of unwritten elements, which are NaN."""
        nbytes = size * dtype.itemsize
        return cls(name, dtype, size, np.full(round_up(nbytes, VECTOR_BYTES), 0xFF, np.uint8))

    @classmethod
    def allocate_zeros(cls, name: str, dtype: np.dtype[Any], size: int) -> GlobalArray:
        """Return an array of zeros, for which the operating system allocates pages only when they are written."""
        nbytes = size * dtype.itemsize
        return cls(name, dtype, size, np.zeros(round_up(nbytes, VECTOR_BYTES), np.uint8))

    @property
    def nbytes(self) -> int:
        """Bytes of the elements without padding."""
        return self.size * self.dtype.itemsize

    @property
    def values(self) -> NDArray[Any]:
        """View of the elements."""
        return self.raw_bytes[: self.nbytes].view(self.dtype)

    def check_access(self, byte_offsets: NDArray[np.int64], nbytes: int) -> None:
        """Raise ExecutionError unless accesses of `nbytes` bytes are within the array and aligned to their size."""
        check_aligned(byte_offsets, nbytes, self.name)
        if byte_offsets.size and (int(byte_offsets.min()) < 0 or int(byte_offsets.max()) + nbytes > self.nbytes):
            byte_offset = int(byte_offsets.min()) if int(byte_offsets.min()) < 0 else int(byte_offsets.max())
            raise ExecutionError(
                f"out of bounds: {nbytes} bytes at byte {byte_offset} of {self.name}, which has {self.nbytes} bytes"
            )

    def read(self, byte_offsets: NDArray[np.int64], nbytes: int) -> Bytes:
        """Return the bytes at offsets, of shape (accesses, nbytes)."""
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
            raise RaceError(f"race: threads store different values to one element of {self.name} at the same time")


@dataclass(frozen=True)
class TensorMapArray:
    """Array behind a tensor map, as the argument of a kernel that takes a tensor map."""

    array: GlobalArray
    tensor_map: TensorMap

    def __post_init__(self) -> None:
        if self.tensor_map.nbytes > self.array.nbytes:
            raise ExecutionError(
                f"{self.tensor_map} covers {self.tensor_map.nbytes} bytes, but the array {self.array.name} has only "
                f"{self.array.nbytes} bytes"
            )

    @property
    def name(self) -> str:
        """Name of the array."""
        return self.array.name


def check_aligned(byte_offsets: NDArray[np.int64], nbytes: int, name: str) -> None:
    """Raise ExecutionError unless accesses are aligned to their size, or to 16 bytes if they are wider."""
    alignment_bytes = min(nbytes & -nbytes, VECTOR_BYTES)
    if byte_offsets.size and np.bitwise_or.reduce(byte_offsets) & (alignment_bytes - 1):
        first_misaligned = int(byte_offsets[byte_offsets % alignment_bytes != 0][0])
        raise ExecutionError(f"misaligned: {nbytes} bytes at byte {first_misaligned} of {name}")


def _widest_unit_bytes(nbytes: int) -> int:
    """Return the size of the widest integer that divides `nbytes`."""
    return next(unit_bytes for unit_bytes in (8, 4, 2, 1) if nbytes % unit_bytes == 0)


Argument = GlobalArray | TensorMapArray  # argument of a kernel
