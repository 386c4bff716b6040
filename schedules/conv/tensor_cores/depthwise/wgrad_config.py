"""Configs of `depthwise_diagonal`: tiles of pixels in shared memory, warps along channels, filter rows and pixels."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np

from tvmconv.arithmetic import ceil_div, round_up
from tvmconv.target import (
    CLOCKS_PER_MATRIX_MULTIPLY,
    H200,
    LINE_BYTES,
    REGISTERS_PER_MULTIPROCESSOR,
    SCHEDULERS,
)
from tvmconv.workloads.conv_gradient import WeightGradient
from tvmconv.workloads.dtypes import get_itemsize

from ...estimated_config import EstimatedTileConfig
from ...nhwc_direct.wgrad_config import count_positions
from ...nhwc_direct.wgrad_knobs import select_default as select_fma_default
from ...plane_shape import PlaneShape
from ...tile_config import Rule, combine_overlapping
from ..gemm.pipelines import BARRIER_BYTES
from ..implicit_gemm_shape import VECTOR_BYTES
from .octets import (
    MEMORY_BYTES_PER_CYCLE,
    OCTET,
    ODD_OCTETS,
    STAGE_ALIGNMENT_BYTES,
    SWIZZLE_PIXELS,
    SWIZZLED_OCTETS,
    count_copy_cycles,
)

MMA_PIXELS = 16  # pixels of dY of a product: its reduction
REGISTERS_PER_MMA = 4
OCTETS_CHOICES = (1, *SWIZZLED_OCTETS)
STRIP_ROWS_CHOICES = (4, 8, 14, 16)
STRIPS_CHOICES = (1, 2, 4)  # if images are small
MAX_SMALL_IMAGE = 400  # pixels
PIXELS_X_CHOICES = (8, 16, 32, 48, 64)
TAPS_Y_CHOICES = (1, 2, 3, 4, 5, 7)
WARPS_CHOICES = (1, 2, 4, 8)
STAGES_CHOICES = (2, 3, 4, 6)
PARTS_CHOICES = (1, 2, 4, 6, 8, 11, 16, 22, 33, 44, 66, 88, 132, 198, 264)
MAX_WARPS = 16
MAX_REGISTERS = 208  # estimated registers per thread
OVERHEAD_REGISTERS = 40  # for addresses and counters
MAX_UNROLLED = 640  # instructions mma.sync of an item
MAX_SHARED_BYTES = 227 << 10
MAX_COLUMNS_RATIO = 1.5  # columns of all tiles, relative to those of dY
LDMATRIX_CYCLES = 4  # of shared memory: four matrices
ITEM_INSTRUCTIONS = 20  # of the addresses of an item
MAX_ESTIMATE_RATIO = 1.2  # to the estimate on the FMA units, above which no search tries this kernel
# Clock cycles of both launches, and bytes per cycle of the second kernel, fitted to 184 configs on an H200.
START_CYCLES, WORKSPACE_BYTES_PER_CYCLE = 800, 820


@dataclasses.dataclass(frozen=True)
class DepthwiseWgradConfig(EstimatedTileConfig):
    """One config, or many configs as columns."""

    TILE_KNOBS = ("octets", "taps_y", "pixels_x", "mma_columns")

    w: WeightGradient
    octets: Any  # octets of channels of a CTA
    taps_y: Any  # rows of the filter whose sums a warp keeps
    warps_taps: Any  # warps along the rows of the filter
    warps_pixels: Any  # warps along the pixels of a tile
    strips: Any  # strips of rows of dY of a tile, each with its own halo
    strip_rows: Any  # rows of dY of a strip
    pixels_x: Any  # columns of dY of a tile
    mma_columns: Any  # columns of the 16 pixels of a product, which has one row or two
    stages: Any
    parts: Any

    @classmethod
    def list_options(cls, w: WeightGradient) -> dict[str, Any]:
        """Return the options of all knobs."""
        shape = PlaneShape.from_workload(w.forward)
        _, rows, _ = shape.kernel_size
        _, height, width = shape.output_size
        whole_rows = [round_up(width, n) for n in (8, 16) if width <= PIXELS_X_CHOICES[-1]]
        pixels_x = sorted({n for n in (*PIXELS_X_CHOICES, *whole_rows) if n < width + 16})
        return {
            "octets": sorted(
                [n for n in OCTETS_CHOICES if n < 2 * w.C // OCTET or n == 1]
                + [n for n in ODD_OCTETS if w.C // OCTET % n == 0]
            ),
            "taps_y": [n for n in TAPS_Y_CHOICES if n <= rows],
            "warps_taps": sorted({min(n, rows) for n in WARPS_CHOICES}),
            "warps_pixels": WARPS_CHOICES[:-1],
            "strips": STRIPS_CHOICES if height * width <= MAX_SMALL_IMAGE else STRIPS_CHOICES[:1],
            "strip_rows": [n for n in STRIP_ROWS_CHOICES if n < 2 * height or n == STRIP_ROWS_CHOICES[0]],
            "pixels_x": pixels_x,
            "mma_columns": [n for n in (8, 16) if n in (pixels_x[0], 8) or n <= pixels_x[-1]],
            "stages": STAGES_CHOICES,
            "parts": cls.list_parts(w),
        }

    @staticmethod
    def list_parts(w: WeightGradient) -> list[int]:
        """Return numbers of parts, with those for which the CTAs of some width fill all multiprocessors evenly."""
        blocks = {ceil_div(w.C // OCTET, octets) for octets in (*OCTETS_CHOICES, *ODD_OCTETS)}
        even = {H200.multiprocessors * waves // n for n in blocks for waves in (1, 2, 3, 4)}
        return sorted({*PARTS_CHOICES, *(n for n in even if 0 < n <= PARTS_CHOICES[-1])})

    @classmethod
    def list_required(cls, w: WeightGradient) -> list[Rule]:
        """Return the conditions on every config."""
        return [
            ("tiles have whole products along the columns", lambda t: t.pixels_x % t.mma_columns == 0),
            ("strips have pairs of products along the rows", lambda t: t.strip_rows % (2 * t.mma_rows) == 0),
            (f"at most {MAX_WARPS} warps multiply", lambda t: t.compute_warps <= MAX_WARPS),
            ("what a row of X is too short for follows in the stage", lambda t: t.pixels_behind <= t.gradient_pixels),
            ("TMA copies at most 256 columns and rows", lambda t: np.maximum(t.window_columns, t.window_rows) <= 256),
            (f"at most {MAX_UNROLLED} products of a warp are unrolled", lambda t: t.mmas_per_item <= MAX_UNROLLED),
            (f"at most {MAX_REGISTERS} registers per thread", lambda t: t.live_registers <= MAX_REGISTERS),
            (
                "an SM has the registers of a CTA",
                lambda t: t.live_registers * t.num_threads <= REGISTERS_PER_MULTIPROCESSOR,
            ),
            (f"at most {MAX_SHARED_BYTES} bytes of shared memory", lambda t: t.smem_bytes <= MAX_SHARED_BYTES),
        ]

    @classmethod
    def list_pruned(cls, w: WeightGradient) -> list[Rule]:
        """Return the conditions on configs that are worth a search."""
        shape = PlaneShape.from_workload(w.forward)
        _, rows, columns = shape.output_size
        filter_rows = shape.kernel_size[1]
        return [
            ("there are at most as many parts as tiles", lambda t: t.parts <= t.num_tiles),
            ("warps along the filter have a row each", lambda t: t.taps_y * (t.warps_taps - 1) < filter_rows),
            ("a warp along the pixels has some", lambda t: t.warps_pixels <= t.items_per_tile),
            ("at least four warps multiply", lambda t: t.compute_warps >= 4),
            (
                "a CTA has more tiles than stages",
                lambda t: (t.stages <= t.iterations) | (t.stages == STAGES_CHOICES[0]),
            ),
            (
                "tiles exceed the columns by at most a half",
                lambda t: t.tiles_x * t.pixels_x <= np.maximum(MAX_COLUMNS_RATIO * columns, MMA_PIXELS),
            ),
            ("strips are shorter than twice the image", lambda t: t.strip_rows < 2 * max(rows, STRIP_ROWS_CHOICES[0])),
        ]

    @property
    def shape(self) -> PlaneShape:
        """Sizes of the forward convolution over planes, rows and columns."""
        return PlaneShape.from_workload(self.w.forward)

    @property
    def num_octets(self) -> int:
        """Octets of channels."""
        return self.w.C // OCTET

    @property
    def column_pairs(self) -> int:
        """Pairs of columns of the filter, whose octets are the rows of a product; the last may have one column."""
        return ceil_div(self.shape.kernel_size[2], 2)

    @property
    def tap_pairs(self) -> Any:
        """Pairs of taps of a warp: of neighbouring columns, or of neighbouring rows in a last column without a pair."""
        pairs, last = divmod(self.shape.kernel_size[2], 2)
        return self.taps_y * pairs + last * ceil_div(self.taps_y, 2)

    @property
    def mma_rows(self) -> Any:
        """Rows of dY of a product."""
        return MMA_PIXELS // self.mma_columns

    @property
    def filter_rows(self) -> Any:
        """Rows of the filter of a CTA."""
        return self.taps_y * self.warps_taps

    @property
    def row_blocks(self) -> Any:
        """CTAs along the rows of the filter."""
        return ceil_div(self.shape.kernel_size[1], self.filter_rows)

    @property
    def filter_blocks(self) -> Any:
        """CTAs along planes and rows of the filter."""
        return self.shape.kernel_size[0] * self.row_blocks

    @property
    def octet_blocks(self) -> Any:
        """CTAs along the channels."""
        return ceil_div(self.num_octets, self.octets)

    @property
    def num_accumulators(self) -> Any:
        """Accumulator registers per thread."""
        return self.tap_pairs * REGISTERS_PER_MMA

    @property
    def row_units(self) -> Any:
        """Products along the rows of a strip."""
        return self.strip_rows // self.mma_rows

    @property
    def mmas_per_item(self) -> Any:
        """Instructions mma.sync of a warp for some columns of a strip."""
        return self.row_units * self.tap_pairs

    @property
    def items_per_tile(self) -> Any:
        """Columns of strips that the warps along the pixels divide among them."""
        return self.strips * (self.pixels_x // self.mma_columns)

    @property
    def live_registers(self) -> Any:
        """Estimated registers per thread: sums, the fragments of dY, and of two products of X."""
        return self.num_accumulators + 2 * self.row_units + 8 + OVERHEAD_REGISTERS

    @property
    def tiles_y(self) -> Any:
        """Strips of an image."""
        return ceil_div(self.shape.output_size[1], self.strip_rows)

    @property
    def num_strips(self) -> Any:
        """Strips of the batch."""
        return self.shape.num_output_planes * self.tiles_y

    @property
    def tiles_x(self) -> Any:
        """Tiles along the columns."""
        return ceil_div(self.shape.output_size[2], self.pixels_x)

    @property
    def num_tiles(self) -> Any:
        """Tiles of pixels of the batch."""
        return ceil_div(self.num_strips, self.strips) * self.tiles_x

    @property
    def iterations(self) -> Any:
        """Tiles of a CTA."""
        return ceil_div(self.num_tiles, self.parts)

    @property
    def num_parts(self) -> Any:
        """Parts of the pixels that are not empty."""
        return ceil_div(self.num_tiles, self.iterations)

    @property
    def window_rows(self) -> Any:
        """Rows of X below a strip."""
        _, stride, _ = self.shape.strides
        _, dilation, _ = self.shape.dilations
        return (self.strip_rows - 1) * stride + (self.filter_rows - 1) * dilation + 1

    @property
    def window_columns(self) -> Any:
        """Columns of X below a tile, and some behind them, so that rows begin with whole swizzles.

        Columns of dY behind the image are zeros, and what follows a row of X is multiplied by them.
        """
        return round_up(self._count_columns(np.minimum(self.pixels_x, self.shape.output_size[2])), SWIZZLE_PIXELS)

    @property
    def pixels_behind(self) -> Any:
        """Pixels of X behind a row that columns of dY behind the image are multiplied by."""
        return np.maximum(0, self._count_columns(self.pixels_x) - self.window_columns)

    def _count_columns(self, pixels: Any) -> Any:
        """Return the columns of X below neighbouring pixels of dY."""
        return (pixels - 1) * self.shape.strides[2] + self.shape.window_extent[2]

    @property
    def pixel_bytes(self) -> Any:
        """Bytes of the channels of a pixel: as wide as a swizzle, or an odd multiple of 16."""
        return VECTOR_BYTES * self.octets

    @property
    def input_pixels(self) -> Any:
        """Pixels of X of a tile."""
        return self.strips * self.window_rows * self.window_columns

    @property
    def gradient_pixels(self) -> Any:
        """Pixels of dY of a tile."""
        return self.strips * self.strip_rows * self.pixels_x

    @property
    def stage_bytes(self) -> Any:
        """Bytes that TMA copies to a stage."""
        return self.pixel_bytes * (self.input_pixels + self.gradient_pixels)

    @property
    def stage_pitch(self) -> Any:
        """Bytes from a stage to the next."""
        return round_up(self.stage_bytes, STAGE_ALIGNMENT_BYTES)

    @property
    def num_cta_sums(self) -> Any:
        """Sums of the warps of a CTA, for as many columns of the filter as the products have."""
        return self.warps_pixels * self.filter_rows * 2 * self.column_pairs * self.octets * OCTET

    @property
    def smem_bytes(self) -> Any:
        """Bytes of shared memory, with the alignment of its start."""
        return STAGE_ALIGNMENT_BYTES + self.barrier_offset_bytes + 2 * BARRIER_BYTES * self.stages

    @property
    def barrier_offset_bytes(self) -> Any:
        """Bytes in front of the barriers; the sums of warps take the place of the stages."""
        return round_up(np.maximum(self.stages * self.stage_pitch, 4 * self.num_cta_sums), VECTOR_BYTES)

    @property
    def compute_warps(self) -> Any:
        """Warps that multiply."""
        return self.octets * self.warps_taps * self.warps_pixels

    @property
    def num_warps(self) -> Any:
        """Warps per CTA, with the one that copies."""
        return self.compute_warps + 1

    @property
    def num_blocks(self) -> Any:
        """CTAs of the grid."""
        return self.num_parts * self.octet_blocks * self.filter_blocks

    @property
    def estimated_cycles(self) -> Any:
        """Estimated latency in clock cycles of both kernels."""
        shape = self.shape
        blocks_per_sm = ceil_div(self.num_blocks, H200.multiprocessors)
        resident = np.minimum(MAX_SHARED_BYTES // (self.smem_bytes + 1024), 64 // self.num_warps)
        resident = np.minimum(resident, REGISTERS_PER_MULTIPROCESSOR // (self.live_registers * self.num_threads))
        resident = np.maximum(1, np.minimum(resident, blocks_per_sm))
        num_warps = self.compute_warps
        items = ceil_div(self.items_per_tile, self.warps_pixels) * self.warps_pixels * self.octets * self.warps_taps
        mmas = items * self.mmas_per_item
        rows = np.where(  # of X that a warp loads
            self.mma_rows == 1,
            count_positions(self.row_units, self.taps_y, shape.strides[1], shape.dilations[1]),
            count_positions(self.row_units, self.taps_y, 2 * shape.strides[1], shape.dilations[1]),
        )
        loads = items * (rows * self.column_pairs + ceil_div(self.row_units, 2))
        tiles = self.iterations * blocks_per_sm
        issued = mmas + 2 * loads + ITEM_INSTRUCTIONS * items
        conflicts = math.gcd(shape.strides[2], 2)
        copy_cycles = count_copy_cycles(self.input_pixels + self.gradient_pixels, self.octets)
        product_cycles = mmas * CLOCKS_PER_MATRIX_MULTIPLY
        cycles = combine_overlapping(
            tiles * product_cycles * np.maximum(1, SCHEDULERS / (resident * num_warps)),
            tiles * issued / SCHEDULERS,
            tiles * (loads * LDMATRIX_CYCLES * conflicts + self.stage_bytes / LINE_BYTES),
            tiles * copy_cycles,
            self._argument_bytes / (H200.multiprocessors * MEMORY_BYTES_PER_CYCLE) * np.ones_like(self.octets),
        )
        # Nothing overlaps with the first copy, and with the last products of a CTA.
        alone = copy_cycles + product_cycles * np.maximum(1, SCHEDULERS / num_warps)
        sums = self.num_parts * math.prod(self.w.argument_shapes[-1])
        start = START_CYCLES + ceil_div(blocks_per_sm, resident) * alone
        return cycles + start + 8 * sums / WORKSPACE_BYTES_PER_CYCLE

    @property
    def _argument_bytes(self) -> int:
        """Bytes of dY and X."""
        return sum(map(math.prod, self.w.argument_shapes[:2])) * get_itemsize(self.w.storage)


@functools.lru_cache(maxsize=64)
def may_beat_fma_units(w: WeightGradient) -> bool:
    """Whether this kernel may be faster than that of the FMA units, by the estimates of both."""
    configs = DepthwiseWgradConfig.list_starting_configs(w) if can_multiply_octets(w) else []
    estimates = [DepthwiseWgradConfig(w=w, **config).estimated_cycles for config in configs]
    return bool(estimates and min(estimates) <= MAX_ESTIMATE_RATIO * select_fma_default(w).estimated_cycles)


@functools.lru_cache(maxsize=64)
def can_multiply_octets(w: WeightGradient) -> bool:
    """Whether each channel has one filter, channels fill octets, and a config fits registers and shared memory."""
    return w.C == w.O == w.groups > 1 and w.C % OCTET == 0 and DepthwiseWgradConfig.has_config(w)
