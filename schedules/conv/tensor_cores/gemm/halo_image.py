"""Images with shared zeros between their lines: all taps of a filter are offsets of one copy of the pixels.

A *halo row* is a pixel of X in shared memory, with some of its channels. Halo rows are numbered over the batch as if
lines and images had zeros between them: those behind a line are also those in front of the next one. Output pixel (p,
q) has the number of the halo row that its first tap reads. Each further tap reads a halo row at a distance that is the
same for all pixels. A tile of M consecutive numbers therefore needs M rows and a halo, and a tap is an offset of
wgmma's matrix descriptor. Numbers that belong to no output pixel are multiplied, but not stored.

With strides the padded image is divided into planes, one for each remainder of the coordinates by the stride. A tap
reads one plane, and neighbouring output pixels read neighbouring rows of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.arithmetic import ceil_div, round_up
from tvmconv.workloads import Conv, Conv1d
from tvmconv.workloads.dtypes import get_itemsize

from ....tir_builder import Expr, logical_and
from .atoms import WgmmaAtom
from .channels_first_epilogue import ChannelsFirstOutput
from .smem_layout import CHUNK_BYTES

SWIZZLE_ROWS = 8  # rows of a swizzle atom
MAX_PITCH_RATIO = 1.07  # maximum lengthening of a line so that wider vectors of outputs are aligned


def flatten_pixels(w: Conv) -> Conv:
    """Return a convolution of the same arrays, channels last, whose filter of one tap reads one line of all pixels.

    Other convolutions are returned as they are.
    """
    if math.prod((*w.kernel, *w.stride)) > 1 or any(w.padding) or w.spatial_ndim == 1:
        return w
    pixels = math.prod(w.input_size)
    return Conv1d(w.N, w.C, pixels, w.O, 1, groups=w.groups, dtype=w.dtype, layout=w.layout, epilogue=w.epilogue)


@dataclass(frozen=True)
class HaloImage:
    """The halo rows of a channels-first X."""

    w: Conv

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return get_itemsize(self.w.storage)

    @property
    def input_vector(self) -> int:
        """Pixels of X in the widest aligned vector that does not cross a line."""
        return math.gcd(self.w.input_size[-1], CHUNK_BYTES // self.itemsize)

    @property
    def output_vector(self) -> int:
        """Pixels of Y in a vector: the widest for which aligned lines are not much longer."""
        pitch, columns = self._min_extent(-1), self.w.output_size[-1]
        vector = math.gcd(columns, CHUNK_BYTES // self.itemsize)
        while round_up(pitch, vector) > MAX_PITCH_RATIO * pitch:
            vector //= 2
        return vector

    def _min_extent(self, axis: int) -> int:
        """Return the minimum number of halo rows along an axis, in steps of the stride."""
        w = self.w
        padded = w.input_size[axis] + max(w.pad_low[axis], w.pad_high[axis])
        return max(ceil_div(padded, w.stride[axis]), w.output_size[axis])

    @property
    def extents(self) -> tuple[int, ...]:
        """Halo rows along each spatial axis of a plane."""
        outer = [self._min_extent(axis) for axis in range(self.w.spatial_ndim - 1)]
        pitch = round_up(self._min_extent(-1), self.output_vector)
        is_small_plane = not outer and WgmmaAtom.m // 2 < pitch <= WgmmaAtom.m
        if is_small_plane and self.itemsize == 2 and math.prod((pitch % 2, *self.w.kernel, *self.w.stride)) == 1:
            pitch = WgmmaAtom.m  # an instruction computes one plane, which TMA stores
        return (*outer, pitch)

    @property
    def row_steps(self) -> tuple[int, ...]:
        """Distance of the halo rows of neighbouring output pixels along each spatial axis."""
        return tuple(math.prod(self.extents[axis + 1 :]) for axis in range(self.w.spatial_ndim))

    @property
    def num_rows(self) -> int:
        """Halo rows of a plane, of the whole batch: the M of the product."""
        return self.w.N * math.prod(self.extents)

    @property
    def halo_rows(self) -> int:
        """Distance of the first tap's halo row to the last one of any tap."""
        w = self.w
        taps = zip(w.kernel, w.dilation, w.stride, self.row_steps, strict=True)
        return sum((size - 1) * dilation // stride * step for size, dilation, stride, step in taps)

    def rows_per_plane(self, block_m: Any) -> Any:
        """Return the halo rows of a tile in a plane, at least as many as the tile and its halo have.

        With two planes along the last axis, eight neighbouring pixels are four rows of either plane. The planes are
        shifted against each other so that the chunks that `stmatrix` stores at a time are in distinct banks.
        """
        is_shifted = self.planes[-1] == 2
        shift = SWIZZLE_ROWS // 2 + self.w.pad_low[-1] % 2 if is_shifted else 0
        return round_up(block_m + self.halo_rows - shift, SWIZZLE_ROWS) + shift

    def locate_row(self, row: Expr, plane: Expr) -> tuple[list[Expr], list[Expr]]:
        """Return the coordinates of the pixel of a halo row, and the conditions under which there is one.

        Args:
            row: Number of the halo row.
            plane: Index of its plane.
        """
        w, positions, conditions = self.w, [], [row < self.num_rows]
        for axis, size in enumerate(w.input_size):
            position = row // self.row_steps[axis] % self.extents[axis] * w.stride[axis] - w.pad_low[axis]
            if self.planes[axis] > 1:
                position = position + plane // math.prod(self.planes[axis + 1 :]) % self.planes[axis]
            positions.append(position)
            conditions += [position >= 0, position < size]
        return positions, conditions

    @property
    def planes(self) -> tuple[int, ...]:
        """Number of planes along each spatial axis that taps read."""
        w = self.w
        taps = zip(w.kernel, w.dilation, w.stride, strict=True)
        return tuple(len({tap * dilation % stride for tap in range(size)}) for size, dilation, stride in taps)

    @property
    def has_consecutive_planes(self) -> bool:
        """Whether taps read all remainders by the stride up to the last one that any of them reads."""
        w = self.w
        taps = zip(w.kernel, w.dilation, w.stride, self.planes, strict=True)
        return all(
            max(tap * dilation % stride for tap in range(size)) < planes for size, dilation, stride, planes in taps
        )

    @property
    def num_planes(self) -> int:
        """Number of planes."""
        return math.prod(self.planes)

    def tap_row(self, taps: Sequence[Expr], plane_rows: int) -> Expr:
        """Return the row of a tile in shared memory that a tap reads for the first output pixel."""
        w, row = self.w, 0
        for axis, tap in enumerate(taps):
            position, stride = tap * w.dilation[axis], w.stride[axis]
            row = row + position // stride * self.row_steps[axis]
            if self.planes[axis] > 1:
                row = row + position % stride * (math.prod(self.planes[axis + 1 :]) * plane_rows)
        return row

    @property
    def columns_per_line(self) -> int:
        """Columns of all planes in a line, with the zeros behind it."""
        return self.extents[-1] * self.w.stride[-1]

    @property
    def vectors_per_line(self) -> int:
        """Vectors of X in a line, with the zeros behind it."""
        return ceil_div(self.columns_per_line, self.input_vector)

    def first_column(self, first_row: Expr) -> Expr:
        """Return the column at which a tile starts, where lines are counted from the one before the first."""
        w = self.w
        return first_row * w.stride[-1] + (self.columns_per_line - w.pad_low[-1])

    def vector_index(self, column: Expr) -> Expr:
        """Return the index of the vector that contains a column."""
        line, rest = column // self.columns_per_line, column % self.columns_per_line
        return line * self.vectors_per_line + rest // self.input_vector

    def max_vectors(self, block_m: int) -> int:
        """Return the maximum number of vectors along the last axis that a tile needs."""
        columns = self.rows_per_plane(block_m) * self.w.stride[-1]
        extent = self.extents[-1]
        starts = [self.first_column(tile * block_m) for tile in range(extent // math.gcd(extent, block_m))]
        return max(self.vector_index(start + columns - 1) - self.vector_index(start) + 1 for start in starts)


@dataclass(frozen=True)
class HaloOutput(ChannelsFirstOutput):
    """A channels-first output whose pixels have the numbers of halo rows."""

    image: HaloImage | None = None  # the halo rows

    @classmethod
    def from_image(cls, image: HaloImage) -> HaloOutput:
        """Return the output of the convolution of an image."""
        w = image.w
        return cls(math.prod(w.output_size), w.O // w.groups, w.groups, w.N, get_itemsize(w.storage), image=image)

    @property
    def has_further_rows(self) -> bool:
        """Whether the product has rows that are no pixels."""
        return True

    @property
    def vector(self) -> int:
        """Pixels of a vector, which neither crosses a line nor the end of a tile."""
        assert self.image
        return self.image.output_vector

    def locate(self, row: Expr) -> tuple[Expr, Expr]:
        """Return the image and the pixel of a halo row; the image is one beyond the last if there is no pixel."""
        assert self.image
        sizes, extents = self.image.w.output_size, self.image.extents
        pixel: Expr = 0
        conditions = []
        for axis, (size, extent) in enumerate(zip(sizes, extents, strict=True)):
            position = row // math.prod(extents[axis + 1 :]) % extent
            pixel = pixel * size + position
            conditions.append(True if size == extent else position < size)
        image, is_pixel = row // math.prod(extents), logical_and(*conditions)
        return (image if is_pixel is True else T.Select(is_pixel, image, self.images)), pixel
