"""What of an array one copy by the Tensor Memory Accelerator takes: tiles, and pixels under a filter's tap.

Source: PTX ISA, "Tensors" (tiled and im2col mode, swizzling modes).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tvmconv.arithmetic import ceil_div
from tvmconv.emulator.addresses import CHUNK_BYTES
from tvmconv.emulator.errors import ExecutionError
from tvmconv.emulator.memory.arrays import TensorMapArray
from tvmconv.tensor_map import TensorMap


def swizzle_addresses(addresses: NDArray[np.int64], swizzle_bytes: int) -> NDArray[np.int64]:
    """Where chunks of 16 bytes lie in shared memory: their number among 8, 4 or 2 XOR that of their 128 bytes."""
    chunks = max(swizzle_bytes, CHUNK_BYTES) // CHUNK_BYTES
    return addresses ^ ((addresses >> 7 & chunks - 1) << 4)


@dataclass(frozen=True)
class TmaBox:
    """What copies take of an array: rows of neighbouring elements, one behind the other in shared memory.

    Attributes:
        row_offsets: where each begins, if its first element is the first along the innermost axis, in bytes; shape
            (copies, rows).
        is_inside: whether it is one of the array, same shape.
        first_elements: which element along the innermost axis, of each copy.
    """

    row_offsets: NDArray[np.int64]
    is_inside: NDArray[np.bool_]
    first_elements: NDArray[np.int64]


def select_tiles(tensor_map: TensorMap, coordinates: NDArray[np.int64]) -> TmaBox:
    """Tiles of an array.

    Args:
        tensor_map: how it lies, and what a tile is.
        coordinates: where each begins, shape (copies, axes).
    """
    row_counts = [
        ceil_div(box, element_stride)
        for box, element_stride in zip(tensor_map.box, tensor_map.element_strides, strict=True)
    ][1:]
    row_index = np.arange(math.prod(row_counts))
    row_offsets, is_inside = (
        np.zeros((len(coordinates), len(row_index)), np.int64),
        np.ones((len(coordinates), len(row_index)), bool),
    )
    for axis, (count, stride) in enumerate(zip(row_counts, tensor_map.strides, strict=True), 1):
        positions = coordinates[:, axis, None] + row_index % count * tensor_map.element_strides[axis]
        row_offsets += positions * stride
        is_inside &= (positions >= 0) & (positions < tensor_map.extents[axis])
        row_index = row_index // count
    return TmaBox(row_offsets, is_inside, coordinates[:, 0])


def select_pixels(tensor_map: TensorMap, coordinates: NDArray[np.int64], offsets: NDArray[np.int64]) -> TmaBox:
    """Pixels of images, with their channels, as many as fill a column for each copy.

    They are counted within a box along each axis of space, by steps; from its end on along the next axis, and in the
    next image.

    Args:
        tensor_map: how the images lie, and what the box is.
        coordinates: channel, place of the filter along each axis of space, and image, shape (copies, axes).
        offsets: from the place of the filter to that of its tap, shape (copies, axes of space).

    Raises:
        ExecutionError: a copy begins outside the box.
    """
    pixel_index = np.broadcast_to(np.arange(tensor_map.box[1]), (len(coordinates), tensor_map.box[1]))
    row_offsets, is_inside = np.zeros(pixel_index.shape, np.int64), np.ones(pixel_index.shape, bool)
    for axis, (lower, upper) in enumerate(zip(tensor_map.lower_corner, tensor_map.upper_corner, strict=True), 1):
        extent, element_stride = tensor_map.extents[axis], tensor_map.element_strides[axis]
        start, last_start = coordinates[:, axis, None], extent - 1 + upper
        if (start < lower).any() or (start > last_start).any():
            raise ExecutionError(
                f"{tensor_map}: begins at {start.reshape(-1).tolist()} along axis {axis}, outside the box"
            )
        first_line_pixels, full_line_pixels = (
            (last_start - start) // element_stride + 1,
            (last_start - lower) // element_stride + 1,
        )  # how many in the first line, and others
        is_in_first_line = pixel_index < first_line_pixels
        positions = np.where(
            is_in_first_line,
            start + pixel_index * element_stride,
            lower + (pixel_index - first_line_pixels) % full_line_pixels * element_stride,
        )
        positions = positions + offsets[:, axis - 1, None]
        pixel_index = np.where(is_in_first_line, 0, 1 + (pixel_index - first_line_pixels) // full_line_pixels)
        row_offsets += positions * tensor_map.strides[axis - 1]
        is_inside &= (positions >= 0) & (positions < extent)
    image = coordinates[:, -1, None] + pixel_index
    is_inside &= (image >= 0) & (image < tensor_map.extents[-1])
    return TmaBox(row_offsets + image * tensor_map.strides[-1], is_inside, coordinates[:, 0])


@dataclass(frozen=True)
class BoxWords:
    """The words of an array that boxes have, of 16 bytes where that is possible.

    Attributes:
        word_bytes: bytes of a word.
        word_indices: of each word in the array, 0 where there is none; shape (copies, rows, words).
        is_inside: whether there is one.
    """

    word_bytes: int
    word_indices: NDArray[np.int64]
    is_inside: NDArray[np.bool_]


def list_words(source: TensorMapArray, box: TmaBox) -> BoxWords:
    """The words of an array that boxes have."""
    tensor_map, itemsize = source.tensor_map, source.array.dtype.itemsize
    first_bytes, end_byte = box.first_elements * itemsize, tensor_map.extents[0] * itemsize
    word_bytes = CHUNK_BYTES if not (first_bytes % CHUNK_BYTES).any() and end_byte % CHUNK_BYTES == 0 else itemsize
    byte_offsets = first_bytes[:, None, None] + np.arange(0, tensor_map.box[0] * itemsize, word_bytes)
    is_inside = (byte_offsets >= 0) & (byte_offsets < end_byte) & box.is_inside[:, :, None]
    return BoxWords(
        word_bytes, np.where(is_inside, (box.row_offsets[:, :, None] + byte_offsets) // word_bytes, 0), is_inside
    )
