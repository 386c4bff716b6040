"""Boxes of channels-first pixels in shared memory, from which warps make halo rows.

The pixels of a plane are contiguous in memory, whatever its lines. They are divided into boxes of a fixed number of
pixels. The boxes that a tile needs are copied to the stages of a pipeline, some channels at a time: by TMA if planes
are multiples of 16 bytes, and else by the lanes of a warp, each a vector of pixels.

A box has an odd number of 16-byte chunks per channel, so that the channels of an 8 × 8 matrix are in distinct banks. A
small plane that is no multiple of 16 bytes is a box of its own, which TMA copies as contiguous bytes: those of eight
channels are whole chunks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv import tensor_map as maps
from tvmconv.arithmetic import ceil_div, round_up
from tvmconv.target import WARP_SIZE
from tvmconv.workloads import Conv

from ....tir_builder import Expr
from .halo_image import HaloImage
from .plane_gather import count_vector_pixels
from .smem_layout import CHUNK_BYTES

GROUP = 8  # pixels, or channels, of a matrix of 16 bits
BOX_CHANNELS = 16  # minimum number of channels per copy
MATRIX_ITEMSIZE = 2  # bytes per element of a matrix
MAX_PLANE_PIXELS = 256  # pixels of the largest plane that is a box of its own
MAX_COPY_BYTES = 16 << 10  # bytes of a copy with more than the minimum number of channels; an assumption
MIN_STAGES, MAX_STAGES, MAX_STAGES_BYTES = 2, 4, 80 << 10  # stages of boxes, and bytes of more than the minimum
TMA_ALIGNMENT_BYTES = 128  # alignment of a box in shared memory
ROW_COST_BYTES = 32  # cost of a row of a TMA copy besides that of its bytes, an assumption


def can_transpose(w: Conv) -> bool:
    """Return whether boxes of a channels-first X can be copied: vectors of 4 bytes, or planes that are boxes."""
    return count_vector_pixels(math.prod(w.input_size), HaloImage(w).itemsize) > 0 or copies_planes(w)


def copies_planes(w: Conv) -> bool:
    """Return whether boxes are planes, which are small and no multiples of 16 bytes."""
    pixels, itemsize = math.prod(w.input_size), HaloImage(w).itemsize
    is_misaligned = itemsize == MATRIX_ITEMSIZE and pixels * itemsize % CHUNK_BYTES > 0
    return is_misaligned and pixels <= MAX_PLANE_PIXELS and w.C // w.groups % BOX_CHANNELS == 0


@dataclass(frozen=True)
class PixelBoxes:
    """The boxes of pixels that a tile of halo rows needs; boxes are numbered over the batch."""

    image: HaloImage  # the halo rows
    block_m: int  # rows of the product per work tile
    box_pixels: int  # pixels per box: an odd number of 16-byte chunks, or a whole plane
    count: int  # boxes per tile
    are_planes: bool = False  # whether boxes are planes, which are copied as contiguous bytes
    channels: int = BOX_CHANNELS  # channels per copy

    @property
    def pixels(self) -> int:
        """Pixels of a plane."""
        return math.prod(self.image.w.input_size)

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return self.image.itemsize

    @property
    def pitch_bytes(self) -> int:
        """Bytes from a channel of a box to the next."""
        return self.box_pixels * self.itemsize

    @property
    def vector(self) -> int:
        """Pixels of the widest vector that does not cross the end of a plane; 0 if it is too small to copy."""
        return count_vector_pixels(self.pixels, self.itemsize)

    @property
    def has_matrices(self) -> bool:
        """Whether `ldmatrix` can load from boxes."""
        return self.itemsize == MATRIX_ITEMSIZE and not self.are_planes

    @property
    def uses_tma(self) -> bool:
        """Whether TMA can copy boxes."""
        return self.are_planes or self.vector * self.itemsize == CHUNK_BYTES

    @property
    def per_plane(self) -> int:
        """Boxes per plane."""
        return ceil_div(self.pixels, self.box_pixels)

    @property
    def box_bytes(self) -> int:
        """Bytes from a box in shared memory to the next."""
        return round_up(self.channels * self.pitch_bytes, TMA_ALIGNMENT_BYTES)

    @property
    def nbytes(self) -> int:
        """Bytes of the boxes of a copy in shared memory."""
        return self.count * self.box_bytes

    @property
    def num_stages(self) -> int:
        """Stages of boxes: as many as hide the latency of a copy, and fewer if copies are large."""
        return min(MAX_STAGES, max(MIN_STAGES, MAX_STAGES_BYTES // self.nbytes))

    @property
    def num_groups(self) -> int:
        """Groups of eight pixels in the boxes of a tile."""
        return ceil_div(self.count * self.box_pixels, GROUP)

    @property
    def tx_bytes(self) -> int:
        """Bytes of a copy by TMA."""
        return self.count * self.channels * self.pitch_bytes

    def tensor_map(self) -> maps.TensorMap:
        """Return the tensor map of X for boxes of channels × pixels, or of rows of chunks of eight channels."""
        w = self.image.w
        if self.are_planes:
            pixels = max(d for d in range(1, maps.MAX_BOX_ELEMENTS // GROUP + 1) if self.pixels % d == 0)
            box = (GROUP * pixels, self.pixels // pixels, self.channels // GROUP)
            extents, strides = (*box[:2], w.N * w.C // GROUP), (GROUP * pixels, GROUP * self.pixels)
            return maps.make_tiled_map(w.storage, self.itemsize, extents, strides, box, 0)
        extents, strides = (self.pixels, w.C, w.N), (self.pixels, self.pixels * w.C)
        box = (self.box_pixels, self.channels, 1)
        return maps.make_tiled_map(w.storage, self.itemsize, extents, strides, box, 0)

    def locate(self, box: Expr, channel: Expr) -> tuple[Expr, Expr, Expr]:
        """Return the coordinates of a box in the tensor map; channels beyond the last one become zeros."""
        image, box_idx, w = box // self.per_plane, box % self.per_plane, self.image.w
        if self.are_planes:
            chunk = image * (w.C // GROUP) + channel // GROUP
            return 0, 0, T.Select(channel < w.C, chunk, w.N * w.C // GROUP)
        return box_idx * self.box_pixels, channel, image

    def first_box(self, first_row: Expr) -> Expr:
        """Return the number of the first box of a tile."""
        w, is_reset, pixel = self.image.w, False, 0
        for axis, size in enumerate(w.input_size):
            position = self._position(first_row, axis)
            clamped = T.max(T.min(position, size - 1), 0)
            pixel = pixel * size + (clamped if is_reset is False else T.Select(is_reset, 0, clamped))
            is_negative = position < 0
            is_reset = is_negative if is_reset is False else T.Or(is_reset, is_negative)
        return first_row // math.prod(self.image.extents) * self.per_plane + pixel // self.box_pixels

    def _position(self, row: Expr, axis: int) -> Expr:
        """Return the coordinate of a halo row of the first plane along an axis, negative in front of the image."""
        w, extents = self.image.w, self.image.extents
        return row // math.prod(extents[axis + 1 :]) % extents[axis] * w.stride[axis] - w.pad_low[axis]


@dataclass(frozen=True)
class GatheredBoxes(PixelBoxes):
    """Boxes that threads copy by cp.async: groups of eight pixels, those of a channel side by side, or planes."""

    @property
    def pitch_bytes(self) -> int:
        """Bytes from a channel to the next, an odd number of chunks."""
        row_bytes = self.count * self.box_pixels * self.itemsize
        return super().pitch_bytes if self.are_planes else (ceil_div(row_bytes, CHUNK_BYTES) | 1) * CHUNK_BYTES

    @property
    def box_bytes(self) -> int:
        """Bytes from a box in shared memory to the next."""
        return super().box_bytes if self.are_planes else self.box_pixels * self.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the boxes of a copy in shared memory."""
        return super().nbytes if self.are_planes else self.channels * self.pitch_bytes


def choose_pixel_boxes(w: Conv, block_m: int, block_k: int) -> PixelBoxes:
    """Return the boxes for tiles of a size, with as many channels per copy as small copies permit.

    Args:
        w: The convolution, channels last.
        block_m: Rows of the product per work tile.
        block_k: Channels per stage of halo rows, a power of two.
    """
    pixels, itemsize = math.prod(w.input_size), HaloImage(w).itemsize
    vector = count_vector_pixels(pixels, itemsize)
    max_pixels = maps.MAX_BOX_ELEMENTS if vector * itemsize == CHUNK_BYTES else vector * WARP_SIZE
    sizes = (pixels,) if copies_planes(w) else tuple(range(3 * GROUP, max_pixels, 2 * GROUP))
    boxes = _choose_box_size(w, block_m, sizes, copies_planes(w))
    channels_per_group = w.C // w.groups
    while boxes.uses_tma and 2 * boxes.channels <= block_k and 2 * boxes.nbytes <= MAX_COPY_BYTES:
        if boxes.are_planes and channels_per_group % (2 * boxes.channels):
            break  # channels beyond the last one would be those of the next image
        boxes = replace(boxes, channels=2 * boxes.channels)
    return boxes


def choose_gathered_boxes(w: Conv, block_m: int, block_k: int) -> GatheredBoxes:
    """Return the boxes that threads copy by cp.async, with all channels of a block; the arguments are as above."""
    pixels = math.prod(w.input_size)
    are_planes = count_vector_pixels(pixels, HaloImage(w).itemsize) == 0
    boxes = _choose_box_size(w, block_m, (pixels if are_planes else GROUP,), are_planes)
    return GatheredBoxes(**vars(boxes) | {"channels": block_k})


@functools.lru_cache(maxsize=1024)
def _choose_box_size(w: Conv, block_m: int, sizes: Sequence[int], are_planes: bool) -> PixelBoxes:
    """Return the boxes of one of several sizes in pixels that are copied fastest by the number and length of rows."""
    image, pixels = HaloImage(w), math.prod(w.input_size)
    bounds = _list_pixel_bounds(image, block_m)
    options = []
    for box_pixels in sizes:
        per_plane = ceil_div(pixels, box_pixels)
        first, last = (images * per_plane + bound // box_pixels for images, bound in bounds)
        options.append(PixelBoxes(image, block_m, box_pixels, int((last - first).max()) + 1, are_planes))
    return min(options, key=lambda boxes: boxes.count * (boxes.pitch_bytes + ROW_COST_BYTES))


def _list_pixel_bounds(image: HaloImage, block_m: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the image and a bound of the pixel, of the first and the last row of each tile of a period."""
    rows_per_image = math.prod(image.extents)
    num_starts = min(ceil_div(image.num_rows, block_m), rows_per_image // math.gcd(rows_per_image, block_m))
    first = np.arange(num_starts) * block_m
    last = np.minimum(first + image.rows_per_plane(block_m) - 1, image.num_rows - 1)
    ends = (first, False), (last, True)
    return [(row // rows_per_image, _bound_pixel(image, row, is_upper=is_upper)) for row, is_upper in ends]


def _bound_pixel(image: HaloImage, row: np.ndarray, *, is_upper: bool) -> np.ndarray:
    """Return a pixel that is not behind those of the rows from `row` on, or not in front of those up to it."""
    w, pixel = image.w, np.zeros_like(row)
    is_first, is_last = np.zeros(row.shape, bool), np.zeros(row.shape, bool)
    for axis, size in enumerate(w.input_size):
        position = row // math.prod(image.extents[axis + 1 :]) % image.extents[axis] * w.stride[axis] - w.pad_low[axis]
        position = position + (w.stride[axis] - 1 if is_upper else 0)
        clamped = np.where(is_first, 0, np.where(is_last, size - 1, np.clip(position, 0, size - 1)))
        pixel = pixel * size + clamped
        is_first |= (position < 0) & ~is_last
        is_last |= (position >= size) & is_upper & ~is_first
    return pixel
