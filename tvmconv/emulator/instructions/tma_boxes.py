"""Elements of an array that one TMA copy moves: tiles, and im2col pixels of a filter tap.

Source: PTX ISA, "Tensors" (tiled and im2col mode, swizzling modes).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tvmconv.arithmetic import ceil_div
from tvmconv.emulator.addresses import CHUNK_BYTES
from tvmconv.emulator.errors import ExecutionError
from tvmconv.emulator.memory.arrays import TensorMapArray
from tvmconv.tensor_map import TensorMap


def swizzle_addresses(addresses: NDArray[np.int64], swizzle_bytes: int) -> NDArray[np.int64]:
    """Apply a swizzle: XOR the index of a chunk among 8, 4 or 2 with that of its 128-byte row."""
    chunks = max(swizzle_bytes, CHUNK_BYTES) // CHUNK_BYTES
    return addresses ^ ((addresses >> 7 & chunks - 1) << 4)


def count_rows(tensor_map: TensorMap) -> list[int]:
    """Return the rows of a box along each axis but the innermost; for im2col, its pixels."""
    if tensor_map.is_im2col:
        return [tensor_map.box[1]]
    return [ceil_div(*pair) for pair in zip(tensor_map.box[1:], tensor_map.element_strides[1:], strict=True)]


# Offset in bytes of the first element of each row of contiguous elements, and whether the row is inside the array, both
# of shape (copies, rows).
_Rows = tuple[NDArray[np.int64], NDArray[np.bool_]]


def _select_tiles(tensor_map: TensorMap, coordinates: NDArray[np.int64]) -> _Rows:
    """Return the rows of tiled copies; `coordinates` of their first elements have the shape (copies, axes)."""
    row_counts = count_rows(tensor_map)
    row_index = np.arange(math.prod(row_counts))
    row_offsets = np.zeros((len(coordinates), len(row_index)), np.int64)
    is_inside = np.ones(row_offsets.shape, bool)
    for axis, (count, stride) in enumerate(zip(row_counts, tensor_map.strides, strict=True), 1):
        positions = coordinates[:, axis, None] + row_index % count * tensor_map.element_strides[axis]
        row_offsets += positions * stride
        is_inside &= (positions >= 0) & (positions < tensor_map.extents[axis])
        row_index = row_index // count
    return row_offsets, is_inside


def _select_pixels(tensor_map: TensorMap, coordinates: NDArray[np.int64], offsets: NDArray[np.int64]) -> _Rows:
    """Return the rows of im2col copies: pixels of images with their channels.

    Pixels are counted in strides within the bounding box along each spatial axis. After its end they continue along the
    next axis, and in the next image.

    Args:
        tensor_map: Layout of the images and the bounding box.
        coordinates: Channel, filter position along each spatial axis, and image, of shape (copies, axes).
        offsets: Offsets of the filter tap from the filter position, of shape (copies, spatial axes).
    """
    pixel_index = np.broadcast_to(np.arange(tensor_map.box[1]), (len(coordinates), tensor_map.box[1]))
    row_offsets, is_inside = np.zeros(pixel_index.shape, np.int64), np.ones(pixel_index.shape, bool)
    for axis, (lower, upper) in enumerate(zip(tensor_map.lower_corner, tensor_map.upper_corner, strict=True), 1):
        extent, element_stride = tensor_map.extents[axis], tensor_map.element_strides[axis]
        start, last_start = coordinates[:, axis, None], extent - 1 + upper
        if (start < lower).any() or (start > last_start).any():
            starts = start.reshape(-1).tolist()
            raise ExecutionError(f"{tensor_map}: a copy starts at {starts} along axis {axis}, outside of the box")
        first_line_pixels = (last_start - start) // element_stride + 1
        full_line_pixels = (last_start - lower) // element_stride + 1
        is_in_first_line = pixel_index < first_line_pixels
        later_index = pixel_index - first_line_pixels
        first_line_positions = start + pixel_index * element_stride
        later_positions = lower + later_index % full_line_pixels * element_stride
        positions = np.where(is_in_first_line, first_line_positions, later_positions) + offsets[:, axis - 1, None]
        pixel_index = np.where(is_in_first_line, 0, 1 + later_index // full_line_pixels)
        row_offsets += positions * tensor_map.strides[axis - 1]
        is_inside &= (positions >= 0) & (positions < extent)
    image = coordinates[:, -1, None] + pixel_index
    is_inside &= (image >= 0) & (image < tensor_map.extents[-1])
    return row_offsets + image * tensor_map.strides[-1], is_inside


class BoxWords(NamedTuple):
    """Words of an array that boxes contain, of 16 bytes if alignment permits.

    Attributes:
        word_bytes: Bytes per word.
        word_indices: Index of each word in the array, 0 outside of it; of shape (copies, rows, words).
        is_inside: Whether the word is inside the array, of the same shape.
    """

    word_bytes: int
    word_indices: NDArray[np.int64]
    is_inside: NDArray[np.bool_]


def list_words(
    source: TensorMapArray, coordinates: NDArray[np.int64], offsets: NDArray[np.int64] | None = None
) -> BoxWords:
    """Return the words of copies at coordinates; `offsets` are those of the filter tap for im2col."""
    tensor_map, itemsize = source.tensor_map, source.array.dtype.itemsize
    row_offsets, is_row_inside = (
        _select_tiles(tensor_map, coordinates) if offsets is None else _select_pixels(tensor_map, coordinates, offsets)
    )
    first_bytes, end_byte = coordinates[:, 0] * itemsize, tensor_map.extents[0] * itemsize
    if (first_bytes % CHUNK_BYTES).any():
        first = int(coordinates[first_bytes % CHUNK_BYTES != 0, 0][0])
        raise ExecutionError(f"misaligned: {tensor_map}: a copy starts at element {first}, which is not at 16 bytes")
    word_bytes = CHUNK_BYTES if end_byte % CHUNK_BYTES == 0 else itemsize
    byte_offsets = first_bytes[:, None, None] + np.arange(0, tensor_map.box[0] * itemsize, word_bytes)
    is_inside = (byte_offsets >= 0) & (byte_offsets < end_byte) & is_row_inside[:, :, None]
    word_indices = np.where(is_inside, (row_offsets[:, :, None] + byte_offsets) // word_bytes, 0)
    return BoxWords(word_bytes, word_indices, is_inside)
