"""Configs of `depthwise_tma` for gradients of weights: tiles of pixels and channels in shared memory, and sums."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from tvmconv.arithmetic import ceil_div, round_up
from tvmconv.target import (
    H200,
    NUM_BANKS,
    SCHEDULERS,
    WARP_SIZE,
)
from tvmconv.tensor_map import MAX_BOX_ELEMENTS
from tvmconv.workloads.conv_gradient import WeightGradient
from tvmconv.workloads.dtypes import get_itemsize

from ..estimated_config import EstimatedTileConfig, limit_compute_threads
from ..plane_shape import PlaneShape
from ..row_walk_config import COPY_BYTES, STAGE_ALIGNMENT_BYTES
from ..tensor_cores.gemm.pipelines import BARRIER_BYTES
from ..tensor_cores.latency_model import count_ctas_per_sm
from ..tile_config import Rule, overlap_cycles
from .depthwise_tma_config import MAX_SHARED_BYTES, MIN_THREADS, SHARED_BYTES_PER_CLOCK
from .wgrad_config import MAX_CLUSTER, count_positions, list_positions

MAX_PRODUCTS = 3072  # unrolled products per thread
MAX_SUMS = 128  # of a thread
MAX_THREADS = 640  # that compute
MAX_OVERHANG = 1.25  # ratio of the pixels that tiles cover to those that exist, of configs worth a search
OVERHEAD_REGISTERS = 30  # besides sums, rows of dY and a row of X
WIDTHS, MAX_EQUAL_BLOCKS = (2, 4, 8, 16), 4  # channels per tile in copies of TMA; tiles of all channels
ROWS_CHOICES = (1, 2, 4, 7, 8, 14)
STRIPS = (1, 2, 4, 5, 7)  # neighbouring columns of dY per thread
IMAGES_CHOICES = (1, 2, 4, 8)
MAX_SMALL_IMAGE = 400  # pixels
LINE_BYTES = (128, 64, 32, 16)  # of whole rows
STAGES_CHOICES = (1, 2, 3, 4)
WAVES_CHOICES = (1, 2, 3, 4)
# Of a line of a box of TMA, of its bytes, and of an SM's share of the memory; cycles of both launches and of a cluster.
# Fitted to the trials of 23 layers on an H200.
LINE_CYCLES, COPY_BYTES_PER_CYCLE, MEMORY_BYTES_PER_CYCLE = 1.0, 73, 25
BUSY_WARPS, ISSUE_RATIO = 8.6, 1.0  # warps that hide the latency of instructions; cycles of one
UNSWIZZLED_RATIO = 2.0  # of the time of lines that are no power of two
ROW_BYTES_PER_CYCLE = 93  # of whole rows
START_CYCLES, REDUCTION_CYCLES, CLUSTER_CYCLES = 3600, 2100, 330
OVERLAP = 0.62  # fraction of work that the longest part of it hides


def list_widths(w: WeightGradient) -> list[int]:
    """Return channels per tile, whole copies of TMA: powers of two, and equal parts of all channels."""
    step = COPY_BYTES // get_itemsize(w.storage)
    equal = {round_up(ceil_div(w.C, n), step) for n in range(1, MAX_EQUAL_BLOCKS + 1)}
    widths = sorted(n for n in {*equal, *(step * n for n in WIDTHS)} if n <= min(round_up(w.C, step), MAX_BOX_ELEMENTS))
    return [n for n in widths if ceil_div(w.C, n) * n <= MAX_OVERHANG * w.C] or widths[:1]


@dataclass(frozen=True)
class WindowWgradConfig(EstimatedTileConfig):
    """One config, or many configs as columns."""

    TILE_KNOBS: ClassVar[tuple[str, ...]] = ("channels", "rows", "columns", "strip")
    SHARED_BYTES: ClassVar[int] = MAX_SHARED_BYTES
    MISSING_KNOBS: ClassVar[Mapping[str, Any]] = {"whole_rows": 0}

    w: WeightGradient
    vector: Any  # channels per thread
    channels: Any  # channels per tile
    images: Any  # images per tile
    rows: Any  # rows of dY per tile, which each thread walks down
    columns: Any  # columns of dY per tile
    strip: Any  # neighbouring columns of dY per thread
    taps_y: Any  # rows of the filter per thread
    stages: Any  # tiles in shared memory
    waves: Any  # CTAs per multiprocessor, which divide the tiles
    whole_rows: Any  # 1 if TMA copies rows of all channels as contiguous lines, 0 for boxes of channels and columns
    parts_in_cluster: Any  # 1 if the parts are the CTAs of a cluster, 0 if a second kernel adds them

    @classmethod
    def list_options(cls, w: WeightGradient) -> Mapping[str, Sequence[Any]]:
        """Return the options of all knobs."""
        _, filter_rows, _ = cls.make_shape(w).kernel_size
        _, height, width = cls.make_shape(w).output_size
        rows = sorted({n for n in (*ROWS_CHOICES, height) if n <= height and n <= ROWS_CHOICES[-1]})
        whole = [round_up(width, strip) for strip in STRIPS if width <= MAX_BOX_ELEMENTS // 2]
        columns = sorted({n for n in (8, 14, 16, 28, *whole) if n < width + STRIPS[-1]})
        vectors = (2, 4) if get_itemsize(w.storage) == 2 else (1, 2)
        return {
            "vector": [v for v in vectors if w.C % v == 0],
            "channels": list_widths(w),
            "images": [n for n in IMAGES_CHOICES if n == 1 or (height * width <= MAX_SMALL_IMAGE and n <= w.N)],
            "rows": rows,
            "columns": columns,
            "strip": sorted({n for n in (*STRIPS, width if width <= 16 else 1) if n <= columns[-1]}),
            "taps_y": sorted({filter_rows, ceil_div(filter_rows, 2)}),
            "stages": STAGES_CHOICES,
            "waves": WAVES_CHOICES,
            "whole_rows": (0, 1) if all(map(all, cls.find_lines(w))) else (0,),
            "parts_in_cluster": (0, 1),
        }

    @classmethod
    def list_required(cls, w: WeightGradient) -> list[Rule]:
        """Return the conditions on every config."""
        return [
            (
                "a tile has whole vectors and strips",
                lambda t: (t.channels % t.vector == 0) & (t.columns % t.strip == 0),
            ),
            (f"at most {MAX_PRODUCTS} unrolled products per thread", lambda t: t.num_products <= MAX_PRODUCTS),
            (f"at most {MAX_SUMS} sums per thread", lambda t: t.num_accumulators <= MAX_SUMS),
            limit_compute_threads(MAX_THREADS),
            (
                f"a window has at most {MAX_BOX_ELEMENTS} rows and columns",
                lambda t: np.maximum(t.window_lines, t.window_columns) <= MAX_BOX_ELEMENTS,
            ),
            (
                "whole rows have all channels and columns",
                lambda t: (t.whole_rows == 0) | ((t.channels == w.C) & (t.tiles_x == 1)),
            ),
            (
                f"a cluster has at most {MAX_CLUSTER} parts, and more than one",
                lambda t: (t.parts_in_cluster == 0) | ((t.num_parts <= MAX_CLUSTER) & (t.num_parts > 1)),
            ),
            (f"at most {MAX_SHARED_BYTES} bytes of shared memory", lambda t: t.smem_bytes <= MAX_SHARED_BYTES),
        ]

    @classmethod
    def list_pruned(cls, w: WeightGradient) -> list[Rule]:
        """Return the conditions on configs that are worth a search."""
        _, height, width = cls.make_shape(w).output_size
        return [
            (
                "tiles are copied while others are multiplied, and a CTA has as many as stages",
                lambda t: (t.stages > 1) & (t.stages <= t.iterations) | ((t.stages == 1) & (t.iterations == 1)),
            ),
            ("all CTAs run at a time", lambda t: ceil_div(t.num_blocks, H200.multiprocessors) <= t.ctas_per_sm),
            (
                "channels are padded by at most an eighth",
                lambda t: t.channel_blocks * t.channels <= np.maximum(9 / 8 * w.C, w.C + 7),
            ),
            (f"at least {MIN_THREADS} threads compute", lambda t: t.compute_threads >= MIN_THREADS),
            (
                f"tiles overhang dY by at most {MAX_OVERHANG - 1:.0%}",
                lambda t: ceil_div(height, t.rows) * t.rows * (t.tiles_x * t.columns) <= MAX_OVERHANG * height * width,
            ),
            ("most threads of the last warp compute", lambda t: t.num_items >= 0.8 * t.compute_threads),
        ]

    @staticmethod
    def make_shape(w: WeightGradient) -> PlaneShape:
        """Return the sizes of the forward convolution over planes, rows and columns."""
        return PlaneShape.from_workload(w.forward)

    @classmethod
    def find_lines(cls, w: WeightGradient) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return elements per line and lines per row of dY and of X, for whole rows; zeros if no box has them."""
        shape, itemsize = cls.make_shape(w), get_itemsize(w.storage)

        def find(columns: int) -> tuple[int, int]:
            row = columns * w.C
            lengths = (nbytes // itemsize for nbytes in LINE_BYTES)
            fitting = [n for n in lengths if row % n == 0 and row // n <= MAX_BOX_ELEMENTS]
            return (fitting[0], row // fitting[0]) if fitting else (0, 0)

        return find(shape.output_size[2]), find(shape.input_size[2])

    @property
    def shape(self) -> PlaneShape:
        """Sizes of the forward convolution over planes, rows and columns."""
        return self.make_shape(self.w)

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return get_itemsize(self.w.storage)

    @property
    def tap_groups(self) -> Any:
        """Threads of a tile that divide the rows of the filter."""
        return ceil_div(self.shape.kernel_size[1], self.taps_y)

    @property
    def has_known_lines(self) -> Any:
        """Whether a tile has all rows of an image, so that rows of X outside of it are known; some are inside."""
        return (self.shape.count_inside_taps(1) > 0) & (self.tiles_y == 1) & (self.tap_groups == 1)

    @property
    def has_known_columns(self) -> Any:
        """Whether a thread has all columns of an image, so that columns of X outside are known; some are inside."""
        return (self.shape.count_inside_taps(2) > 0) & (self.tiles_x == 1) & (self.strip == self.columns)

    def _count_window(self, axis: int, outputs: Any, taps: Any, is_known: Any) -> Any:
        """Return the extent of the window of X below rows or columns of dY."""
        shape = self.shape
        extent = (outputs - 1) * shape.strides[axis] + (taps - 1) * shape.dilations[axis] + 1
        return np.where(is_known, shape.input_size[axis], extent)

    @property
    def window_lines(self) -> Any:
        """Rows of X in shared memory."""
        return self._count_window(1, self.rows, self.taps_y * self.tap_groups, self.has_known_lines)

    @property
    def window_columns(self) -> Any:
        """Columns of X in shared memory."""
        is_image = self.has_known_columns | (self.whole_rows == 1)
        return self._count_window(2, self.columns, self.shape.kernel_size[2], is_image)

    @property
    def gradient_columns(self) -> Any:
        """Columns of dY in shared memory."""
        return np.where(self.whole_rows == 1, self.shape.output_size[2], self.columns)

    def list_lines(self) -> list[int]:
        """Return the rows of X that a thread reads, from that of the first tap on, without those known as outside."""
        shape = self.shape
        lines = list_positions(int(self.rows), int(self.taps_y), shape.strides[1], shape.dilations[1])
        return self._drop_outside(lines, 1, bool(self.has_known_lines))

    def list_columns(self) -> list[int]:
        """Return the columns of X that a thread reads, from that of the first tap on, without those outside."""
        shape = self.shape
        columns = list_positions(int(self.strip), shape.kernel_size[2], shape.strides[2], shape.dilations[2])
        return self._drop_outside(columns, 2, bool(self.has_known_columns))

    def _drop_outside(self, positions: list[int], axis: int, is_known: bool) -> list[int]:
        if not is_known:
            return positions
        first, size = self.shape.pad_low[axis], self.shape.input_size[axis]
        return [position for position in positions if 0 <= position - first < size]

    @property
    def window_bytes(self) -> Any:
        """Bytes of X of a tile."""
        return self.images * self.window_lines * self.window_columns * self.channels * self.itemsize

    @property
    def gradient_offset_bytes(self) -> Any:
        """Bytes in front of dY in a stage."""
        return round_up(self.window_bytes, STAGE_ALIGNMENT_BYTES)

    @property
    def gradient_bytes(self) -> Any:
        """Bytes of dY of a tile."""
        return self.images * self.rows * self.gradient_columns * self.channels * self.itemsize

    @property
    def stage_bytes(self) -> Any:
        """Bytes from one stage to the next."""
        return round_up(self.gradient_offset_bytes + self.gradient_bytes, STAGE_ALIGNMENT_BYTES)

    @property
    def sums_at_a_time(self) -> Any:
        """Sums of each thread that are in shared memory at a time, in place of the stages."""
        return np.clip(self.stages * self.stage_bytes // (4 * self.sum_pitch), 1, self.num_accumulators)

    @property
    def sum_pitch(self) -> Any:
        """Elements from a sum of all threads to the next in shared memory; neighbours of few vectors differ in bank."""
        return self.compute_threads + self.vectors % NUM_BANKS

    @property
    def cluster_offset_bytes(self) -> Any:
        """Shared-memory offset of the sums that the CTAs of a cluster send."""
        return round_up(np.maximum(self.stages * self.stage_bytes, 4 * self.sum_pitch), COPY_BYTES)

    @property
    def sums_per_cta(self) -> Any:
        """Sums of a CTA over its threads."""
        return self.num_accumulators * self.tap_groups * self.vectors

    @property
    def sums_per_rank(self) -> Any:
        """Sums that each CTA of a cluster adds up over all of them."""
        return ceil_div(self.sums_per_cta, self.num_parts)

    @property
    def barrier_offset_bytes(self) -> Any:
        """Shared-memory offset of the barriers."""
        cluster_bytes = 4 * self.num_parts * self.sums_per_rank
        return round_up(
            self.cluster_offset_bytes + np.where(self.parts_in_cluster == 1, cluster_bytes, 0), BARRIER_BYTES
        )

    @property
    def smem_bytes(self) -> Any:
        """Dynamic shared memory per CTA in bytes, including the alignment of its start."""
        return STAGE_ALIGNMENT_BYTES + self.barrier_offset_bytes + 2 * self.stages * BARRIER_BYTES

    @property
    def vectors(self) -> Any:
        """Vectors of channels of a tile."""
        return self.channels // self.vector

    @property
    def pixel_threads(self) -> Any:
        """Threads with the same channels and taps, whose sums a CTA adds."""
        return self.images * (self.columns // self.strip)

    @property
    def num_items(self) -> Any:
        """Threads that have pixels."""
        return self.vectors * self.pixel_threads * self.tap_groups

    @property
    def compute_threads(self) -> Any:
        """Threads that compute, whole warps."""
        return round_up(self.num_items, WARP_SIZE)

    @property
    def num_warps(self) -> Any:
        """Warps per CTA, the last of which copies."""
        return self.compute_threads // WARP_SIZE + 1

    @property
    def num_accumulators(self) -> Any:
        """Sums of a thread."""
        return self.taps_y * self.shape.kernel_size[2] * self.vector

    @property
    def num_products(self) -> Any:
        """Unrolled products per thread, without those known to be outside of the image."""
        shape = self.shape
        inside_y, inside_x = (shape.count_inside_taps(axis) / shape.kernel_size[axis] for axis in (1, 2))
        inside = np.where(self.has_known_lines, inside_y, 1) * np.where(self.has_known_columns, inside_x, 1)
        return self.rows * self.strip * self.num_accumulators * inside

    @property
    def registers(self) -> Any:
        """Estimated registers per thread: sums, the rows of dY under way, and a row of X with the next."""
        shape, words = self.shape, self.itemsize / 4
        live_rows = np.minimum(self.rows, ceil_div((self.taps_y - 1) * shape.dilations[1] + 1, shape.strides[1]))
        row = np.ceil(self.loaded_columns * self.vector * (1 + words)).astype(int)
        return round_up(self.num_accumulators + live_rows * self.strip * self.vector + row + OVERHEAD_REGISTERS, 8)

    @property
    def loaded_columns(self) -> Any:
        """Columns of X that a thread reads of a row."""
        shape = self.shape
        columns = count_positions(self.strip, shape.kernel_size[2], shape.strides[2], shape.dilations[2])
        return np.where(self.has_known_columns, np.minimum(columns, shape.input_size[2]), columns)

    @property
    def loaded_lines(self) -> Any:
        """Rows of X that a thread reads of a tile."""
        shape = self.shape
        lines = count_positions(self.rows, self.taps_y, shape.strides[1], shape.dilations[1])
        return np.where(self.has_known_lines, np.minimum(lines, shape.input_size[1]), lines)

    @property
    def channel_blocks(self) -> Any:
        """Tiles along the channels."""
        return ceil_div(self.w.C, self.channels)

    @property
    def tiles_y(self) -> Any:
        """Tiles along the rows of an image."""
        return ceil_div(self.shape.output_size[1], self.rows)

    @property
    def tiles_x(self) -> Any:
        """Tiles along the columns of an image."""
        return ceil_div(self.shape.output_size[2], self.columns)

    @property
    def num_tiles(self) -> Any:
        """Tiles along the pixels of all images."""
        return ceil_div(self.w.N, self.images) * self.tiles_y * self.tiles_x

    @property
    def iterations(self) -> Any:
        """Tiles of a CTA."""
        parts = np.maximum(1, self.waves * H200.multiprocessors // np.maximum(1, self.channel_blocks))
        return ceil_div(self.num_tiles, np.where(self.parts_in_cluster == 1, np.minimum(parts, MAX_CLUSTER), parts))

    @property
    def num_parts(self) -> Any:
        """Parts of the pixels that are not empty."""
        return ceil_div(self.num_tiles, self.iterations)

    @property
    def num_blocks(self) -> Any:
        """CTAs of the grid."""
        return self.num_parts * self.channel_blocks

    @property
    def ctas_per_sm(self) -> Any:
        """Number of CTAs that fit an SM."""
        limits = self.num_blocks, H200.multiprocessors, self.smem_bytes
        return count_ctas_per_sm(*limits, self.registers, self.num_threads)

    @property
    def estimated_cycles(self) -> Any:
        """Estimated latency in clock cycles: instructions, copies, shared memory and memory, which overlap in part."""
        itemsize = self.itemsize
        ctas = ceil_div(self.num_blocks, H200.multiprocessors)
        resident = np.maximum(1, np.minimum(ctas, self.ctas_per_sm))
        tiles, warps = self.iterations * ctas, np.maximum(1, self.compute_threads // WARP_SIZE)
        conversions = 1 if itemsize == 2 else 0
        loads = self.loaded_lines * self.loaded_columns + self.rows * self.strip
        instructions = self.num_products + loads * (conversions * self.vector + 1) + 40
        # Few warps do not hide the latency of their own instructions.
        issue = (
            instructions * warps / SCHEDULERS * np.maximum(1.0, BUSY_WARPS / (resident * warps)) ** 0.5 * ISSUE_RATIO
        )
        step_bytes = self.strip * self.channels * itemsize
        conflicts = np.where(
            (self.channels * itemsize % SHARED_BYTES_PER_CLOCK == 0) | (step_bytes % SHARED_BYTES_PER_CLOCK > 0), 1, 2
        )
        shared = conflicts * loads * self.vector * itemsize * self.compute_threads / SHARED_BYTES_PER_CLOCK
        pixels = self.images * (self.window_lines * self.window_columns + self.rows * self.gradient_columns)
        line_bytes = self.channels * itemsize
        is_slow = (line_bytes > COPY_BYTES) & (line_bytes & (line_bytes - 1) > 0)
        copies = pixels * (LINE_CYCLES + line_bytes / COPY_BYTES_PER_CYCLE) * np.where(is_slow, UNSWIZZLED_RATIO, 1)
        copies = np.where(self.whole_rows == 1, pixels * line_bytes / ROW_BYTES_PER_CYCLE, copies)
        argument_bytes = sum(map(math.prod, self.w.argument_shapes[:2])) * itemsize
        memory = argument_bytes / (H200.multiprocessors * MEMORY_BYTES_PER_CYCLE)
        cycles = overlap_cycles(OVERLAP, tiles * issue, tiles * shared, tiles * copies, memory)
        first = copies + issue  # which nothing overlaps
        sums = 3 * self.num_accumulators * warps  # a CTA's own
        parts = np.where(self.num_parts == 1, 0, np.where(self.parts_in_cluster == 1, CLUSTER_CYCLES, REDUCTION_CYCLES))
        return START_CYCLES + first + cycles + sums + parts
