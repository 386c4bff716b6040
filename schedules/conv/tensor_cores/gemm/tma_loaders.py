"""Tensors of a convolution as TMA reads them: matrices of rows × (filter tap, channel).

A loader knows one tensor and one mode of TMA, and nothing of the operand (A or B) that the tensor is. Channels are
last in memory. Each tensor of every operator is such a matrix: rows are pixels of an image or filters of a weight. If
channels run along the K of the product, the operand is K-major; if rows do, it is MN-major.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv import tensor_map as maps
from tvmconv.workloads import Conv
from tvmconv.workloads.dtypes import get_itemsize

from ....tir_builder import Expr, Register, if_
from .residue_classes import ResidueClasses
from .tma import TmaCopy

Position = Sequence[Expr]  # coordinates of the first element of a box along the axes of the rows


class TapIterator:
    """Filter tap and first channel of a K tile; K tiles are ordered by taps, then channels.

    Args:
        taps: Taps along each spatial axis that K tiles visit.
        tiles_per_tap: K tiles per tap.
        block_k: Channels per K tile.
    """

    def __init__(self, taps: Sequence[int], tiles_per_tap: int, block_k: int) -> None:
        self._shape, self._tiles_per_tap, self._block_k = tuple(taps), tiles_per_tap, block_k
        self._taps = [Register(f"tap_{axis}") for axis in range(len(self._shape))]
        self._channel = Register("channel")

    @property
    def taps(self) -> list[Expr]:
        """Filter tap along each spatial axis."""
        return [tap.value for tap in self._taps]

    @property
    def channel(self) -> Expr:
        """First channel."""
        return self._channel.value

    def seek(self, k_tile: Expr, residue: Expr = 0) -> None:
        """Move to a K tile of a residue class."""
        tap_idx = k_tile // self._tiles_per_tap
        for axis, tap in enumerate(self._taps):
            tap.set(tap_idx // math.prod(self._shape[axis + 1 :]) % self._shape[axis])
        self._channel.set(k_tile % self._tiles_per_tap * self._block_k)

    def advance(self) -> None:
        """Move to the next channels, and after the last ones to the next tap."""
        self._channel.set(self.channel + self._block_k)
        if math.prod(self._shape) == 1:
            return
        with if_(self.channel == self._tiles_per_tap * self._block_k):
            self._channel.set(0)
            self._advance_tap(len(self._shape) - 1)

    def _advance_tap(self, axis: int) -> None:
        tap = self._taps[axis]
        tap.set(tap.value + 1)
        if axis > 0:
            with if_(tap.value == self._limit(axis)):
                tap.set(0)
                self._advance_tap(axis - 1)

    def _limit(self, axis: int) -> Expr:
        """Return the number of taps along an axis."""
        return self._shape[axis]


class ResidueTapIterator(TapIterator):
    """Filter tap, element of dY and first channel of a K tile, of the taps of a residue class.

    Args:
        residues: The residue classes.
        tiles_per_tap: K tiles per tap.
        block_k: Channels per K tile.
        starts_within_taps: Whether K tiles that `seek` moves to may be any, instead of the first one.
    """

    def __init__(self, residues: ResidueClasses, tiles_per_tap: int, block_k: int, starts_within_taps: bool) -> None:
        axes = residues.axes
        super().__init__([axis.num_taps(0) for axis in axes], tiles_per_tap, block_k)
        self._residues, self._starts_within_taps = residues, starts_within_taps
        self._first_taps = [Register(f"first_tap_{axis}") for axis in range(len(axes))]
        self._first_offsets = [Register(f"first_offset_{axis}") for axis in range(len(axes))]
        self._num_taps = [Register(f"num_taps_{axis}") for axis in range(len(axes))]

    @property
    def taps(self) -> list[Expr]:
        """Tap of the filter along each spatial axis, then the offset in dY along each spatial axis."""
        axes, numbers = self._residues.axes, super().taps
        taps = [
            first.value + tap * axis.tap_step for axis, first, tap in zip(axes, self._first_taps, numbers, strict=True)
        ]
        offsets = [
            first.value - tap * axis.offset_step
            for axis, first, tap in zip(axes, self._first_offsets, numbers, strict=True)
        ]
        return [*taps, *offsets]

    def seek(self, k_tile: Expr, residue: Expr = 0) -> None:
        """Move to a K tile of a residue class."""
        parts = self._residues.split(residue)
        for i, (axis, part) in enumerate(zip(self._residues.axes, parts, strict=True)):
            self._first_taps[i].set(axis.first_tap(part))
            self._first_offsets[i].set(axis.first_offset(part))
            self._num_taps[i].set(axis.num_taps(part))
            self._taps[i].set(0)
        self._channel.set(0)
        if self._starts_within_taps:
            self._channel.set(k_tile % self._tiles_per_tap * self._block_k)
            tap_idx = Register("tap_index", value=k_tile // self._tiles_per_tap)
            for tap, count in zip(self._taps[::-1], self._num_taps[::-1], strict=True):
                divisor = T.max(count.value, 1)  # a class without taps is moved to, but not loaded
                tap.set(tap_idx.value % divisor)
                tap_idx.set(tap_idx.value // divisor)

    def _limit(self, axis: int) -> Expr:
        return self._num_taps[axis].value


class TmaLoader(Protocol):
    """How TMA copies boxes of rows × channels of one tap to shared memory."""

    def tensor_map(self, box_rows: int, box_channels: int, swizzle_bytes: int) -> maps.TensorMap:
        """Return the tensor map for boxes of a size."""

    def locate(self, row: Expr, name: str) -> Position:
        """Compute the position of a row once for all K tiles, in registers if that takes instructions."""

    def load(self, destination: Expr, copy: TmaCopy, position: Position, k: Sequence[Expr]) -> None:
        """Copy the box at a position; `k` is the first channel of the tensor, then the tap along each axis."""


@dataclass(frozen=True)
class _Image:
    """An image (N, spatial axes, channels), read at the pixels under the taps of a filter."""

    w: Conv  # the convolution whose taps read the image

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return get_itemsize(self.w.storage)

    @property
    def extents(self) -> tuple[int, ...]:
        """Channels, spatial axes from the innermost, images."""
        return (self.w.C, *reversed(self.w.input_size), self.w.N)

    def locate(self, row: Expr, name: str) -> Position:
        """Return the pixel under the first tap of filter position `row`, from the innermost axis, and its image."""
        w = self.w
        registers = []
        for axis in range(w.spatial_ndim):
            position = row // math.prod(w.output_size[axis + 1 :]) % w.output_size[axis]
            registers.append(Register(f"{name}_{axis}", value=position * w.stride[axis] - w.pad_low[axis]))
        image = Register(f"{name}_image", value=row // math.prod(w.output_size))
        return [*(register.value for register in reversed(registers)), image.value]


@dataclass(frozen=True)
class Im2colImage(_Image):
    """An image in im2col mode: rows are filter positions, which continue in the next line and the next image.

    TMA handles stride, dilation and padding; pixels outside of the image are zeros.
    """

    def tensor_map(self, box_rows: int, box_channels: int, swizzle_bytes: int) -> maps.TensorMap:
        """Return the tensor map for boxes of filter positions × channels."""
        w = self.w
        corner = tuple(-pad_low for pad_low in reversed(w.pad_low))
        steps, positions = tuple(reversed(w.stride)), tuple(reversed(w.output_size))
        box = (box_channels, box_rows)
        return maps.make_im2col_map(
            w.storage, self.itemsize, self.extents, box, steps, corner, positions, swizzle_bytes
        )

    def load(self, destination: Expr, copy: TmaCopy, position: Position, k: Sequence[Expr]) -> None:
        """Copy the pixels under one tap."""
        channel, *taps = k
        offsets = [T.Cast("uint16", tap * d) for tap, d in zip(reversed(taps), reversed(self.w.dilation), strict=True)]
        copy.issue(destination, (channel, *position), offsets)


@dataclass(frozen=True)
class ResidueImage:
    """dY in im2col mode at stride 1: rows are the positions of a residue class, and taps are offsets.

    All residue classes have the same positions, from the lowest element that any of them reads. Where a class starts
    is a part of its offsets.
    """

    w: Conv  # the forward convolution
    residues: ResidueClasses  # the residue classes of its input's pixels

    def tensor_map(self, box_rows: int, box_channels: int, swizzle_bytes: int) -> maps.TensorMap:
        """Return the tensor map for boxes of positions × channels."""
        w, axes = self.w, self.residues.axes[::-1]
        extents, box = (w.O, *reversed(w.output_size), w.N), (box_channels, box_rows)
        corner, positions = tuple(axis.lower_corner for axis in axes), tuple(axis.positions for axis in axes)
        itemsize, steps = get_itemsize(w.storage), (1,) * w.spatial_ndim
        return maps.make_im2col_map(w.storage, itemsize, extents, box, steps, corner, positions, swizzle_bytes)

    def locate(self, row: Expr, name: str) -> Position:
        """Return the element of dY at the lowest offset of a row, from the innermost axis, and its image."""
        image, *positions = self.residues.split_row(row)
        registers = [
            Register(f"{name}_{i}", value=position + axis.lower_corner)
            for i, (axis, position) in enumerate(zip(self.residues.axes, positions, strict=True))
        ]
        return [*(register.value for register in reversed(registers)), Register(f"{name}_image", value=image).value]

    def load(self, destination: Expr, copy: TmaCopy, position: Position, k: Sequence[Expr]) -> None:
        """Copy the elements under one tap; after the channel and the tap, `k` has the offset along each axis."""
        offsets = k[1 + self.w.spatial_ndim :]
        copy.issue(destination, (k[0], *position), [T.Cast("uint16", offset) for offset in reversed(offsets)])


@dataclass(frozen=True)
class Im2colChannels(Im2colImage):
    """An image in im2col mode whose rows are (tap, channel), and whose channels are filter positions."""

    # Rows per tap, of which the first are the channels of a group. The rows of groups follow one another.
    columns_per_tap: int

    def tensor_map(self, box_rows: int, box_channels: int, swizzle_bytes: int) -> maps.TensorMap:
        """Return the tensor map for boxes of channels × filter positions."""
        return super().tensor_map(box_channels, box_rows, swizzle_bytes)

    def locate(self, row: Expr, name: str) -> Position:
        """Compute the channel and the tap of a row, in registers."""
        kernel, tap_idx = self.w.kernel, row // self.columns_per_tap
        taps = [
            Register(f"{name}_tap_{axis}", value=tap_idx // math.prod(kernel[axis + 1 :]) % size)
            for axis, size in enumerate(kernel)
        ]
        channel = row % self.columns_per_tap
        if self.w.groups > 1:
            channel = channel + tap_idx // math.prod(kernel) * (self.w.C // self.w.groups)
        return [Register(f"{name}_channel", value=channel).value, *(tap.value for tap in taps)]

    def load(self, destination: Expr, copy: TmaCopy, position: Position, k: Sequence[Expr]) -> None:
        """Copy the pixels under one tap of neighbouring filter positions."""
        w, filter_position = self.w, k[0]
        pixel = [filter_position // math.prod(w.output_size)]
        for axis, (size, stride, pad_low) in enumerate(zip(w.output_size, w.stride, w.pad_low, strict=True)):
            coordinate = filter_position // math.prod(w.output_size[axis + 1 :]) % size
            pixel.append(coordinate * stride - pad_low)
        super().load(destination, copy, pixel[::-1], position)


@dataclass(frozen=True)
class ImageLines(_Image):
    """An image in tiled mode: rows are the neighbouring pixels of one line, with a halo for all taps along the line.

    Pixels outside of the image are zeros. The taps along the line are offsets of the multiplication, not of the copy.
    """

    def tensor_map(self, box_rows: int, box_channels: int, swizzle_bytes: int) -> maps.TensorMap:
        """Return the tensor map for boxes of pixels of a line × channels."""
        strides = tuple(math.prod(self.extents[:axis]) for axis in range(1, len(self.extents)))
        box = (box_channels, box_rows, *(1,) * self.w.spatial_ndim)
        return maps.make_tiled_map(self.w.storage, self.itemsize, self.extents, strides, box, swizzle_bytes)

    def load(self, destination: Expr, copy: TmaCopy, position: Position, k: Sequence[Expr]) -> None:
        """Copy pixels of the line under one tap."""
        channel, *taps = k
        column, *others = position
        image = others.pop()
        steps = [tap * dilation for tap, dilation in zip(taps, self.w.dilation, strict=True)][:-1]
        others = [other + step for other, step in zip(others, reversed(steps), strict=True)]
        copy.issue(destination, (channel, column, *others, image))


@dataclass(frozen=True)
class PixelMatrix:
    """The pixels of all images as rows of one matrix, for filters of one tap without stride and padding."""

    dtype: str
    rows: int
    channels: int

    def tensor_map(self, box_rows: int, box_channels: int, swizzle_bytes: int) -> maps.TensorMap:
        """Return the tensor map for boxes of pixels × channels."""
        extents, box = (self.channels, self.rows), (box_channels, box_rows)
        return maps.make_tiled_map(self.dtype, get_itemsize(self.dtype), extents, (self.channels,), box, swizzle_bytes)

    def locate(self, row: Expr, name: str) -> Position:
        """Return the row."""
        return (row,)

    def load(self, destination: Expr, copy: TmaCopy, position: Position, k: Sequence[Expr]) -> None:
        """Copy neighbouring pixels."""
        copy.issue(destination, (k[0], *position))


@dataclass(frozen=True)
class ChannelRows(PixelMatrix):
    """The pixels of all images as columns of one matrix, whose rows are channels, which are contiguous."""

    def tensor_map(self, box_rows: int, box_channels: int, swizzle_bytes: int) -> maps.TensorMap:
        """Return the tensor map for boxes of channels × pixels."""
        return super().tensor_map(box_channels, box_rows, swizzle_bytes)

    def load(self, destination: Expr, copy: TmaCopy, position: Position, k: Sequence[Expr]) -> None:
        """Copy neighbouring channels of neighbouring pixels."""
        super().load(destination, copy, (k[0],), position)


@dataclass(frozen=True)
class FilterMatrix:
    """A weight (filters, taps, channels of a group): rows are filters."""

    dtype: str  # dtype of the elements
    filters: int  # number of filters
    kernel: tuple[int, ...]  # taps along each spatial axis
    channels: int  # channels of a group

    def tensor_map(self, box_rows: int, box_channels: int, swizzle_bytes: int) -> maps.TensorMap:
        """Return the tensor map for boxes of filters × channels of one tap."""
        taps = math.prod(self.kernel)
        extents, box = (self.channels, taps, self.filters), (box_channels, 1, box_rows)
        strides, itemsize = (self.channels, self.channels * taps), get_itemsize(self.dtype)
        return maps.make_tiled_map(self.dtype, itemsize, extents, strides, box, swizzle_bytes)

    def locate(self, row: Expr, name: str) -> Position:
        """Return the filter."""
        return (row,)

    def load(self, destination: Expr, copy: TmaCopy, position: Position, k: Sequence[Expr]) -> None:
        """Copy channels of one tap of neighbouring filters; `k` is the first channel, ..., then the tap."""
        copy.issue(destination, (k[0], self._tap_index(k), *position))

    def _tap_index(self, k: Sequence[Expr]) -> Expr:
        rest, tap_idx = k[1:], 0
        assert len(rest) >= len(self.kernel), f"{len(rest)} coordinates behind the channel, of a filter {self.kernel}"
        for size, tap in zip(self.kernel, rest[-len(self.kernel) :], strict=True):
            tap_idx = tap_idx * size + tap
        return tap_idx


INTERLEAVED_FILTERS = 16  # filters in a block of `InterleavedFilters`


@dataclass(frozen=True)
class InterleavedFilters(FilterMatrix):
    """A weight whose filters TMA reorders in blocks of 16: row 8j + 2q + e of a block is filter 4q + 2j + e.

    Thread q of four has columns 8j + 2q + e of a product, for j and e of 0 and 1. These are then the outputs of four
    neighbouring filters, which are one word if they have 8 bits. Filters and their tiles are multiples of a block. The
    taps of a filter follow one another along its channels, of which boxes are a divisor if there are several taps.
    """

    def tensor_map(self, box_rows: int, box_channels: int, swizzle_bytes: int) -> maps.TensorMap:
        """Return the tensor map for boxes of channels of one tap × e × q × j × blocks of filters."""
        size, block = self.channels * math.prod(self.kernel), INTERLEAVED_FILTERS
        extents, strides = (size, 2, 4, 2, self.filters // block), (size, 4 * size, 2 * size, block * size)
        box, itemsize = (box_channels, 2, 4, 2, box_rows // block), get_itemsize(self.dtype)
        return maps.make_tiled_map(self.dtype, itemsize, extents, strides, box, swizzle_bytes)

    def load(self, destination: Expr, copy: TmaCopy, position: Position, k: Sequence[Expr]) -> None:
        """Copy channels of one tap of blocks of filters."""
        element = self._tap_index(k) * self.channels + k[0]
        copy.issue(destination, (element, 0, 0, 0, position[0] // INTERLEAVED_FILTERS))


@dataclass(frozen=True)
class TransposedFilters(FilterMatrix):
    """A weight whose rows are channels, which are contiguous, and whose channels are filters."""

    def tensor_map(self, box_rows: int, box_channels: int, swizzle_bytes: int) -> maps.TensorMap:
        """Return the tensor map for boxes of channels of one tap × filters."""
        return super().tensor_map(box_channels, box_rows, swizzle_bytes)

    def load(self, destination: Expr, copy: TmaCopy, position: Position, k: Sequence[Expr]) -> None:
        """Copy neighbouring channels of one tap of neighbouring filters."""
        (row,), (first_filter, *taps) = position, k
        super().load(destination, copy, (first_filter,), (row, *taps[: len(self.kernel)]))


@dataclass(frozen=True)
class FlippedFilters(TransposedFilters):
    """Transposed filters with flipped taps."""

    def load(self, destination: Expr, copy: TmaCopy, position: Position, k: Sequence[Expr]) -> None:
        """Copy neighbouring channels of one tap of neighbouring filters."""
        first_filter, *taps = k
        flipped = [size - 1 - tap for size, tap in zip(self.kernel, taps, strict=True)]
        super().load(destination, copy, position, (first_filter, *flipped))


@dataclass(frozen=True)
class TapMatrices(FilterMatrix):
    """A transposed weight (taps, channels, filters) for operands of 32 bits, which wgmma does not transpose.

    Rows are the second axis, and what the base class calls channels is the last one.
    """

    flips_taps: bool = False  # whether the taps of the product are those of the weight in the opposite order

    def tensor_map(self, box_rows: int, box_channels: int, swizzle_bytes: int) -> maps.TensorMap:
        """Return the tensor map for boxes of rows × channels of one tap."""
        extents, box = (self.channels, self.filters, math.prod(self.kernel)), (box_channels, box_rows, 1)
        strides, itemsize = (self.channels, self.channels * self.filters), get_itemsize(self.dtype)
        return maps.make_tiled_map(self.dtype, itemsize, extents, strides, box, swizzle_bytes)

    def load(self, destination: Expr, copy: TmaCopy, position: Position, k: Sequence[Expr]) -> None:
        """Copy channels of one tap of neighbouring rows."""
        channel, taps, tap_idx = k[0], k[1 : 1 + len(self.kernel)], 0
        for size, tap in zip(self.kernel, taps, strict=True):
            tap_idx = tap_idx * size + (size - 1 - tap if self.flips_taps else tap)
        copy.issue(destination, (channel, *position, tap_idx))


@dataclass(frozen=True)
class ChannelsFirstPixels:
    """Channels-first images (N, channels, pixels) for filters of one tap: neighbouring pixels are contiguous."""

    dtype: str  # dtype of the elements
    images: int  # number of images
    channels: int  # number of channels
    pixels: int  # pixels of an image; a row of them is a multiple of 16 bytes
    rows_per_image: int  # rows of the product per image, a multiple of the pixels of a box; those behind are zeros

    def tensor_map(self, box_pixels: int, box_channels: int, swizzle_bytes: int) -> maps.TensorMap:
        """Return the tensor map for boxes of channels × pixels."""
        extents, strides = (self.pixels, self.channels, self.images), (self.pixels, self.pixels * self.channels)
        box, itemsize = (box_pixels, box_channels, 1), get_itemsize(self.dtype)
        return maps.make_tiled_map(self.dtype, itemsize, extents, strides, box, swizzle_bytes)

    def locate(self, row: Expr, name: str) -> Position:
        """Compute the pixel and the image of a row of the product."""
        pixel = Register(f"{name}_pixel", value=row % self.rows_per_image)
        image = Register(f"{name}_image", value=row // self.rows_per_image)
        return (pixel.value, image.value)

    def load(self, destination: Expr, copy: TmaCopy, position: Position, k: Sequence[Expr]) -> None:
        """Copy neighbouring pixels of neighbouring channels."""
        pixel, image = position
        copy.issue(destination, (pixel, k[0], image))
