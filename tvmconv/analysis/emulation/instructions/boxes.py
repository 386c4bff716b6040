"""What of an array one copy by the Tensor Memory Accelerator takes: tiles, and pixels under a filter's tap.

Source: PTX ISA, "Tensors" (tiled and im2col mode, swizzling modes).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tvmconv.analysis.emulation.addresses import CHUNK
from tvmconv.analysis.emulation.errors import ExecutionError
from tvmconv.analysis.emulation.memory.arrays import Mapped
from tvmconv.arithmetic import ceil_div
from tvmconv.tensor_map import TensorMap


def swizzled(addresses: NDArray[np.int64], swizzle: int) -> NDArray[np.int64]:
    """Where chunks of 16 bytes lie in shared memory: their number among 8, 4 or 2 XOR that of their 128 bytes."""
    chunks = max(swizzle, CHUNK) // CHUNK
    return addresses ^ ((addresses >> 7 & chunks - 1) << 4)


@dataclass(frozen=True)
class Box:
    """What copies take of an array: rows of neighbouring elements, one behind the other in shared memory.

    Attributes:
        rows: where each begins, if its first element is the first along the innermost axis, in bytes; shape (copies,
            rows).
        inside: whether it is one of the array, same shape.
        first: which element along the innermost axis, of each copy.
    """

    rows: NDArray[np.int64]
    inside: NDArray[np.bool_]
    first: NDArray[np.int64]


def tiles(told: TensorMap, at: NDArray[np.int64]) -> Box:
    """Tiles of an array.

    Args:
        told: how it lies, and what a tile is.
        at: where each begins, shape (copies, axes).
    """
    counts = [ceil_div(box, step) for box, step in zip(told.box, told.steps, strict=True)][1:]
    number = np.arange(math.prod(counts))
    rows, inside = np.zeros((len(at), len(number)), np.int64), np.ones((len(at), len(number)), bool)
    for axis, (count, stride) in enumerate(zip(counts, told.strides, strict=True), 1):
        where = at[:, axis, None] + number % count * told.steps[axis]
        rows += where * stride
        inside &= (where >= 0) & (where < told.extents[axis])
        number = number // count
    return Box(rows, inside, at[:, 0])


def pixels(told: TensorMap, at: NDArray[np.int64], offsets: NDArray[np.int64]) -> Box:
    """Pixels of images, with their channels, as many as fill a column for each copy.

    They are counted within a box along each axis of space, by steps; from its end on along the next axis, and in the
    next image.

    Args:
        told: how the images lie, and what the box is.
        at: channel, place of the filter along each axis of space, and image, shape (copies, axes).
        offsets: from the place of the filter to that of its tap, shape (copies, axes of space).

    Raises:
        ExecutionError: a copy begins outside the box.
    """
    number = np.broadcast_to(np.arange(told.box[1]), (len(at), told.box[1]))
    rows, inside = np.zeros(number.shape, np.int64), np.ones(number.shape, bool)
    for axis, (lower, upper) in enumerate(zip(told.lower, told.upper, strict=True), 1):
        extent, step = told.extents[axis], told.steps[axis]
        begin, last = at[:, axis, None], extent - 1 + upper
        if (begin < lower).any() or (begin > last).any():
            raise ExecutionError(f"{told}: begins at {begin.reshape(-1).tolist()} along axis {axis}, outside the box")
        first, whole = (last - begin) // step + 1, (last - lower) // step + 1  # how many in the first line, and others
        here = number < first
        where = np.where(here, begin + number * step, lower + (number - first) % whole * step)
        where = where + offsets[:, axis - 1, None]
        number = np.where(here, 0, 1 + (number - first) // whole)
        rows += where * told.strides[axis - 1]
        inside &= (where >= 0) & (where < extent)
    image = at[:, -1, None] + number
    inside &= (image >= 0) & (image < told.extents[-1])
    return Box(rows + image * told.strides[-1], inside, at[:, 0])


@dataclass(frozen=True)
class Words:
    """The words of an array that boxes have, of 16 bytes where that is possible.

    Attributes:
        size: bytes of a word.
        index: of each word in the array, 0 where there is none; shape (copies, rows, words).
        inside: whether there is one.
    """

    size: int
    index: NDArray[np.int64]
    inside: NDArray[np.bool_]


def words_of(source: Mapped, box: Box) -> Words:
    """The words of an array that boxes have."""
    told, itemsize = source.told, source.array.dtype.itemsize
    first, end = box.first * itemsize, told.extents[0] * itemsize
    size = CHUNK if not (first % CHUNK).any() and end % CHUNK == 0 else itemsize
    at = first[:, None, None] + np.arange(0, told.box[0] * itemsize, size)
    inside = (at >= 0) & (at < end) & box.inside[:, :, None]
    return Words(size, np.where(inside, (box.rows[:, :, None] + at) // size, 0), inside)
