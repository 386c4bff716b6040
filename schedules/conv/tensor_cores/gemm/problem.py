"""A convolution as a matrix product: which tensor is A, B and C, how TMA loads it, and its major mode.

| operator | M | N | K | A: tensor, loader, major | B | C |
| --- | --- | --- | --- | --- | --- | --- |
| fprop | N·P·Q | K | (R·S, C) | X, im2col, K | filters, tiled, K | Y |
| fprop with cached frames, for each frame of Y | P·Q | K | (T·R·S, C) | X or cache, im2col, K | filters, tiled, K | Y |
| fprop with filter rows | K | N·P·Q | (R·S, C) | filters, tiled, K | X, im2col, K | Y |
| fprop with few filters | input pixels | (R·S, K) | (T, C) | X or cache, tiled, K | filters, tiled, K | terms of Y |
| dgrad | N·H·W | C | (R·S, K) | dY, im2col, K | filters with flipped taps, tiled, MN | dX |
| strided dgrad, for each residue class | its N·H·W | C | (its taps, K) | dY, im2col, K | filters, tiled, MN | dX |
| wgrad | K | (R·S, C) | N·P·Q | dY, tiled, MN | X, im2col, MN | dK |

wgmma does not transpose operands of 32 bits, so the filters of TF32 gradients are transposed first, and are K-major.
With halo rows, the M of a channels-first fprop also counts zeros between lines (`halo_image`), and A is no operand of
TMA.

The layers know A, B and C only. A row of this table is a function that returns a `ConvProblem`. (Source: CUTLASS,
`include/cutlass/conv/convolution.h`.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tvmconv import tensor_map as maps
from tvmconv.workloads import Conv, Conv3d

from ....tir_builder import Expr
from ..implicit_gemm_shape import ACCUMULATOR_BYTES, ImplicitGemmShape
from .atoms import Major
from .frame_loaders import FrameImages, FrameTapIterator
from .residue_classes import ResidueClasses
from .tap_columns import PlaneWindows, WindowTiles
from .tma_loaders import (
    ChannelRows,
    ChannelsFirstPixels,
    FilterMatrix,
    FlippedFilters,
    Im2colChannels,
    Im2colImage,
    ImageLines,
    PixelMatrix,
    ResidueImage,
    ResidueTapIterator,
    TapIterator,
    TapMatrices,
    TmaLoader,
    TransposedFilters,
)


@dataclass(frozen=True)
class Operand:
    """Operand A or B of the product."""

    tensor: str  # name of the kernel's argument
    dtype: str  # dtype in which it is multiplied
    loader: TmaLoader  # how TMA copies it
    major: Major = Major.K  # contiguous mode
    rows_per_group: int = 0  # rows between the operands of neighbouring groups
    channels_per_group: int = 0  # channels between the operands of neighbouring groups
    contiguous_rows: int = 0  # rows of an MN-major operand that are contiguous; boxes divide them. 0: all rows
    # Parts of the reduction, which are neighbouring groups of the product with the same rows. 0: groups have rows and
    # channels of their own.
    parts: int = 0

    def locate_row(self, group: Expr, row: Expr) -> Expr:
        """Return a row of a group, counted from the first one of the operand."""
        if not self.rows_per_group:
            return row
        return (group // self.parts if self.parts else group) * self.rows_per_group + row

    def locate_channel(self, group: Expr, channel: Expr) -> Expr:
        """Return a channel of a group, counted from the first one of the operand."""
        if not self.channels_per_group:
            return channel
        return (group % self.parts if self.parts else group) * self.channels_per_group + channel


@dataclass(frozen=True)
class ConvProblem:
    """The product of a convolution, once for each group."""

    shape: ImplicitGemmShape  # its extents
    a: Operand  # operand A, M × K
    b: Operand  # operand B, N × K
    c: str  # name of the argument that receives C, M × N
    taps: tuple[int, ...]  # taps along each spatial axis that K tiles visit
    # Residue classes of the rows, each with a product of its own; None if all rows have the same taps.
    residues: ResidueClasses | None = None
    frames: Conv3d | None = None  # the convolution, if its rows are pixels of a frame; None if they are all pixels
    windows: WindowTiles | None = None  # windows of lines, if taps are columns; None if columns are filters
    has_filter_rows: bool = False  # whether rows are filters and columns are pixels, of an output with channels last

    def iterate_taps(self, tiles_per_tap: int, block_k: int, num_splits: int) -> TapIterator:
        """Return the iterator over K tiles of `block_k` channels, which `num_splits` CTAs share."""
        if self.residues:
            return ResidueTapIterator(self.residues, tiles_per_tap, block_k, num_splits > 1)
        if self.frames:
            return FrameTapIterator(self.frames, self.taps, tiles_per_tap, block_k)
        return TapIterator(self.taps, tiles_per_tap, block_k)


def make_fprop(w: Conv, rows_per_copy: int, shares_taps: bool = False, input_box_pixels: int = 0) -> ConvProblem:
    """Return the product of a forward convolution.

    Args:
        w: The convolution.
        rows_per_copy: Pixels per copy, which TMA limits in tiled mode.
        shares_taps: Whether all taps along a line are multiplied from one copy of its pixels.
        input_box_pixels: Pixels per box of a channels-first X, for filters of one tap; 0 if X is channels last.
    """
    shape = ImplicitGemmShape.from_workload(w)
    is_pixel_matrix = (
        math.prod((*w.kernel, *w.stride)) == 1
        and w.output_size == w.input_size
        and rows_per_copy <= maps.MAX_BOX_ELEMENTS
    )
    loader: TmaLoader = Im2colImage(w)
    if shares_taps:
        loader = ImageLines(w)
    elif is_pixel_matrix:
        loader = PixelMatrix(w.storage, shape.m, w.C)
    major = Major.K
    if input_box_pixels:
        pixels = math.prod(w.input_size)
        loader, major = ChannelsFirstPixels(w.storage, w.N, w.C, pixels, rows_per_image=pixels), Major.MN
    filters = FilterMatrix(w.weight_storage, w.O, w.kernel, shape.channels_per_group)
    return ConvProblem(
        shape,
        a=Operand(
            "X",
            w.dtype,
            loader,
            major,
            channels_per_group=shape.channels_per_group,
            contiguous_rows=input_box_pixels,
        ),
        b=Operand("K", w.operand_dtypes[1], filters, rows_per_group=shape.n),
        c="Y",
        taps=(*w.kernel[:-1], 1) if shares_taps else w.kernel,
    )


def make_filter_rows(w: Conv, shape: ImplicitGemmShape, pixels_per_copy: int, shares_taps: bool) -> ConvProblem:
    """Return the product of a forward convolution with filters as rows and pixels as columns.

    Args:
        w: The convolution, channels last and of one group.
        shape: The extents: filters × pixels.
        pixels_per_copy: Pixels per copy, which TMA limits in tiled mode.
        shares_taps: Whether all taps along a line are multiplied from one copy of its pixels.
    """
    problem = make_fprop(w, pixels_per_copy, shares_taps)
    return replace(problem, shape=shape, a=problem.b, b=problem.a, has_filter_rows=True)


def make_frames(w: Conv3d, shape: ImplicitGemmShape, shares_taps: bool) -> ConvProblem:
    """Return the products of a convolution with cached frames, one for each output frame.

    Args:
        w: The convolution.
        shape: The extents of the product of a frame.
        shares_taps: Whether all taps along a line are multiplied from one copy of its pixels.
    """
    filters = FilterMatrix(w.storage, w.O, w.kernel, shape.channels_per_group)
    frames = FrameImages(w, shares_taps)
    return ConvProblem(
        shape,
        a=Operand("X", w.dtype, frames, channels_per_group=shape.channels_per_group),
        b=Operand("K", w.dtype, filters, rows_per_group=shape.n),
        c="Y",
        taps=(*w.kernel[:-1], 1) if shares_taps else w.kernel,
        frames=w,
    )


def make_tap_columns(tiles: WindowTiles, shape: ImplicitGemmShape) -> ConvProblem:
    """Return the product of windows of input lines with columns (tap, filter), which a launch of its own arranges."""
    w = tiles.w
    return ConvProblem(
        shape,
        a=Operand("X", w.dtype, PlaneWindows(tiles)),
        b=Operand("K", w.dtype, FilterMatrix(w.storage, tiles.num_columns, (w.T,), w.C)),
        c="Y",
        taps=(w.T,),
        windows=tiles,
    )


def make_dgrad(w: Conv, rows_per_copy: int, shares_taps: bool = False, input_box_pixels: int = 0) -> ConvProblem:
    """Return the product of a dgrad of stride 1, which is a convolution of dY with transposed and flipped filters.

    The arguments are those of `make_fprop` for the convolution of dY, whose filters are read from the weight as it is,
    or from the transposed one if elements have 32 bits.
    """
    problem = make_fprop(w, rows_per_copy, shares_taps, input_box_pixels)
    shape = problem.shape
    if shape.itemsize == ACCUMULATOR_BYTES:
        matrices = TapMatrices(w.storage, shape.n, w.kernel, w.C, flips_taps=True)
        return replace(problem, b=Operand("K", w.dtype, matrices, channels_per_group=shape.channels_per_group))
    filters = FlippedFilters(w.storage, w.C, w.kernel, shape.n)
    b = Operand("K", w.dtype, filters, Major.MN, channels_per_group=shape.channels_per_group)
    return replace(problem, b=b)


def make_strided_dgrad(w: Conv, shape: ImplicitGemmShape) -> ConvProblem:
    """Return the products of a strided dgrad, one for each residue class of the pixels of dX."""
    residues = ResidueClasses.from_workload(w)
    channels = shape.channels_per_group
    filters: TmaLoader = TransposedFilters(w.storage, w.O, w.kernel, shape.n)
    major = Major.MN
    if shape.itemsize == ACCUMULATOR_BYTES:
        filters, major = TapMatrices(w.storage, shape.n, w.kernel, w.O), Major.K
    return ConvProblem(
        shape,
        a=Operand("X", w.dtype, ResidueImage(w, residues), channels_per_group=channels),
        b=Operand("K", w.dtype, filters, major, channels_per_group=channels),
        c="Y",
        taps=w.kernel,
        residues=residues,
    )


def make_wgrad(w: Conv, shape: ImplicitGemmShape, columns_per_tap: int) -> ConvProblem:
    """Return the product of a wgrad, whose groups are parts of the reduction over all pixels of the batch.

    If the convolution has groups, the parts of a group follow one another.

    Args:
        w: The forward convolution.
        shape: Its extents: filters, taps × `columns_per_tap`, and the pixels of a part as channels of a group.
        columns_per_tap: Channels of X, rounded up so that a box of TMA does not cross taps.
    """
    pixels, is_pixel_matrix = w.N * math.prod(w.output_size), math.prod((*w.kernel, *w.stride)) == 1
    channels: TmaLoader = Im2colChannels(w, columns_per_tap)
    columns_per_group = shape.n
    if is_pixel_matrix and w.output_size == w.input_size:
        channels, columns_per_group = ChannelRows(w.storage, pixels, w.C), w.C // w.groups

    def make_operand(name: str, loader: TmaLoader, rows_per_group: int, contiguous_rows: int = 0) -> Operand:
        rows, parts = (rows_per_group, shape.groups // w.groups) if w.groups > 1 else (0, 0)
        return Operand(name, w.dtype, loader, Major.MN, rows, shape.channels_per_group, contiguous_rows, parts)

    dy = ChannelRows(w.storage, pixels, w.O)
    return ConvProblem(
        shape,
        a=make_operand("dY", dy, shape.m),
        b=make_operand("X", channels, columns_per_group, columns_per_tap),
        c="Y",
        taps=(1,),
    )
