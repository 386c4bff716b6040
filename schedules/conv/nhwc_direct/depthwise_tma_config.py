"""Configs of `depthwise_tma`: tiles of output pixels and channels, whose windows of X fit in shared memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from tvmconv.arithmetic import ceil_div, round_up
from tvmconv.tensor_map import MAX_BOX_ELEMENTS
from tvmconv.workloads import Conv
from tvmconv.workloads.dtypes import get_itemsize

from ..estimated_config import limit_compute_threads
from ..row_walk_config import (
    COPY_BYTES,
    INPUT_EVICTIONS,
    L2_BYTES_PER_CLOCK,
    NORMAL,
    START_CYCLES,
    RowWalkConfig,
    can_skip_padding,
    count_period_lines,
    count_periods,
)
from ..tile_config import Rule, overlap_cycles

MAX_SHARED_BYTES = 227 << 10
MAX_CHANNEL_CHOICES = 8  # channels per tile that are tried
MIN_CHANNEL_BYTES = 32  # of a tile whose channels are not among the most
MAX_OVERHANG = 1.15  # ratio of the channels or pixels that tiles cover to those that exist, of configs worth a search
MAX_PRODUCTS = 2560  # unrolled products per thread
MAX_FILTER_REGISTERS = 100  # taps of a thread's channels
MIN_THREADS, MAX_THREADS = 64, 512  # that compute
OVERHEAD_REGISTERS = 8  # besides sums, taps and a row of the window
MAX_COPIES = 4  # of the window of a CTA that has one
MIN_COPIED_BYTES = 64  # contiguous bytes below which TMA copies more slowly
SHARED_BYTES_PER_CLOCK = 128  # of an SM
ROWS = (2, 4, 7, 8, 14, 28, 56)  # output rows of a tile, besides all rows of an image, a half and a quarter
STRIPS = (1, 2, 4, 5, 7)  # neighbouring output columns per thread
WHOLE_WINDOW = 0  # the number of rows per copy that stands for all rows of a window
OVERLAP = 0.6  # fraction of work that the longest part of it hides
WINDOW_LATENCY_CYCLES = 600  # from the copy of a window to its use, besides the time of its bytes


def list_channel_choices(w: Conv) -> list[int]:
    """Return channels per tile, whole copies of TMA, which overhang all channels little; most first."""
    step = COPY_BYTES // get_itemsize(w.storage)
    choices = [n for n in range(step, min(round_up(w.C, step), MAX_BOX_ELEMENTS) + 1, step)]
    choices = [n for n in choices if ceil_div(w.C, n) * n <= max(MAX_OVERHANG * w.C, step)] or choices[-1:]
    # The smallest tile for each number of tiles is the best one.
    smallest = {ceil_div(w.C, n): n for n in reversed(choices)}
    least = MIN_CHANNEL_BYTES // get_itemsize(w.storage)
    divisors = [n for n in choices if w.C % n == 0 and n >= least][:MAX_CHANNEL_CHOICES]
    return sorted({*sorted(smallest.values(), reverse=True)[:MAX_CHANNEL_CHOICES], *divisors})


def list_extent_choices(size: int, candidates: Sequence[int]) -> list[int]:
    """Return extents of a tile along an axis: the candidates up to the size of the axis, at least one."""
    return [n for n in candidates if n <= size] or [candidates[0]]


@dataclass(frozen=True)
class DepthwiseTmaConfig(RowWalkConfig):
    """One config, or many configs as columns."""

    TILE_KNOBS: ClassVar[tuple[str, ...]] = ("channels", "rows", "columns", "strip")
    SHARED_BYTES: ClassVar[int] = MAX_SHARED_BYTES
    MISSING_KNOBS: ClassVar[Mapping[str, Any]] = {"lines": WHOLE_WINDOW, "input_eviction": NORMAL}

    w: Conv
    vector: Any  # channels per thread
    channels: Any  # channels per tile
    rows: Any  # output rows per tile, which each thread walks down
    columns: Any  # output columns per tile
    strip: Any  # neighbouring output columns per thread
    stages: Any  # copies in shared memory; one if several CTAs of an SM take turns, 0 if a CTA has one tile
    lines: Any = WHOLE_WINDOW  # rows of X per copy, whose loop is not unrolled
    input_eviction: Any = NORMAL  # "first": lines of X leave L2 before those of Y

    @classmethod
    def list_options(cls, w: Conv) -> Mapping[str, Sequence[Any]]:
        """Return the options of all knobs."""
        height, width = w.output_size
        whole = [round_up(width, strip) for strip in STRIPS if width <= MAX_BOX_ELEMENTS // 2]
        wide = sorted({8, 14, 16, 28, 32, 56, 64, *whole})
        vectors = (2, 4, 8) if get_itemsize(w.storage) == 2 else (1, 2, 4)
        return {
            "vector": [v for v in vectors if w.C % v == 0],
            "channels": list_channel_choices(w),
            "rows": list_extent_choices(height, sorted({*ROWS, *(ceil_div(height, n) for n in (1, 2, 4))})),
            "columns": list_extent_choices(round_up(width, max(STRIPS)), wide),
            "strip": STRIPS,
            "stages": (0, 1, 2, 3, 4),
            "lines": (WHOLE_WINDOW, count_period_lines(w), 2 * count_period_lines(w)),
            "input_eviction": INPUT_EVICTIONS,
        }

    @classmethod
    def list_required(cls, w: Conv) -> list[Rule]:
        """Return the conditions on every config."""
        return [
            (
                "a tile has whole vectors and strips",
                lambda t: (t.channels % t.vector == 0) & (t.columns % t.strip == 0),
            ),
            (f"at most {MAX_PRODUCTS} unrolled products per thread", lambda t: t.num_products <= MAX_PRODUCTS),
            (
                "copies of some rows are smaller than windows, and the walk repeats itself",
                lambda t: (t.lines == WHOLE_WINDOW) | (t.num_periods > 1),
            ),
            (
                f"at most {MAX_FILTER_REGISTERS} taps per thread",
                lambda t: t.vector * math.prod(w.kernel) <= MAX_FILTER_REGISTERS,
            ),
            limit_compute_threads(MAX_THREADS),
            (
                f"a copy has at most {MAX_BOX_ELEMENTS} rows and columns",
                lambda t: (t.copied_lines <= MAX_BOX_ELEMENTS) & (t.window_columns <= MAX_BOX_ELEMENTS),
            ),
            (f"at most {MAX_SHARED_BYTES} bytes of shared memory", lambda t: t.smem_bytes <= MAX_SHARED_BYTES),
        ]

    @classmethod
    def list_pruned(cls, w: Conv) -> list[Rule]:
        """Return the conditions on configs that are worth a search."""
        height, width = w.output_size
        return [
            (
                "windows are loaded while others are computed",
                lambda t: (t.stages > 1) | (t.ctas_per_sm > 1) & ((t.stages == 0) | (t.lines == WHOLE_WINDOW)),
            ),
            ("a CTA of one tile has at most four copies", lambda t: t.is_persistent | (t.buffers <= MAX_COPIES)),
            (f"at least {MIN_THREADS} threads compute", lambda t: t.compute_threads >= MIN_THREADS),
            (
                f"tiles overhang the outputs by at most {MAX_OVERHANG - 1:.0%}",
                lambda t: (
                    ceil_div(height, t.rows) * t.rows * (ceil_div(width, t.columns) * t.columns)
                    <= MAX_OVERHANG * height * width
                ),
            ),
            *super().list_pruned(w),
        ]

    def _window_extent(self, axis: int, outputs: Any) -> Any:
        w = self.w
        return (outputs - 1) * w.stride[axis] + (w.kernel[axis] - 1) * w.dilation[axis] + 1

    @property
    def has_whole_images(self) -> Any:
        """Whether a tile has all rows of an image, so that it needs none outside of it."""
        return (self.rows >= self.w.output_size[0]) & can_skip_padding(self.w)

    @property
    def skipped_lines(self) -> Any:
        """Rows before the window, which are zero for all tiles."""
        return np.where(self.has_whole_images, self.w.pad_low[0], 0)

    @property
    def window_lines(self) -> Any:
        """Rows of X that a tile reads."""
        lines = self._window_extent(0, self.rows)
        inside = np.minimum(lines - self.w.pad_low[0], self.w.input_size[0])
        return np.where(self.has_whole_images, inside, lines)

    @property
    def window_columns(self) -> Any:
        """Columns of X that a tile reads."""
        return self._window_extent(1, self.columns)

    @property
    def strip_columns(self) -> Any:
        """Columns of X that a thread reads."""
        return self._window_extent(1, self.strip)

    @property
    def copied_lines(self) -> Any:
        """Rows of X per copy."""
        return np.where(self.lines == WHOLE_WINDOW, self.window_lines, self.lines)

    @property
    def copies_per_window(self) -> Any:
        """Copies of a window, the last of which may have rows that no output needs."""
        return ceil_div(self.window_lines, self.copied_lines)

    @property
    def num_periods(self) -> Any:
        """Rounds of the loop over rows of a window, which leaves the last row out."""
        end = np.minimum(self.rows * self.w.stride[0], self.skipped_lines + self.window_lines - 1)
        return np.where(self.lines == WHOLE_WINDOW, 0, count_periods(self.w, end, self.copied_lines))

    @property
    def buffers(self) -> Any:
        """Copies in shared memory; a CTA of one tile has all of them."""
        return np.where(self.is_persistent, self.stages, self.copies_per_window)

    @property
    def copy_bytes(self) -> Any:
        """Bytes of a copy."""
        return self.copied_lines * self.window_columns * self.channels * self.itemsize

    @property
    def filter_offset_bytes(self) -> Any:
        """Shared-memory offset of the filters."""
        return self.buffers * self.stage_bytes

    @property
    def vectors(self) -> Any:
        """Vectors of channels of a tile."""
        return self.channels // self.vector

    @property
    def num_items(self) -> Any:
        """Strips of vectors in a tile, one for each thread that computes."""
        return self.vectors * (self.columns // self.strip)

    @property
    def num_products(self) -> Any:
        """Unrolled products per thread, approximately."""
        looped = np.maximum(0, self.num_periods - 1) * self.copied_lines // self.w.stride[0]
        return (self.rows - looped) * self.strip * self.vector * math.prod(self.w.kernel)

    @property
    def num_accumulators(self) -> Any:
        """Sums per thread and tile."""
        return self.rows * self.strip * self.vector

    @property
    def registers(self) -> Any:
        """Estimated registers per thread: sums of the rows under way, taps, and a row of the window with the next."""
        w, words = self.w, self.itemsize / 4
        live_rows = np.minimum(self.rows, ceil_div((w.kernel[0] - 1) * w.dilation[0] + 1, w.stride[0]))
        sums, taps = live_rows * self.strip * self.vector, self.vector * math.prod(w.kernel)
        window = np.ceil(self.strip_columns * self.vector * (1 + words)).astype(int)
        return round_up(sums + taps + window + OVERHEAD_REGISTERS, 8)

    @property
    def channel_blocks(self) -> Any:
        """Tiles along the channels."""
        return ceil_div(self.w.C, self.channels)

    @property
    def tiles_y(self) -> Any:
        """Tiles along the rows of an image."""
        return ceil_div(self.w.output_size[0], self.rows)

    @property
    def tiles_x(self) -> Any:
        """Tiles along the columns of an image."""
        return ceil_div(self.w.output_size[1], self.columns)

    @property
    def bank_conflicts(self) -> Any:
        """Wavefronts of a load of a warp for each one that its bytes need, approximately.

        There is one if the strips of neighbouring threads continue each other in the banks.
        """
        pixel_bytes = self.channels * self.itemsize
        step_bytes = self.strip * self.w.stride[1] * pixel_bytes
        continues = (pixel_bytes % SHARED_BYTES_PER_CLOCK == 0) | (
            (step_bytes - pixel_bytes) % SHARED_BYTES_PER_CLOCK == 0
        )
        return np.where(continues, 1, 2)

    @property
    def estimated_cycles(self) -> Any:
        """Estimated latency in clock cycles: instructions, copies, shared memory and memory, which overlap in part."""
        w, itemsize = self.w, self.itemsize
        ctas, tiles = self.resident_ctas, self.tiles_per_sm
        conversions = 1 if itemsize == 2 else 0
        loads = self.window_lines * self.strip_columns
        words = ceil_div(self.vector * itemsize, COPY_BYTES)
        instructions = self.num_accumulators * math.prod(w.kernel) + loads * (conversions * self.vector + words)
        instructions = instructions + self.rows * self.strip * (self.vector * 0.5 * conversions + 3 * words + 2)
        issue = self.count_issue_cycles(instructions)
        shared = self.bank_conflicts * loads * self.vector * itemsize * self.compute_threads / SHARED_BYTES_PER_CLOCK
        copied = np.maximum(MIN_COPIED_BYTES, self.channels * itemsize) * self.window_lines * self.window_columns
        copies = copied / L2_BYTES_PER_CLOCK
        filters = 30.0 * self.vector * math.prod(w.kernel) / 4  # before the first tile
        # A copy takes its time while the copies before it are computed, by this CTA and the others.
        parts = np.where(self.is_persistent, self.copies_per_window, 1)
        hidden = (np.maximum(self.stages, 1) * ctas - 1) * issue / parts
        waits = tiles / ctas * parts * np.maximum(0, WINDOW_LATENCY_CYCLES + copies / self.copies_per_window - hidden)
        first = copies / self.copies_per_window * ctas
        work = tiles * issue, tiles * shared, tiles * copies, self.memory_cycles
        return overlap_cycles(OVERLAP, *work) + waits + first + filters + START_CYCLES
