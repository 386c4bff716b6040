"""Requirements of `hopper` on a workload: what TMA can copy and store, and which taps can share a copy."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from tvmconv import tensor_map as maps
from tvmconv.arithmetic import round_up
from tvmconv.target import WARP_SIZE
from tvmconv.workloads import Conv, Conv1d, epilogue
from tvmconv.workloads.dtypes import get_itemsize
from tvmconv.workloads.layout import CHANNELS_LAST
from tvmconv.workloads.text import MAX_INT32_ELEMENTS

from ..filter_rows_product import FilterRowsProduct
from ..frame_product import get_planes
from ..gemm.tap_columns import PADDING_ROWS
from ..implicit_gemm_shape import VECTOR_BYTES, ImplicitGemmShape
from ..tap_column_product import TapColumnProduct

WARPGROUP_THREADS = 4 * WARP_SIZE  # threads that execute a wgmma
WGMMA_M = 64  # pixels per wgmma
BOX_PIXELS = (64, 32, 16)  # widths of a box of 16-bit pixels: 128, 64 or 32 bytes, those of a swizzle
MAX_WIDE_BOX_RATIO = 1.1  # padded pixels of the widest boxes, relative to narrower ones, at which these take as long
MAX_LINE_PADDING = 1.25  # largest ratio of a padded output row to its pixels
WGMMA_K_BYTES = 32  # bytes of the reduction per wgmma
NARROW_ROW_BYTES = 128  # rows of fewer bytes leave a part of the widest swizzle empty


def can_load_by_tma(w: Conv) -> bool:
    """Return whether TMA can copy the operands: channels fill 16-byte chunks, and corners and offsets are in range."""
    gemm, w = ImplicitGemmShape.from_workload(w), get_planes(w)
    tensor_ndim = w.spatial_ndim + 2
    max_corner, max_offset = maps.CORNER_LIMITS[tensor_ndim], maps.OFFSET_LIMITS[tensor_ndim]
    last_pixel_coords = [
        (o - 1) * s - pad - (n - 1)
        for o, s, pad, n in zip(w.output_size, w.stride, w.pad_low, w.input_size, strict=True)
    ]
    return (
        w.layout == CHANNELS_LAST
        and gemm.channels_per_group * gemm.itemsize % VECTOR_BYTES == 0
        and (gemm.groups == 1 or gemm.channels_per_group * gemm.itemsize % WGMMA_K_BYTES == 0)
        and max(w.stride) <= maps.MAX_ELEMENT_STRIDE
        and max(dilation * (r - 1) for dilation, r in zip(w.dilation, w.kernel, strict=True)) < max_offset
        and max(w.pad_low) <= max_corner
        and all(-max_corner <= last_pixel_coord < max_corner for last_pixel_coord in last_pixel_coords)
    )


def is_promising(w: Conv) -> bool:
    """Return whether each group has enough input and output channels for wgmma."""
    gemm = ImplicitGemmShape.from_workload(w)
    return can_load_by_tma(w) and gemm.channels_per_group * gemm.itemsize >= WGMMA_K_BYTES and gemm.n >= 16


def has_narrow_rows(w: Conv) -> bool:
    """Return whether the gradients of a convolution with one tap read or write rows that do not fill a swizzle.

    They are bound by memory, and `mma_sync` was faster on an H100, as more of its CTAs are resident.
    """
    is_matrix = math.prod((*w.kernel, *w.stride)) == 1
    return is_matrix and min(w.C, w.O) // w.groups * get_itemsize(w.storage) < NARROW_ROW_BYTES


def can_share_taps(w: Conv) -> bool:
    """Return whether a filter row's taps read neighbouring pixels and a wgmma's pixels lie in one output row."""
    has_neighbours = w.stride[-1] == 1 and w.kernel[-1] > 1
    has_boxes = has_neighbours and WGMMA_M + compute_halo_width(w) <= maps.MAX_BOX_ELEMENTS
    return has_boxes and (w.output_size[-1] % WGMMA_M == 0 or can_pad_lines(w))


def can_pad_lines(w: Conv) -> bool:
    """Return whether output rows that are no multiples of a wgmma's pixels can be padded to such multiples.

    Products of the pixels beyond a row are not stored, because TMA leaves out what lies outside of the output.
    """
    line = w.output_size[-1]
    padded = round_up(line, WGMMA_M)
    is_plain = isinstance(w, Conv) and can_store_by_tma(w) and not returns_stats(w) and not has_large_output(w)
    return line < padded <= MAX_LINE_PADDING * line and is_plain


def pad_lines(w: Conv) -> Conv:
    """Return the convolution whose output rows are padded to multiples of a wgmma's pixels."""
    line = w.output_size[-1]
    *padding, pad_high = w.padding
    padded = (*padding, pad_high + round_up(line, WGMMA_M) - line)
    return dataclasses.replace(w, padding=padded)  # type: ignore[type-var]  # operators are dataclasses


def list_taps_per_copy(w: Conv) -> tuple[int, ...]:
    """Return the options for the number of taps of a filter row that share a copy of the pixels."""
    return (1, w.kernel[-1]) if can_share_taps(w) else (1,)


def list_taps_per_copy_of_whole_lines(w: Conv) -> tuple[int, ...]:
    """Return the options that need no padding of output rows."""
    return (1,) if can_pad_lines(w) else list_taps_per_copy(w)


def describe_lines(w: Conv) -> dict[str, Any]:
    """Return the attributes of a tile config that a workload has: its lines of pixels, and its filters."""
    if isinstance(w, FilterRowsProduct):
        return {"has_filter_rows": True, "halo_width": w.halo_width}
    gemm = ImplicitGemmShape.from_workload(w)
    channels = gemm.channels_per_group
    filters = {"taps": gemm.k // channels, "channel_bytes": channels * gemm.itemsize}
    lines = {"line": w.output_size[-1], "padded_line": round_up(w.output_size[-1], WGMMA_M)}
    return {"halo_width": compute_halo_width(w), **filters, **(lines if can_pad_lines(w) else {})}


def compute_halo_width(w: Conv) -> int:
    """Return the distance in pixels from the first to the last tap of a filter row."""
    return w.dilation[-1] * (w.kernel[-1] - 1)


def has_large_output(w: Conv) -> bool:
    """Return whether offsets in the output need 64 bits, which only TMA computes."""
    gemm = ImplicitGemmShape.from_workload(w)
    return gemm.num_products * gemm.m * gemm.n > MAX_INT32_ELEMENTS


def can_store_by_tma(w: Conv) -> bool:
    """Return whether output rows are whole 16-byte chunks in each group and the epilogue reads at most one residual."""
    gemm = ImplicitGemmShape.from_workload(w)
    residual_ops = [operation for operation in epilogue.get_ops(w.epilogue) if operation.argument_kind == "output"]
    channels = gemm.m if isinstance(w, FilterRowsProduct) else gemm.n
    has_whole_chunks = channels * gemm.output_itemsize % VECTOR_BYTES == 0
    return has_whole_chunks and len(residual_ops) <= 1 and not isinstance(w, TapColumnProduct)


def count_padding_rows(w: Conv) -> int:
    """Return the rows of padding of the sums that meet in shared memory."""
    return PADDING_ROWS if isinstance(w, TapColumnProduct) else 0


def find_residual(w: Conv) -> str | None:
    """Return the name of the epilogue operation that reads a residual; None if none does or several do."""
    residual_names = [
        operation.name for operation in epilogue.get_ops(w.epilogue) if operation.argument_kind == "output"
    ]
    return residual_names[0] if len(residual_names) == 1 else None


def returns_stats(w: Conv) -> bool:
    """Return whether the kernel of a convolution or of another product returns statistics of its output."""
    return epilogue.STATS in w.epilogue


def can_store_rows_by_tma(w: Conv) -> bool:
    """Return whether neighbouring pixels of a tile are neighbours in the output; not so if it has residue classes."""
    return ImplicitGemmShape.from_workload(w).residues == 1


def find_tma_residual(w: Conv) -> str | None:
    """Return the name of the epilogue operation whose residual TMA loads; None if there is none."""
    return find_residual(w) if can_store_rows_by_tma(w) else None


def is_pixel_matrix(w: Conv) -> bool:
    """Return whether the pixels of the batch are the rows of one matrix: one tap, no stride and no padding."""
    return math.prod((*w.kernel, *w.stride)) == 1 and w.output_size == w.input_size


def pad_planes(w: Conv) -> Conv | None:
    """Return the convolution of one line of pixels whose planes are padded to boxes of 32 or 64 pixels.

    TMA copies zeros beyond the end of a plane, and products of these are not stored. The result is None if planes are
    multiples of the widest box, or no multiples of 16 bytes.

    Args:
        w: The convolution, channels last.
    """
    pixels, vector = math.prod(w.input_size), VECTOR_BYTES // get_itemsize(w.storage)
    if not is_pixel_matrix(w) or get_itemsize(w.storage) != 2 or pixels % vector or pixels % BOX_PIXELS[0] == 0:
        return None
    wide, narrow = (round_up(pixels, width) for width in BOX_PIXELS[:2])
    padded = wide if wide <= MAX_WIDE_BOX_RATIO * narrow else narrow
    return Conv1d(w.N, w.C, padded, w.O, 1, groups=w.groups, dtype=w.dtype, layout=w.layout, epilogue=w.epilogue)


def choose_box_pixels(w: Conv) -> int:
    """Return the pixels per box in which TMA can copy a channels-first input to an MN-major tile; 0 if it cannot.

    Each filter has one tap, elements have 16 bits, and boxes of a swizzle's width do not cross the end of an image.
    """
    pixels = math.prod(w.input_size)
    if not is_pixel_matrix(w) or get_itemsize(w.storage) != 2:
        return 0
    return next((width for width in BOX_PIXELS if pixels % width == 0), 0)
