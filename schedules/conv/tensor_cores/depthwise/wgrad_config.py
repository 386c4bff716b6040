"""Configs of `depthwise_mma_sync`: tiles of pixels in shared memory, warps along channels and rows of the filter."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np

from tvmconv.arithmetic import ceil_div
from tvmconv.fitted_latency import H200_FIT
from tvmconv.target import (
    CLOCKS_PER_MATRIX_MULTIPLY,
    H200,
    L2_CLOCKS,
    REGISTERS_PER_MULTIPROCESSOR,
    SCHEDULERS,
    WARP_SIZE,
)
from tvmconv.workloads.conv_gradient import WeightGradient

from ...estimated_config import EstimatedTileConfig
from ...nhwc_direct.wgrad_config import count_positions
from ...nhwc_direct.wgrad_knobs import select_default as select_fma_default
from ...plane_shape import PlaneShape
from ...tile_config import Rule, combine_overlapping
from ..implicit_gemm_shape import VECTOR_BYTES

OCTET = 8  # channels of 16 bytes, which a warp multiplies
MMA_ROWS = 16  # rows of dY of a product: its reduction
QUAD = 4  # neighbouring rows of dY that a lane has of them
MMA_COLUMNS = 8  # columns of dY of a product
MMA_M = 16  # columns of X of a product
REGISTERS_PER_MMA = 4
OCTETS_CHOICES = (1, 2, 4, 8)  # powers of two, for the swizzle
STRIP_ROWS_CHOICES = (4, 8, 16)
PIXELS_X_CHOICES = (8, 16, 24, 32)
STAGES_CHOICES = (2, 3)
TAPS_Y_CHOICES = (1, 2, 3, 4)
PARTS_CHOICES = (1, 2, 3, 4, 6, 8, 11, 16, 22, 29, 33, 44, 66, 88, 132, 198, 264)
MAX_WARPS = 16
MAX_REGISTERS = 232  # estimated registers per thread
OVERHEAD_REGISTERS = 44  # for packed pairs, addresses and counters
MAX_SHARED_BYTES = 227 << 10
MAX_COLUMNS_RATIO = 1.5  # columns of all tiles, relative to those of dY
LOAD_CYCLES = 4  # of shared memory: 16 bytes of each lane
COPY_INSTRUCTIONS = 9  # of the copy of 16 bytes, with its address and guards
ROW_INSTRUCTIONS = 30  # of the address of a row that is copied
ISSUED_PER_CYCLE = 0.72  # instructions of a scheduler, fitted to searches of ten layers on an H100
MAX_ESTIMATE_RATIO = 0.65  # to the estimate on the FMA units, above which no search tries this kernel
# Clock cycles of the second kernel, which starts early, and its bytes per cycle.
REDUCTION_CYCLES, WORKSPACE_BYTES_PER_CYCLE = 1500, 1500


@dataclasses.dataclass(frozen=True)
class DepthwiseWgradConfig(EstimatedTileConfig):
    """One config, or many configs as columns."""

    TILE_KNOBS = ("octets", "taps_y", "pixels_x")

    w: WeightGradient
    octets: Any  # octets of channels of a CTA
    taps_y: Any  # rows of the filter whose sums a warp keeps
    warps_taps: Any  # warps along the rows of the filter
    strip_rows: Any  # rows of dY of a strip; a tile of 16 rows has one strip or several
    pixels_x: Any  # columns of dY of a tile
    stages: Any
    parts: Any

    @classmethod
    def list_options(cls, w: WeightGradient) -> dict[str, Any]:
        """Return the options of all knobs."""
        shape = PlaneShape.from_workload(w.forward)
        _, rows, _ = shape.kernel_size
        _, height, width = shape.output_size
        return {
            "octets": [n for n in OCTETS_CHOICES if n < 2 * w.C // OCTET or n == 1],
            "taps_y": [n for n in TAPS_Y_CHOICES if n <= rows],
            "warps_taps": sorted({min(n, rows) for n in (1, 2, 3, 4, 8)}),
            "strip_rows": [n for n in STRIP_ROWS_CHOICES if n < 2 * height or n == QUAD],
            "pixels_x": [n for n in PIXELS_X_CHOICES if n < width + MMA_COLUMNS or n == MMA_COLUMNS],
            "stages": STAGES_CHOICES,
            "parts": PARTS_CHOICES,
        }

    @classmethod
    def list_required(cls, w: WeightGradient) -> list[Rule]:
        """Return the conditions on every config."""
        return [
            (f"at most {MAX_WARPS} warps", lambda t: t.num_warps <= MAX_WARPS),
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
            (
                "warps along the filter have a row each",
                lambda t: t.taps_y * (t.warps_taps - 1) < filter_rows,
            ),
            (
                "tiles exceed the columns by at most a half",
                lambda t: t.tiles_x * t.pixels_x <= np.maximum(MAX_COLUMNS_RATIO * columns, MMA_COLUMNS),
            ),
            ("strips are shorter than twice the image", lambda t: t.strip_rows < 2 * max(rows, QUAD)),
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
    def mmas_m(self) -> int:
        """Instructions along the columns of X that the columns of dY of an instruction reach."""
        _, _, columns = self.shape.kernel_size
        _, _, stride = self.shape.strides
        return ceil_div((MMA_COLUMNS - 1) * stride + (columns - 1) * self.shape.dilations[2] + 1, MMA_M)

    @property
    def num_accumulators(self) -> Any:
        """Accumulator registers per thread."""
        return self.taps_y * OCTET * self.mmas_m * REGISTERS_PER_MMA

    @property
    def rows_per_lane(self) -> Any:
        """Rows of X that a lane loads."""
        return count_positions(QUAD, self.taps_y, self.shape.strides[1], self.shape.dilations[1])

    @property
    def live_registers(self) -> Any:
        """Estimated registers per thread: sums, rows of X for two columns, rows of dY."""
        words = VECTOR_BYTES // 4
        return self.num_accumulators + 2 * words * self.rows_per_lane + words * QUAD + OVERHEAD_REGISTERS

    @property
    def strips_per_tile(self) -> Any:
        """Strips of rows of a tile."""
        return MMA_ROWS // self.strip_rows

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
        return ceil_div(self.num_strips, self.strips_per_tile) * self.tiles_x

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
        """Columns of X below a tile, a multiple of eight."""
        return (self.pixels_x - MMA_COLUMNS) * self.shape.strides[2] + MMA_M * self.mmas_m

    @property
    def input_chunks(self) -> Any:
        """Chunks of 16 bytes of X of a tile."""
        return self.strips_per_tile * self.window_rows * self.window_columns * self.octets

    @property
    def gradient_chunks(self) -> Any:
        """Chunks of 16 bytes of dY of a tile."""
        return MMA_ROWS * self.pixels_x * self.octets

    @property
    def stage_bytes(self) -> Any:
        """Bytes of a stage."""
        return VECTOR_BYTES * (self.input_chunks + self.gradient_chunks)

    @property
    def band_words(self) -> int:
        """Words from the sums of a channel to those of the next, while a warp adds up diagonals."""
        return self.mmas_m * MMA_M * MMA_COLUMNS + 2

    @property
    def smem_bytes(self) -> Any:
        """Bytes of shared memory; the diagonals take the place of the stages."""
        return np.maximum(self.stages * self.stage_bytes, self.num_warps * OCTET * self.band_words * 4)

    @property
    def num_warps(self) -> Any:
        """Warps per CTA."""
        return self.octets * self.warps_taps

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
        resident = np.minimum(resident, 2048 // (self.live_registers * self.num_warps))
        resident = np.maximum(1, resident)
        products = self.pixels_x // MMA_COLUMNS  # products of all taps of a tile
        halves = np.minimum(2 * self.mmas_m, shape.strides[2])  # columns of X that a lane loads for each
        mmas = products * self.mmas_m * self.taps_y * OCTET
        loads = products * (QUAD + halves * self.rows_per_lane)
        moves = products * OCTET * (2 + 2 * self.mmas_m * (self.taps_y + 2))
        copied_rows = self.strips_per_tile * self.window_rows + MMA_ROWS
        copies = ceil_div(self.input_chunks + self.gradient_chunks, WARP_SIZE) * COPY_INSTRUCTIONS
        copies = copies + copied_rows * ROW_INSTRUCTIONS
        tiles = self.iterations * blocks_per_sm
        chunk_cycles = np.maximum(1 / OCTET, 1 / (self.octets * H200_FIT.strips.l1_lines_per_cycle))
        issued = self.num_warps * (mmas + moves + 2 * loads) + copies
        cycles = combine_overlapping(
            tiles * self.num_warps * mmas * CLOCKS_PER_MATRIX_MULTIPLY,
            tiles * issued / (SCHEDULERS * ISSUED_PER_CYCLE),
            tiles * (self.num_warps * loads * LOAD_CYCLES + (self.input_chunks + self.gradient_chunks) * chunk_cycles),
            tiles * self._copied_bytes / H200_FIT.strips.l2_bytes_per_cycle,
            ceil_div(blocks_per_sm, resident) * self.iterations * (2 * issued / self.num_warps + L2_CLOCKS),
        )
        start = ceil_div(blocks_per_sm, resident) * (4 * L2_CLOCKS + 16 * self.num_accumulators * self.num_warps / 8)
        sums = self.num_parts * math.prod(self.w.argument_shapes[-1])
        return cycles + start + REDUCTION_CYCLES + 8 * sums / WORKSPACE_BYTES_PER_CYCLE

    @property
    def _copied_bytes(self) -> Any:
        """Bytes of a tile inside of the images."""
        shape = self.shape
        _, rows, columns = shape.output_size
        inside_rows = rows / (self.tiles_y * self.strip_rows)
        inside_columns = columns / (self.tiles_x * self.pixels_x)
        _, height, width = shape.input_size
        window_rows = np.minimum(self.window_rows, height)
        window = self.strips_per_tile * window_rows * np.minimum(self.window_columns, width)
        chunks = window + MMA_ROWS * inside_rows * self.pixels_x * inside_columns
        return VECTOR_BYTES * np.maximum(2, self.octets) * chunks


@functools.lru_cache(maxsize=64)
def can_multiply_bands(w: WeightGradient) -> bool:
    """Whether each channel has one filter, channels fill octets, and a config fits registers and shared memory."""
    return w.C == w.O == w.groups > 1 and w.C % OCTET == 0 and DepthwiseWgradConfig.has_config(w)


@functools.lru_cache(maxsize=64)
def may_beat_fma_units(w: WeightGradient) -> bool:
    """Whether this kernel may be faster than that of the FMA units, by the estimates of both.

    On an H100, it was faster for 7 × 7 filters on large images, and slower for smaller filters, which memory bounds.
    """
    if not can_multiply_bands(w):
        return False
    estimate = DepthwiseWgradConfig.select_default(w).estimated_cycles
    return bool(estimate <= MAX_ESTIMATE_RATIO * select_fma_default(w).estimated_cycles)
