"""Configs of `depthwise_diagonal` of forward layers and dgrads: tiles of output pixels and octets of channels.

Tiles count steps of outputs. A step has one output along an axis, or in a gradient with a stride as many as the stride.
The outputs of a step have different taps: the *residue classes* of the gradient.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from tvmconv.arithmetic import ceil_div, round_up
from tvmconv.target import (
    CLOCKS_PER_MATRIX_MULTIPLY,
    H200,
    LINE_BYTES,
    MAX_REGISTERS_PER_THREAD,
    REGISTERS_PER_MULTIPROCESSOR,
    SCHEDULERS,
)
from tvmconv.tensor_map import MAX_BOX_ELEMENTS
from tvmconv.workloads import Conv
from tvmconv.workloads.conv_operator import ConvOperator

from ...persistent_tiles import PersistentTileConfig
from ...plane_shape import PlaneShape
from ...tile_config import Rule, combine_overlapping
from ...transposed_view import TransposedView
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

MMA_PIXELS = 16  # pixels of a product: its rows
REGISTERS_PER_MMA = 4
ELEMENT_BYTES = 2
OCTETS_CHOICES = (1, *SWIZZLED_OCTETS)
ROWS_CHOICES = (1, 2, 4, 7, 8, 14, 16)
COLUMNS_CHOICES = (8, 16, 32, 48, 64)
WARPS_CHOICES = (1, 2, 4)
STAGES_CHOICES = (2, 3, 4)
MAX_WARPS = 16
MAX_AXES = 2
MAX_TAPS = 64  # of a thread's octet, in registers
MAX_UNROLLED = 512  # instructions mma.sync of an item
MAX_SHARED_BYTES = 227 << 10
MAX_OVERHANG = 1.5  # pixels and channels of all tiles, relative to those that exist
OVERHEAD_REGISTERS = 40  # for addresses, counters and results
STORE_INSTRUCTIONS = 12  # of the results of a product
MIN_PROMISING_BYTES = 4 << 20  # of inputs and outputs
START_CYCLES = 800  # of a launch


@dataclass(frozen=True)
class DiagonalConfig(PersistentTileConfig):
    """One config, or many configs as columns."""

    TILE_KNOBS: ClassVar[tuple[str, ...]] = ("octets", "columns", "mma_columns")
    SHARED_BYTES: ClassVar[int] = MAX_SHARED_BYTES

    w: Conv | TransposedView
    octets: Any  # octets of channels of a CTA
    rows: Any  # steps of a tile along the rows, which a warp walks down
    columns: Any  # steps of a tile along the columns
    mma_columns: Any  # columns of the 16 steps of a product, which has one row or two
    warps: Any  # warps of an octet, which divide the columns of a tile
    stages: Any  # windows in shared memory

    @classmethod
    def list_options(cls, w: Conv | TransposedView) -> Mapping[str, Sequence[Any]]:
        """Return the options of all knobs."""
        height, width = list_steps(w)
        octets = w.C // OCTET
        whole = [round_up(width, OCTET)] if width <= COLUMNS_CHOICES[-1] else []
        return {
            "octets": sorted({n for n in OCTETS_CHOICES if n < 2 * octets} | {n for n in ODD_OCTETS if n <= octets}),
            "rows": [n for n in ROWS_CHOICES if n < 2 * height] if height > 1 else ROWS_CHOICES[:1],
            "columns": sorted({n for n in (*COLUMNS_CHOICES, *whole) if n < width + MMA_PIXELS}),
            "mma_columns": (OCTET, MMA_PIXELS),
            "warps": WARPS_CHOICES,
            "stages": STAGES_CHOICES,
        }

    @classmethod
    def list_required(cls, w: Conv | TransposedView) -> list[Rule]:
        """Return the conditions on every config."""
        return [
            (
                "tiles have whole products",
                lambda t: (t.columns % t.mma_columns == 0) & (t.rows % t.mma_rows == 0),
            ),
            (f"at most {MAX_WARPS} warps multiply", lambda t: t.compute_warps <= MAX_WARPS),
            (
                f"windows and tiles have at most {MAX_BOX_ELEMENTS} rows and columns",
                lambda t: (
                    (np.maximum(t.window_rows, t.window_columns) <= MAX_BOX_ELEMENTS)
                    & (np.maximum(t.result_rows, t.result_columns) <= MAX_BOX_ELEMENTS)
                ),
            ),
            (f"at most {MAX_UNROLLED} products of a warp are unrolled", lambda t: t.mmas_per_item <= MAX_UNROLLED),
            (
                "the registers of a CTA fit",
                lambda t: (
                    (t.registers <= MAX_REGISTERS_PER_THREAD)
                    & (t.registers * t.num_threads <= REGISTERS_PER_MULTIPROCESSOR)
                ),
            ),
            (f"at most {MAX_SHARED_BYTES} bytes of shared memory", lambda t: t.smem_bytes <= MAX_SHARED_BYTES),
        ]

    @classmethod
    def list_pruned(cls, w: Conv | TransposedView) -> list[Rule]:
        """Return the conditions on configs that are worth a search."""
        height, width = list_steps(w)
        return [
            ("warps of an octet have some columns each", lambda t: t.warps <= t.items_per_tile),
            ("at least two warps multiply", lambda t: t.compute_warps >= 2),
            (
                "tiles overhang the outputs by at most a half",
                lambda t: (
                    t.tiles_y * t.rows * (t.tiles_x * t.columns) * t.channel_blocks * t.channels
                    <= MAX_OVERHANG * max(height, 2) * max(width, OCTET) * w.C
                ),
            ),
            (
                "a CTA has more tiles than stages",
                lambda t: (t.stages <= t.tiles_per_cta) | (t.stages == STAGES_CHOICES[0]),
            ),
        ]

    @property
    def channels(self) -> Any:
        """Channels of a CTA."""
        return self.octets * OCTET

    @property
    def pixel_bytes(self) -> Any:
        """Bytes of the channels of a pixel: as wide as a swizzle, or an odd multiple of 16."""
        return VECTOR_BYTES * self.octets

    @property
    def shape(self) -> PlaneShape:
        """Sizes over planes, rows and columns."""
        return PlaneShape.from_workload(self.w)

    @property
    def input_steps(self) -> tuple[int, int]:
        """Distances of the inputs of neighbouring steps along rows and columns."""
        shape = self.shape
        row, column = (1 if shape.upsampling[axis] > 1 else shape.strides[axis] for axis in (1, 2))
        return row, column

    def _count_inputs(self, axis: int, steps: Any) -> Any:
        shape = self.shape
        of_first = shape.list_input_offsets(axis, shape.upsampling[axis])[-1] + 1
        return of_first + (steps - 1) * self.input_steps[axis - 1]

    @property
    def window_rows(self) -> Any:
        """Rows of X that a tile reads."""
        return self._count_inputs(1, self.rows)

    @property
    def window_columns(self) -> Any:
        """Columns of X that the outputs of a tile read, and some behind them: rows begin with whole swizzles.

        Steps behind the last output read what follows, and are not stored.
        """
        return round_up(self._count_inputs(2, np.minimum(self.columns, list_steps(self.w)[1])), SWIZZLE_PIXELS)

    @property
    def result_rows(self) -> Any:
        """Output rows of a tile."""
        return self.rows * self.shape.upsampling[1]

    @property
    def result_columns(self) -> Any:
        """Output columns of a tile."""
        return self.columns * self.shape.upsampling[2]

    @property
    def window_bytes(self) -> Any:
        """Bytes of a window."""
        return self.window_rows * self.window_columns * self.pixel_bytes

    @property
    def stage_pitch(self) -> Any:
        """Bytes from a window to the next, with what steps behind the last output read, which TMA does not write."""
        pixels_behind = np.maximum(0, self._count_inputs(2, self.columns) - self.window_columns)
        return round_up(self.window_bytes + pixels_behind * self.pixel_bytes, STAGE_ALIGNMENT_BYTES)

    @property
    def result_offset_bytes(self) -> Any:
        """Bytes in front of the results of a tile."""
        return self.stages * self.stage_pitch

    @property
    def barrier_offset_bytes(self) -> Any:
        """Bytes in front of the barriers."""
        return self.result_offset_bytes + self.result_rows * self.result_columns * self.pixel_bytes

    @property
    def smem_bytes(self) -> Any:
        """Bytes of shared memory, with the alignment of its start."""
        return STAGE_ALIGNMENT_BYTES + self.barrier_offset_bytes + 2 * BARRIER_BYTES * self.stages

    @property
    def mma_rows(self) -> Any:
        """Rows of the steps of a product."""
        return MMA_PIXELS // self.mma_columns

    @property
    def items_per_tile(self) -> Any:
        """Groups of columns, which the warps of an octet divide among them."""
        return self.columns // self.mma_columns

    @property
    def compute_warps(self) -> Any:
        """Warps that multiply."""
        return self.octets * self.warps

    @property
    def num_warps(self) -> Any:
        """Warps per CTA, with the one that copies."""
        return self.compute_warps + 1

    @property
    def shift_pairs(self) -> int:
        """Pairs of shifts along the columns at which taps read X, whose fragments are loaded together."""
        return ceil_div(len(self.shape.list_input_offsets(2, self.shape.upsampling[2])), 2)

    @property
    def mmas_per_line(self) -> int:
        """Products of a fragment with the taps of a row of the filter: two taps of a class each, or the last one."""
        shape = self.shape
        classes = [
            sum(shape.input_offset(2, column, tap) is not None for tap in range(shape.kernel_size[2]))
            for column in range(shape.upsampling[2])
        ]
        return sum(ceil_div(taps, 2) for taps in classes)

    @property
    def mmas_per_item(self) -> Any:
        """Instructions mma.sync of a warp for its columns of a tile."""
        return self.row_units * self.shape.kernel_size[1] * self.mmas_per_line

    @property
    def row_units(self) -> Any:
        """Products along the rows of a tile."""
        return self.rows // self.mma_rows

    @property
    def classes(self) -> int:
        """Outputs of a step."""
        return math.prod(self.shape.upsampling)

    @property
    def live_units(self) -> Any:
        """Products along the rows whose sums a thread keeps at a time."""
        return np.minimum(self.row_units, ceil_div(self._count_inputs(1, 1), self.input_steps[0] * self.mma_rows))

    @property
    def num_accumulators(self) -> Any:
        """Accumulator registers per thread."""
        return self.row_units * self.classes * REGISTERS_PER_MMA

    @property
    def registers(self) -> Any:
        """Estimated registers per thread: sums, taps, the fragments of two rows of the window, and their places."""
        fragments = 2 * REGISTERS_PER_MMA * self.shift_pairs + self.shift_pairs
        sums = REGISTERS_PER_MMA * self.live_units * self.classes
        return round_up(sums + self.shape.num_taps + fragments + OVERHEAD_REGISTERS, 8)

    @property
    def channel_blocks(self) -> Any:
        """Tiles along the channels."""
        return ceil_div(self.w.C, self.channels)

    @property
    def tiles_y(self) -> Any:
        """Tiles along the rows of an image."""
        return ceil_div(self.shape.output_size[1], self.result_rows)

    @property
    def tiles_x(self) -> Any:
        """Tiles along the columns of an image."""
        return ceil_div(self.shape.output_size[2], self.result_columns)

    @property
    def ctas_per_block(self) -> Any:
        """CTAs that share the tiles of a block of channels, each as many as any other, or one less."""
        return ceil_div(self.pixel_tiles, ceil_div(self.pixel_tiles, super().ctas_per_block))

    @property
    def estimated_cycles(self) -> Any:
        """Estimated latency in clock cycles: products, instructions, shared memory, copies and memory."""
        shape = self.shape
        resident, tiles = self.resident_ctas, self.tiles_per_sm
        items = ceil_div(self.items_per_tile, self.warps) * self.warps * self.octets
        mmas = items * self.mmas_per_item
        products = mmas * (shape.kernel_size[2] / 2 / self.mmas_per_line)  # those of one tap take half as long
        lines = self.window_rows - (self.mma_rows - 1) * self.input_steps[0]  # with which a fragment begins
        loads, results = items * lines * self.shift_pairs, items * self.row_units * self.classes
        issued = mmas + 2 * loads + STORE_INSTRUCTIONS * results
        conflicts = math.gcd(self.input_steps[1], 2)
        shared = loads * REGISTERS_PER_MMA * conflicts + 2 * results + self.window_bytes / LINE_BYTES
        pixels = self.window_rows * self.window_columns + self.result_rows * self.result_columns
        elements = sum(map(math.prod, (shape.input_size, shape.output_size))) * self.w.N * self.w.C
        memory = elements * ELEMENT_BYTES / (H200.multiprocessors * MEMORY_BYTES_PER_CYCLE)
        copy_cycles = count_copy_cycles(pixels, self.octets)
        product_cycles = products * CLOCKS_PER_MATRIX_MULTIPLY
        cycles = combine_overlapping(
            tiles * product_cycles * np.maximum(1, SCHEDULERS / (resident * self.compute_warps)),
            tiles * issued / SCHEDULERS,
            tiles * shared,
            tiles * copy_cycles,
            memory * np.ones_like(self.octets),
        )
        # Nothing overlaps with the first copy, and with the last products of a CTA.
        return cycles + START_CYCLES + copy_cycles + product_cycles * np.maximum(1, SCHEDULERS / self.compute_warps)


def list_steps(w: Conv | TransposedView) -> tuple[int, int]:
    """Return the numbers of steps of outputs along rows and columns."""
    shape = PlaneShape.from_workload(w)
    rows, columns = (ceil_div(shape.output_size[axis], shape.upsampling[axis]) for axis in (1, 2))
    return rows, columns


@functools.lru_cache(maxsize=64)
def fits_octets(w: Conv | TransposedView) -> bool:
    """Whether an image or a signal has one filter per channel, channels fill octets, and a config fits an SM."""
    return (
        w.spatial_ndim <= MAX_AXES
        and w.C == w.O == w.groups > 1
        and w.C % OCTET == 0
        and 1 < math.prod(w.kernel) <= MAX_TAPS
        and DiagonalConfig.has_config(w)
    )


def is_promising(w: ConvOperator) -> bool:
    """Return whether the layer is so large that more than the launch decides."""
    return bool(w.min_bytes >= MIN_PROMISING_BYTES)
