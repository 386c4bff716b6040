"""Configs of depthwise convolutions as products with band matrices (`bands`), and the workloads that have any."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from tvmconv.arithmetic import ceil_div, round_up
from tvmconv.target import H200, L2_CLOCKS
from tvmconv.workloads import Conv
from tvmconv.workloads.conv_gradient import InputGradient
from tvmconv.workloads.dtypes import get_itemsize
from tvmconv.workloads.layout import CHANNELS_LAST

from ....tir_builder import Expr
from ...estimated_config import EstimatedTileConfig
from ...tile_config import Rule, combine_overlapping
from ..gemm.epilogue_ops import EpilogueOps

OCTET = 8  # channels in 16 bytes
MMA_M, MMA_N, MMA_K = 16, 8, 16
COPIES = 2  # of the filters
STAGED_PAD = 8  # words between the results of two octets in shared memory, against bank conflicts
OCTET_PAD_BYTES = 64  # between the planes of two octets, likewise
MAX_PADDING_SHARE = 0.25  # rows of zeros of an image in shared memory, as a part of its own rows
MIN_TAPS = 25  # with fewer, the FMA units are as fast
MAX_ACCUMULATORS = 128
OVERHEAD_REGISTERS = 48  # besides the accumulators
SM_REGISTERS = 65536
CYCLES_PER_MMA = 2.5  # of an SM
SHARED_BYTES_PER_CLOCK = 128  # of an SM
PAIRED_BYTES = 2  # bytes of results of which words have two
MAX_VECTOR = 8  # elements of a copy of a row
MAX_SHARED_BYTES = 227 << 10
AnyConv = Conv | InputGradient


@dataclasses.dataclass(frozen=True)
class BandAxis:
    """Rows or columns of Y in tiles, for one config or as columns for many, and the window of X below a tile."""

    size: int  # elements of Y
    source: int  # elements of X
    taps: int
    pad: int  # zeros before X
    tile: Any  # elements of a tile of Y
    vector: int  # elements of X of which the window of a tile starts at a multiple

    @property
    def tiles(self) -> Any:
        """Tiles of the axis; the window of the only one is X without padding."""
        return ceil_div(self.size, self.tile)

    @property
    def window(self) -> Any:
        """Elements of X of a window."""
        return np.where(self.tiles == 1, self.source, self.tile + self.taps - 1 + self._lead - self.pad)

    @property
    def offset(self) -> Any:
        """Place in the window of the element of X that the first tap connects with the first element of Y."""
        return np.where(self.tiles == 1, -self.pad, self._lead - self.pad)

    @property
    def _lead(self) -> int:
        """Elements of the window of a tile before its first output's place."""
        return round_up(self.pad, self.vector)

    def first(self, index: Expr) -> Expr:
        """Return the element of X at the start of the window of a tile."""
        return 0 if self.tiles == 1 else index * int(self.tile) - self._lead


@dataclasses.dataclass(frozen=True)
class BandConfig(EstimatedTileConfig):
    """One config, or many configs as columns."""

    TILE_KNOBS = ("octets", "images", "mmas_y", "mmas_x")

    octets: Any  # octets of channels of a CTA, a warp for each channel; half octets if channels are first
    images: Any  # images of a CTA
    mmas_y: Any  # instructions along the rows of Y of an image
    mmas_x: Any  # instructions along the columns of Y

    @classmethod
    def list_options(cls, w: AnyConv) -> dict[str, Any]:
        """Return the options of all knobs."""
        return {"octets": (1, 2, 4), "images": (1, 2, 4, 8, MMA_M), "mmas_y": (1, 2, 4), "mmas_x": (1, 2, 4, 7)}

    @classmethod
    def list_required(cls, w: AnyConv) -> list[Rule]:
        """Return the conditions on every config."""
        return [
            ("CTAs compute all channels", lambda t: w.C % t.channels == 0),
            (
                f"at most {MAX_ACCUMULATORS} accumulators, and registers for all threads",
                lambda t: (
                    (t.num_accumulators <= MAX_ACCUMULATORS)
                    & (t.num_threads * (t.num_accumulators + OVERHEAD_REGISTERS) <= SM_REGISTERS)
                ),
            ),
            (
                f"{MMA_M} images, which are the rows of a product, have results of 16 bits that take the place of X",
                lambda t: np.logical_not(t.has_image_rows) | t.can_replace_pixels,
            ),
            (f"at most {MAX_SHARED_BYTES} bytes of shared memory", lambda t: t.smem_bytes <= MAX_SHARED_BYTES),
        ]

    @classmethod
    def list_pruned(cls, w: AnyConv) -> list[Rule]:
        """Return the conditions on configs that are worth a search."""
        return [("a CTA has at most all images", lambda t: t.images <= w.N)]

    @property
    def has_image_rows(self) -> Any:
        """Whether the rows of a product are images, each at one row of X, which is then read once for all taps."""
        return np.equal(self.images, MMA_M)

    @property
    def can_replace_pixels(self) -> Any:
        """Whether a row of Y can take the place of that row of X, which is no longer needed then."""
        rows, fits = self.axes[0], self.mmas_x * MMA_N <= self.mmas_k * MMA_K + MMA_N
        is_behind = (rows.tiles > 1) | ((rows.size <= rows.source) & (rows.pad < rows.taps))
        return np.equal(self.mmas_y, 1) & self.stages_pairs & is_behind & fits

    @property
    def convolution(self) -> Conv:
        """The convolution, which for a gradient is that of dY."""
        conv = self.w.direct_convolution if isinstance(self.w, InputGradient) else self.w
        assert conv
        return conv

    @property
    def is_channels_last(self) -> bool:
        """Whether channels are the innermost axis of X and Y."""
        return bool(self.convolution.layout == CHANNELS_LAST)

    @property
    def input_vector(self) -> int:
        """Elements of a copy of X along a row."""
        return 1 if self.is_channels_last else math.gcd(self.convolution.input_size[-1], MAX_VECTOR)

    @property
    def axes(self) -> tuple[BandAxis, BandAxis]:
        """Rows and columns."""
        conv, tiles = self.convolution, (self.mmas_y * MMA_M, self.mmas_x * MMA_N)
        vectors = 1, self.input_vector
        values = zip(conv.output_size, conv.input_size, conv.kernel, conv.pad_low, tiles, vectors, strict=True)
        rows, columns = (BandAxis(*value) for value in values)
        return rows, columns

    @property
    def channels(self) -> Any:
        """Channels per CTA."""
        return (OCTET if self.is_channels_last else OCTET // 2) * self.octets

    @property
    def num_warps(self) -> Any:
        """Warps per CTA."""
        return self.channels + 0 * self.images

    @property
    def num_blocks(self) -> Any:
        """CTAs of the grid."""
        rows, columns = self.axes
        return ceil_div(self.w.N, self.images) * (self.w.C // self.channels) * rows.tiles * columns.tiles

    @property
    def num_accumulators(self) -> Any:
        """Accumulator registers per thread."""
        rows = np.where(self.has_image_rows, self.axes[0].taps, self.images * self.mmas_y)
        return 4 * rows * self.mmas_x

    @property
    def mmas_k(self) -> Any:
        """Instructions along the columns of dY."""
        return ceil_div(self.axes[1].window, MMA_K)

    @property
    def row_taps(self) -> Any:
        """Taps of a filter row in shared memory, with the zeros around them."""
        return MMA_K * self.mmas_k + MMA_N * self.mmas_x

    @property
    def pitch_bytes(self) -> Any:
        """Bytes of a row of X, an odd multiple of 16 against bank conflicts."""
        return 2 * MMA_K * self.mmas_k + 16

    @property
    def filter_bytes(self) -> Any:
        """Bytes of the filters of a channel."""
        return self.axes[0].taps * COPIES * 2 * self.row_taps

    @property
    def zero_rows(self) -> Any:
        """Rows of zeros before and after each image in shared memory; none if a row of zeros is read instead."""
        rows = self.axes[0]
        padding = max(rows.pad, rows.taps - 1 - rows.pad + rows.size - rows.source)
        is_padded = (rows.tiles == 1) & (padding <= MAX_PADDING_SHARE * rows.source) & ~self.has_image_rows
        return np.where(is_padded, padding, 0)

    @property
    def reads_zero_row(self) -> Any:
        """Whether rows outside of the window are read from a row of zeros."""
        rows = self.axes[0]
        return (rows.tiles == 1) & (self.zero_rows == 0) & (rows.pad + rows.taps > 1) & ~self.has_image_rows

    @property
    def plane_rows(self) -> Any:
        """Rows in shared memory of a channel of all images."""
        return self.images * (self.axes[0].window + self.zero_rows) + self.zero_rows

    @property
    def overhang_bytes(self) -> Any:
        """Bytes behind the last plane that are read for rows beyond the last one of Y."""
        rows = self.axes[0]
        last_image = self.zero_rows + (self.images - 1) * (rows.window + self.zero_rows)
        end = last_image + rows.offset + self.mmas_y * MMA_M + rows.taps - 1
        is_inside = self.reads_zero_row | self.has_image_rows
        return np.where(is_inside, 0, np.maximum(end - self.plane_rows, 0)) * self.pitch_bytes

    @property
    def plane_bytes(self) -> Any:
        """Bytes of a channel of all images in shared memory."""
        return self.plane_rows * self.pitch_bytes + self.images * self.image_pad

    @property
    def image_pad(self) -> Any:
        """Bytes behind the rows of an image, so that those of eight images are distinct odd multiples of 16."""
        return np.where(self.has_image_rows & (self.axes[0].window * self.pitch_bytes % 32 == 0), 16, 0)

    @property
    def stages_pairs(self) -> bool:
        """Whether pairs of rounded results are exchanged in shared memory, and not float32 results."""
        ops = EpilogueOps.from_workload(self.convolution)
        return not ops.residuals and get_itemsize(ops.dtype) == PAIRED_BYTES

    @property
    def staged_pitch(self) -> Any:
        """Words of a row of Y in shared memory, against bank conflicts 4 or 12 modulo 16, or for single results 8."""
        if self.stages_pairs:
            return self.mmas_x * (MMA_N // 2) + np.where(self.mmas_x % 2 == 0, 4, 0)
        return self.mmas_x * MMA_N + np.where(self.mmas_x % 2 == 0, 8, 16)

    @property
    def staged_octet(self) -> Any:
        """Words of the results of eight channels in shared memory."""
        pad = OCTET_PAD_BYTES // 4 if self.stages_pairs else STAGED_PAD
        return OCTET * self.images * self.mmas_y * MMA_M * self.staged_pitch + pad

    @property
    def smem_bytes(self) -> Any:
        """Bytes of shared memory: filters, a row of zeros and X, later Y if channels are last."""
        operand_bytes = self.channels * (self.filter_bytes + self.plane_bytes) + self.octets * OCTET_PAD_BYTES
        operand_bytes = operand_bytes + self.pitch_bytes + self.overhang_bytes
        staged_bytes = self.octets * self.staged_octet * 4 * self.is_channels_last
        return np.maximum(operand_bytes, np.where(self.has_image_rows, 0, staged_bytes))

    @property
    def estimated_cycles(self) -> Any:
        """Estimated latency in clock cycles: products at a part of the peak rate, shared memory, and waits."""
        rows, columns = self.axes
        registers = self.num_threads * (self.num_accumulators + OVERHEAD_REGISTERS)
        resident = np.minimum(MAX_SHARED_BYTES // (self.smem_bytes + 1024), SM_REGISTERS // registers)
        resident = np.maximum(1, np.minimum(resident, 2048 // self.num_threads))
        blocks_per_sm = ceil_div(self.num_blocks, H200.multiprocessors)
        computed_rows = np.minimum(rows.size, MMA_M) / MMA_M  # of a product of images
        tiles = rows.taps * self.images * self.mmas_y * self.channels * np.where(self.has_image_rows, computed_rows, 1)
        mmas_of_octet = np.minimum(self.mmas_k, (columns.taps + MMA_N + MMA_K - 2) / MMA_K)  # with taps in the band
        fragments = tiles / np.where(
            self.has_image_rows, rows.taps, 1
        ) * self.mmas_k * 4 + rows.taps * self.channels * (2 * self.mmas_k + self.mmas_x)
        copies = self.channels * (self.plane_bytes + 2 * self.filter_bytes) + self.octets * self.staged_octet * 8
        pixels = self.images * (rows.window * columns.window + rows.tile * columns.tile)
        wavefronts = fragments + copies / SHARED_BYTES_PER_CLOCK + pixels * self.is_channels_last  # a line per pixel
        work = combine_overlapping(tiles * self.mmas_x * mmas_of_octet * CYCLES_PER_MMA, wavefronts)
        return blocks_per_sm * work + ceil_div(blocks_per_sm, resident) * (8 * L2_CLOCKS)


def has_bands(w: AnyConv) -> bool:
    """Whether each channel has one filter, of stride and dilation 1, and a config fits shared memory."""
    conv = w.direct_convolution if isinstance(w, InputGradient) else w
    if conv is None or conv.has_large_tensors or {*conv.stride, *w.dilation} != {1}:
        return False
    return w.C == w.O == w.groups > 1 and w.C % OCTET == 0 and BandConfig.has_config(w)


def has_large_filter(w: AnyConv) -> bool:
    """Return whether tensor cores may be faster than the FMA units."""
    return w.kernel[0] * w.kernel[1] >= MIN_TAPS
