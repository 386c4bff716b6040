"""Configs of `depthwise_planes`: planes of channels whose copies fit in shared memory, and strips of their columns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from tvmconv.arithmetic import ceil_div, round_up
from tvmconv.target import NUM_BANKS, WARP_SIZE
from tvmconv.workloads import Conv
from tvmconv.workloads.dtypes import get_itemsize

from ..estimated_config import limit_compute_threads
from ..row_walk_config import (
    COPY_BYTES,
    INPUT_EVICTIONS,
    L2_BYTES_PER_CLOCK,
    NORMAL,
    STAGE_ALIGNMENT_BYTES,
    START_CYCLES,
    RowWalkConfig,
    count_lead_lines,
    count_period_lines,
    count_periods,
)
from ..tile_config import Rule, overlap_cycles

OUTPUTS = DIRECT, STAGED = "direct", "staged"  # how results are stored
WORD_BYTES = 4  # of a bank of shared memory
LOAD_BYTES = (2, 4, 8, 16)  # of a thread's load from shared memory
MAX_STAGE_BYTES = 96 << 10
STRIPS = (1, 2, 4, 7, 8, 14)  # neighbouring output columns per thread
MAX_PARTS = 8  # parts of the rows of a plane
MAX_UNROLLED_PRODUCTS = 2048  # of a thread; walks of more rows have a loop
MAX_SUMS = 72  # under way
MAX_THREADS, MIN_THREADS = 512, 48  # that compute
OVERHEAD_REGISTERS = 20  # besides sums, taps and a row
STORED_SECTORS_PER_CLOCK = 0.7  # of an SM, its share of what L2 takes
OVERLAP = 0.9  # fraction of work that the longest part of it hides
COPY_LATENCY_CYCLES = 1000  # from a copy to its use, besides the time of its bytes


def list_channel_choices(w: Conv) -> list[int]:
    """Return planes per tile: divisors of the channels whose planes are whole copies."""
    plane_bytes = math.prod(w.input_size) * get_itemsize(w.storage)
    divisors = [n for n in range(1, w.C + 1) if w.C % n == 0 and n * plane_bytes % COPY_BYTES == 0]
    return [n for n in divisors if n * plane_bytes <= MAX_STAGE_BYTES]


def count_wavefronts(addresses: np.ndarray, num_bytes: int) -> np.ndarray:
    """Return the wavefronts in which shared memory serves loads of a warp: (loads,).

    Args:
        addresses: Bytes in front of what each thread loads: (loads, threads).
        num_bytes: Bytes that a thread loads, a power of two.
    """
    words_per_thread = max(1, num_bytes // WORD_BYTES)
    words = addresses[..., None] // WORD_BYTES + np.arange(words_per_thread)
    words = np.sort(words.reshape(len(addresses), words_per_thread, WARP_SIZE), axis=-1)  # 128 bytes at a time
    is_new = np.concatenate([np.ones_like(words[..., :1], bool), np.diff(words, axis=-1) > 0], axis=-1)
    in_bank = (words % NUM_BANKS)[..., None] == np.arange(NUM_BANKS)
    return (in_bank & is_new[..., None]).sum(axis=-2).max(axis=-1).sum(axis=-1)


@dataclass(frozen=True)
class DepthwisePlanesConfig(RowWalkConfig):
    """One config, or many configs as columns."""

    TILE_KNOBS: ClassVar[tuple[str, ...]] = ("channels", "strip", "rows")

    w: Conv
    channels: Any  # planes per tile
    strip: Any  # neighbouring output columns per thread
    rows: Any  # output rows per thread
    stages: Any  # tiles in shared memory; one if several CTAs of an SM take turns, 0 if a CTA has one tile
    input_eviction: Any = NORMAL  # "first": lines of X leave L2 before those of Y
    output: Any = DIRECT  # "staged": results go to shared memory, and planes of a tile from there to Y at once

    @classmethod
    def list_options(cls, w: Conv) -> Mapping[str, Sequence[Any]]:
        """Return the options of all knobs."""
        height, width = w.output_size
        return {
            "channels": list_channel_choices(w) or [w.C],
            "strip": [n for n, before in zip(STRIPS, (0, *STRIPS), strict=False) if before < width],
            "rows": [n for n in range(1, height + 1) if height % n == 0 and height // n <= MAX_PARTS],
            "stages": (0, 1, 2, 3, 4),
            "input_eviction": INPUT_EVICTIONS,
            "output": OUTPUTS,
        }

    @classmethod
    def list_required(cls, w: Conv) -> list[Rule]:
        """Return the conditions on every config."""
        plane_bytes = math.prod(w.input_size) * get_itemsize(w.storage)
        return [
            (
                f"planes of a tile are whole copies of {COPY_BYTES} bytes, at most {MAX_STAGE_BYTES} bytes",
                lambda t: (t.channels * plane_bytes % COPY_BYTES == 0) & (t.channels * plane_bytes <= MAX_STAGE_BYTES),
            ),
            (
                f"staged planes are whole copies of {COPY_BYTES} bytes",
                lambda t: ~t.is_staged | (t.result_bytes % COPY_BYTES == 0),
            ),
            (
                f"at most {MAX_SUMS} sums under way, and {MAX_UNROLLED_PRODUCTS} unrolled products",
                lambda t: (t.num_accumulators <= MAX_SUMS) & (t.unrolled_products <= 2 * MAX_UNROLLED_PRODUCTS),
            ),
            limit_compute_threads(MAX_THREADS),
        ]

    @classmethod
    def list_pruned(cls, w: Conv) -> list[Rule]:
        """Return the conditions on configs that are worth a search."""
        width = w.output_size[1]
        return [
            ("planes are copied while others are computed", lambda t: (t.stages > 1) | (t.ctas_per_sm > 1)),
            (f"at least {MIN_THREADS} threads compute", lambda t: t.compute_threads >= MIN_THREADS),
            ("strips fill the columns", lambda t: ceil_div(width, t.strip) * t.strip <= 1.15 * width),
            *super().list_pruned(w),
        ]

    @property
    def is_staged(self) -> Any:
        """Whether results pass through shared memory."""
        return np.equal(self.output, STAGED)

    @property
    def buffers(self) -> Any:
        """Tiles in shared memory."""
        return np.maximum(self.stages, 1)

    @property
    def plane_bytes(self) -> int:
        """Bytes of a plane of X."""
        return math.prod(self.w.input_size) * self.itemsize

    @property
    def copy_bytes(self) -> Any:
        """Bytes of the planes of a tile."""
        return self.channels * self.plane_bytes

    @property
    def result_bytes(self) -> Any:
        """Bytes of the planes of Y of a tile."""
        return self.channels * math.prod(self.w.output_size) * self.itemsize

    @property
    def result_offset_bytes(self) -> Any:
        """Shared-memory offset of the results, if they are staged."""
        return self.buffers * self.stage_bytes

    @property
    def filter_offset_bytes(self) -> Any:
        """Shared-memory offset of the filters."""
        staged = np.where(self.is_staged, round_up(self.result_bytes, STAGE_ALIGNMENT_BYTES), 0)
        return self.result_offset_bytes + staged

    @property
    def strips(self) -> Any:
        """Strips of a row."""
        return ceil_div(self.w.output_size[1], self.strip)

    @property
    def parts(self) -> Any:
        """Parts of the rows of a plane, each of one thread for each strip."""
        return self.w.output_size[0] // self.rows

    @property
    def num_items(self) -> Any:
        """Threads of a tile that have work."""
        return self.channels * self.strips * self.parts

    @property
    def num_accumulators(self) -> Any:
        """Sums under way per thread."""
        return count_period_lines(self.w) // self.w.stride[0] * self.strip

    @property
    def products(self) -> Any:
        """Products of a thread and tile."""
        return self.rows * self.strip * math.prod(self.w.kernel)

    @property
    def num_lines(self) -> Any:
        """Rows of X that a thread walks down, with those outside of the image."""
        return (self.rows - 1) * self.w.stride[0] + count_lead_lines(self.w) + 1

    @property
    def num_periods(self) -> Any:
        """Rounds of the loop over rows, all of which are inside of the image."""
        w, period = self.w, count_period_lines(self.w)
        last_part = w.input_size[0] + w.pad_low[0] - (w.output_size[0] - self.rows) * w.stride[0]
        end = np.minimum(np.minimum(self.rows * w.stride[0], self.num_lines - 1), last_part - 1)
        periods = count_periods(w, end, period)
        return np.where((self.products > MAX_UNROLLED_PRODUCTS) & (periods > 1), periods, 0)

    @property
    def unrolled_products(self) -> Any:
        """Unrolled products per thread, approximately."""
        looped = np.maximum(0, self.num_periods - 1) * count_period_lines(self.w) // self.w.stride[0]
        return (self.rows - looped) * self.strip * math.prod(self.w.kernel)

    @property
    def registers(self) -> Any:
        """Estimated registers per thread: sums under way, taps, and a row with the next."""
        w, words = self.w, self.itemsize / 4
        columns = (self.strip - 1) * w.stride[1] + (w.kernel[1] - 1) * w.dilation[1] + 1
        row = np.ceil(columns * (1 + words)).astype(int)
        return round_up(self.num_accumulators + math.prod(w.kernel) + row + OVERHEAD_REGISTERS, 8)

    @property
    def channel_blocks(self) -> Any:
        """Tiles along the channels."""
        return self.w.C // self.channels

    @property
    def tiles_y(self) -> Any:
        """Tiles along the rows of an image."""
        return 1

    @property
    def tiles_x(self) -> Any:
        """Tiles along the columns of an image."""
        return 1

    @property
    def load_wavefronts(self) -> Any:
        """Wavefronts of shared memory of a warp's load of a vector, from the addresses of its first warp."""
        w, lane = self.w, np.arange(WARP_SIZE)
        strip, strips, channels, rows = (
            np.atleast_1d(value)[:, None] for value in (self.strip, self.strips, self.channels, self.rows)
        )
        plane = lane // strips % channels * w.input_size[0] + lane // (strips * channels) * rows * w.stride[0]
        address = (plane * w.input_size[1] + lane % strips * strip * w.stride[1]) * self.itemsize
        vector = math.gcd(w.input_size[1], COPY_BYTES // self.itemsize)
        nbytes = np.where(strips == 1, vector, np.gcd(vector, strip * w.stride[1])) * self.itemsize
        totals = np.select(
            [nbytes[:, 0] == size for size in LOAD_BYTES], [count_wavefronts(address, size) for size in LOAD_BYTES]
        )
        return totals if np.ndim(self.strip) else totals[0]

    @property
    def estimated_cycles(self) -> Any:
        """Estimated latency in clock cycles: instructions, copies and memory, which overlap in part."""
        w, itemsize = self.w, self.itemsize
        ctas, tiles, warps = self.resident_ctas, self.tiles_per_sm, self.compute_threads // WARP_SIZE
        conversions = 1 if itemsize == 2 else 0
        elements = COPY_BYTES // itemsize
        is_whole = self.strips == 1
        vector = np.gcd(math.gcd(w.input_size[1], elements), np.where(is_whole, elements, self.strip * w.stride[1]))
        columns = (self.strip - 1) * w.stride[1] + (w.kernel[1] - 1) * w.dilation[1] + 1
        loads = ceil_div(self.strip * w.stride[1], vector) + 2
        stored_vector = np.gcd(math.gcd(w.output_size[1], elements), np.where(is_whole, elements, self.strip))
        stores = ceil_div(self.strip, stored_vector)
        taps = np.where(is_whole, 0.9, 1.0) * self.products  # whole rows have no products with zeros
        shared = self.num_lines * loads * self.load_wavefronts * warps
        shared = shared + np.where(self.is_staged, 2 * self.rows * stores * self.load_wavefronts * warps, 0)
        instructions = taps + self.num_lines * (loads + conversions * columns + 6)
        instructions = instructions + self.rows * (0.5 * conversions * self.strip + 3 * stores)
        issue = self.count_issue_cycles(instructions)
        copies = self.copy_bytes / L2_BYTES_PER_CLOCK
        # With one stage, a CTA waits for the next planes while the others compute.
        waits = np.maximum(0, COPY_LATENCY_CYCLES + copies - (ctas - 1) * issue)
        waits = np.where(self.stages <= 1, tiles / ctas * waits, 0)
        # Sectors that a warp stores at a time; those of a row that several stores touch count several times.
        sectors = np.minimum(WARP_SIZE, self.strip * itemsize + WARP_SIZE / self.strips)
        stored = self.rows * stores * sectors * warps / STORED_SECTORS_PER_CLOCK
        stored = np.where(self.is_staged, self.result_bytes / L2_BYTES_PER_CLOCK, stored)
        work = tiles * issue, tiles * shared, tiles * stored, tiles * copies, self.memory_cycles
        first = self.copy_bytes * ctas / L2_BYTES_PER_CLOCK  # before any thread can compute
        return overlap_cycles(OVERLAP, *work) + waits + first + START_CYCLES
