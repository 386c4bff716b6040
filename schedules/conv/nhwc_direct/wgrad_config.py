"""Configs of direct gradients of weights: the tiles of a thread, and an estimate of resources and of the latency.

A thread keeps the sums of a tile of the filter for a *unit* of channels, and walks over tiles of pixels of dY. The
threads of a CTA are arranged along units (x), tiles of the filter (y) and tiles of pixels (z). The pixels are divided
into parts, one for each CTA of the same channels and taps.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Any, ClassVar

import numpy as np

from tvmconv.arithmetic import ceil_div
from tvmconv.fitted_latency import H200_FIT
from tvmconv.target import (
    H200,
    LINE_BYTES,
    NUM_BANKS,
    REGISTERS_PER_MULTIPROCESSOR,
    SCHEDULERS,
    SECTOR_BYTES,
    WARP_SIZE,
)
from tvmconv.workloads.conv_gradient import WeightGradient
from tvmconv.workloads.dtypes import get_itemsize
from tvmconv.workloads.layout import CHANNELS_FIRST

from ..plane_shape import PlaneShape
from ..tile_config import TileConfig, combine_overlapping
from .strip_config import WORD_BYTES

REDUCTION_FLOATS = 6144  # of shared memory: sums of a CTA that are added at a time
SPARE_REGISTERS = 24  # for addresses and counters
RESIDENT_WARPS, RESIDENT_BLOCKS = 64, 32  # maxima of a multiprocessor
# Fitted to 1,178 configs of ten depthwise layers that were measured on an H100:
REDUCTION_CYCLES = 3500  # of the launch of the second kernel
WORKSPACE_BYTES_PER_CYCLE = 3700  # of the whole GPU
L2_BYTES_PER_CYCLE = 44  # bytes between one SM and the L2 cache
MEMORY_BYTES_PER_CYCLE = 1900  # bytes between the memory and the L2 cache
TILE_WAIT_CYCLES = 750  # wait of a thread for a tile of pixels in the L2 cache
ROW_WAIT_CYCLES = 90  # further wait for each row of X that is not loaded ahead
MEMORY_WAIT_CYCLES = 1200  # further wait for a tile that is in the memory
PREFETCH_WAIT_RATIO = 0.65  # wait for a tile that is loaded ahead, as a fraction of the wait for any other
MAX_CLUSTER = 8  # CTAs of a cluster on every GPU
CLUSTER_CYCLES = 1500  # of the sum over the CTAs of a cluster, approximately


@dataclasses.dataclass(frozen=True)
class WgradConfig(TileConfig):
    """One config, or many configs as columns; `declare_knobs` has the meaning of the knobs."""

    PARTS_CHOICES: ClassVar[tuple[int, ...]] = (
        *(1, 2, 3, 4, 6, 8, 11, 12, 16, 22, 24, 32, 33, 44, 48, 66, 88, 99, 132, 176, 198, 264, 396, 528),
    )
    DEFAULT_PARTS_CHOICES: ClassVar[tuple[int, ...]] = (1, 4, 8, 16, 33, 66, 132, 264, 528)

    w: WeightGradient
    vector: Any
    vector_in: Any
    threads_c: Any
    threads_taps: Any
    threads_pixels: Any
    taps_y: Any
    taps_x: Any
    pixels_y: Any
    pixels_x: Any
    prefetch_tile: Any
    parts: Any

    @property
    def shape(self) -> PlaneShape:
        """Sizes of the forward convolution over planes, rows and columns."""
        return PlaneShape.from_workload(self.w.forward)

    @property
    def is_depthwise(self) -> bool:
        """Whether each filter has one input channel."""
        return self.w.groups == self.w.C

    @property
    def inputs_per_group(self) -> int:
        """Channels of X of a group."""
        return self.w.C // self.w.groups

    @property
    def outputs_per_group(self) -> int:
        """Channels of dY of a group."""
        return self.w.O // self.w.groups

    @property
    def num_units(self) -> Any:
        """Number of units: a vector of channels of dY with a vector of channels of X."""
        return self.w.O // self.vector * (self.inputs_per_group // self.vector_in)

    @property
    def loaded_inputs(self) -> Any:
        """Channels of X that a thread loads at a time; those of a depthwise convolution may have several filters."""
        return np.maximum(1, self.vector // self.outputs_per_group) if self.is_depthwise else self.vector_in

    @property
    def sums_per_tap(self) -> Any:
        """Sums of a thread for each tap."""
        return self.vector * self.vector_in

    @property
    def num_sums(self) -> Any:
        """Sums of a thread."""
        return self.taps_y * self.taps_x * self.sums_per_tap

    @property
    def filter_tiles(self) -> tuple[int, Any, Any]:
        """Numbers of tiles of the filter along planes, rows and columns; tiles have one plane."""
        planes, rows, columns = self.shape.kernel_size
        return planes, ceil_div(rows, self.taps_y), ceil_div(columns, self.taps_x)

    @property
    def num_filter_tiles(self) -> Any:
        """Number of tiles of the filter."""
        return math.prod(self.filter_tiles)

    @property
    def pixel_tiles(self) -> tuple[Any, Any]:
        """Numbers of tiles of a plane of dY along rows and columns."""
        _, rows, columns = self.shape.output_size
        return ceil_div(rows, self.pixels_y), ceil_div(columns, self.pixels_x)

    @property
    def num_pixel_tiles(self) -> Any:
        """Number of tiles of pixels in the whole batch."""
        return self.shape.num_output_planes * math.prod(self.pixel_tiles)

    @property
    def iterations(self) -> Any:
        """Tiles of pixels of a thread."""
        return ceil_div(ceil_div(self.num_pixel_tiles, self.threads_pixels), self.parts)

    @property
    def num_parts(self) -> Any:
        """Parts of the pixels that are not empty."""
        return ceil_div(ceil_div(self.num_pixel_tiles, self.threads_pixels), self.iterations)

    @property
    def unit_blocks(self) -> Any:
        """CTAs along the units."""
        return ceil_div(self.num_units, self.threads_c)

    @property
    def filter_blocks(self) -> Any:
        """CTAs along the tiles of the filter."""
        return ceil_div(self.num_filter_tiles, self.threads_taps)

    @property
    def num_blocks(self) -> Any:
        """CTAs of the grid."""
        return self.num_parts * self.unit_blocks * self.filter_blocks

    @property
    def num_threads(self) -> Any:
        """Threads per CTA."""
        return self.threads_c * self.threads_taps * self.threads_pixels

    @property
    def sums_at_a_time(self) -> Any:
        """Sums of each thread that are in shared memory at a time."""
        return np.minimum(self.num_sums, np.maximum(1, REDUCTION_FLOATS // self.num_threads))

    @property
    def shared_bytes(self) -> Any:
        """Bytes of shared memory, in which the threads of a CTA add their sums."""
        return np.where(self.threads_pixels > 1, self.sums_at_a_time * self.sum_pitch * 4, 0)

    @property
    def dynamic_shared_bytes(self) -> Any:
        """Bytes of dynamic shared memory."""
        return np.zeros_like(self.num_threads)

    @property
    def sum_pitch(self) -> Any:
        """Elements from a sum of all threads to the next in shared memory.

        Threads that add up neighbouring sums for the same taps and channels then read different banks.
        """
        owners = self.threads_c * self.threads_taps
        return self.num_threads + np.where(owners < NUM_BANKS, owners, 0)

    @property
    def window(self) -> tuple[Any, Any]:
        """Rows and columns of X that a thread loads for a tile of pixels."""
        shape = self.shape
        rows = count_positions(self.pixels_y, self.taps_y, shape.strides[1], shape.dilations[1])
        columns = count_positions(self.pixels_x, self.taps_x, shape.strides[2], shape.dilations[2])
        return rows, np.where(self.has_known_columns, np.minimum(columns, shape.input_size[2]), columns)

    @property
    def has_known_columns(self) -> Any:
        """Whether a tile covers whole rows of dY and of the filter, so that columns of X are known to the compiler."""
        has_inside_taps = self.shape.count_inside_taps(2) > 0
        return has_inside_taps & (self.pixel_tiles[1] == 1) & (self.filter_tiles[2] == 1)

    @property
    def num_products(self) -> Any:
        """Multiplications of a thread for a tile of pixels, without those known to be outside of the image."""
        inside = self.shape.count_inside_taps(2) / self.shape.kernel_size[2]
        return self.pixels_y * self.pixels_x * self.num_sums * np.where(self.has_known_columns, inside, 1)

    @property
    def live_registers(self) -> Any:
        """Estimated registers per thread for sums, a tile of dY, a row of X, and what is loaded of the next tile."""
        words_per_element, (rows, columns) = get_itemsize(self.w.storage) / WORD_BYTES, self.window
        gradient, inputs = self.pixels_y * self.pixels_x * self.vector, columns * self.loaded_inputs
        loaded = self.prefetch_tile * (gradient + rows * inputs) * words_per_element
        return self.num_sums + gradient + inputs * words_per_element + loaded + SPARE_REGISTERS

    @property
    def issued_instructions(self) -> Any:
        """Estimated instructions of a thread for a tile of pixels."""
        rows, columns = self.window
        pixels, inputs = self.pixels_y * self.pixels_x, rows * columns
        converted = pixels * self.vector + inputs * self.loaded_inputs
        is_16_bit = get_itemsize(self.w.storage) < WORD_BYTES
        return self.num_products + is_16_bit * converted + 4 * (inputs + pixels) + 20

    @property
    def estimated_cycles(self) -> Any:
        """Estimated latency in clock cycles of both kernels, by the terms of `StripConfig.estimated_cycles`."""
        shape, fit = self.shape, H200_FIT.strips
        blocks_per_sm = ceil_div(self.num_blocks, H200.multiprocessors)
        warps_per_block = ceil_div(self.num_threads, WARP_SIZE)
        warps = warps_per_block * blocks_per_sm
        # A tile whose only row of X is outside of the image is skipped, unless it was loaded before.
        inside_rows = shape.count_inside_taps(1) / shape.kernel_size[1]
        is_skipped = (self.pixels_y == 1) & (self.taps_y == 1) & (self.prefetch_tile == 0)
        inside = np.where(is_skipped, inside_rows, 1)
        instructions = (
            inside * self.iterations * self.issued_instructions + 4 * self.num_sums + fit.overhead_instructions
        )
        issue_cycles = instructions * np.maximum(1, warps / SCHEDULERS)
        read_cycles = warps * self.iterations * self._count_tile_read_cycles(inside)
        registers_per_warp = (WARP_SIZE * np.maximum(self.live_registers, 32)).astype(int)
        resident_warps = np.minimum(RESIDENT_WARPS, REGISTERS_PER_MULTIPROCESSOR // registers_per_warp)
        waves = ceil_div(blocks_per_sm, np.clip(resident_warps // warps_per_block, 1, RESIDENT_BLOCKS))
        # A tile waits for dY and X, which the first tile of the filter brings to the L2 cache.
        tile_wait_cycles = TILE_WAIT_CYCLES + MEMORY_WAIT_CYCLES / self.num_filter_tiles
        wait_cycles = np.where(
            self.prefetch_tile == 1,
            PREFETCH_WAIT_RATIO * tile_wait_cycles,
            tile_wait_cycles + ROW_WAIT_CYCLES * inside * self.window[0],
        )
        l2_cycles = blocks_per_sm * self.iterations * self._tile_bytes / L2_BYTES_PER_CYCLE
        memory_cycles = self._argument_bytes / MEMORY_BYTES_PER_CYCLE
        cycles = combine_overlapping(
            issue_cycles, read_cycles, l2_cycles, memory_cycles, waves * self.iterations * wait_cycles
        )
        return cycles + self.reduction_cycles

    @property
    def reduction_cycles(self) -> Any:
        """Estimated clock cycles of the sum over the parts."""
        sums = self.num_parts * self.num_units * self.sums_per_tap * self.shape.num_taps
        return (self.num_parts > 1) * (REDUCTION_CYCLES + 8 * sums / WORKSPACE_BYTES_PER_CYCLE)

    def _count_tile_read_cycles(self, inside: Any) -> Any:
        """Return the clock cycles in which the L1 cache serves the loads of a warp for a tile, of whose rows of X a
        share is inside of the image.
        """
        itemsize, shape = get_itemsize(self.w.storage), self.shape
        rows, columns = self.window
        lines_of_gradient, lines_of_inputs = (
            count_l1_lines(self.threads_c, vector * itemsize, H200_FIT.strips.l1_lines_per_cycle)
            for vector in (self.vector, self.loaded_inputs)
        )
        if self.w.layout == CHANNELS_FIRST:  # the lanes of a warp read columns of a row
            lines_of_gradient = np.maximum(1, self.pixels_x * itemsize * WARP_SIZE / LINE_BYTES)
            lines_of_inputs = np.maximum(1, self.pixels_x * shape.strides[2] * itemsize * WARP_SIZE / LINE_BYTES)
        return self.pixels_y * self.pixels_x * lines_of_gradient + inside * rows * columns * lines_of_inputs

    @property
    def _argument_bytes(self) -> int:
        """Bytes of dY and X."""
        return sum(map(math.prod, self.w.argument_shapes[:2])) * get_itemsize(self.w.storage)

    @property
    def _tile_bytes(self) -> Any:
        """Bytes of dY and X that a CTA transfers for its tiles of an iteration."""
        itemsize, shape = get_itemsize(self.w.storage), self.shape
        # Tiles of a CTA are neighbours along the columns, then along the rows.
        tiles_x = np.minimum(self.threads_pixels, self.pixel_tiles[1])
        sizes = ceil_div(self.threads_pixels, tiles_x) * self.pixels_y, tiles_x * self.pixels_x
        axes = zip(sizes, shape.strides[1:], shape.window_extent[1:], strict=True)
        inputs = math.prod((size - 1) * stride + extent for size, stride, extent in axes)
        gradient_bytes, input_bytes = (
            np.maximum(SECTOR_BYTES, self.threads_c * vector * itemsize) for vector in (self.vector, self.loaded_inputs)
        )
        if self.w.layout == CHANNELS_FIRST:
            gradient_bytes = input_bytes = itemsize
        return math.prod(sizes) * gradient_bytes + inputs * input_bytes


@dataclasses.dataclass(frozen=True)
class ClusterWgradConfig(WgradConfig):
    """One config, or many configs as columns, of kernels whose parts are the CTAs of a cluster."""

    PARTS_CHOICES = DEFAULT_PARTS_CHOICES = tuple(range(2, MAX_CLUSTER + 1))

    @property
    def sums_per_cta(self) -> Any:
        """Sums of a CTA over its threads."""
        return self.num_sums * self.threads_taps * self.threads_c

    @property
    def sums_per_rank(self) -> Any:
        """Sums that each CTA of a cluster adds up over all of them."""
        return ceil_div(self.sums_per_cta, self.num_parts)

    @property
    def dynamic_shared_bytes(self) -> Any:
        """Bytes of dynamic shared memory, in which CTAs add their sums."""
        return 4 * self.num_parts * self.sums_per_rank

    @property
    def reduction_cycles(self) -> Any:
        """Estimated clock cycles of the sum over the parts."""
        return CLUSTER_CYCLES


def count_positions(num_pixels: Any, num_taps: Any, stride: int, dilation: int) -> Any:
    """Return the number of distinct positions of X that pixels read below taps; both numbers may be columns."""
    sizes = int(np.max(num_pixels, initial=0)) + 1, int(np.max(num_taps, initial=0)) + 1
    return _make_position_table(*sizes, stride, dilation)[num_pixels, num_taps]


@functools.lru_cache(maxsize=256)
def _make_position_table(num_rows: int, num_columns: int, stride: int, dilation: int) -> np.ndarray:
    """Return the numbers of positions for all pixels below `num_rows` and all taps below `num_columns`."""
    sizes = itertools.product(range(num_rows), range(num_columns))
    counts = [len(list_positions(pixels, taps, stride, dilation)) for pixels, taps in sizes]
    return np.array(counts, int).reshape(num_rows, num_columns)


def list_positions(num_pixels: int, num_taps: int, stride: int, dilation: int) -> list[int]:
    """Return the positions of X that pixels read below taps, from the first one on."""
    return sorted({i * stride + r * dilation for i in range(num_pixels) for r in range(num_taps)})


def count_l1_lines(threads_c: Any, vector_bytes: Any, lines_per_cycle: float) -> Any:
    """Return the clock cycles in which the L1 cache serves a load of a warp."""
    wavefronts = np.maximum(1, vector_bytes * WARP_SIZE / LINE_BYTES)
    return np.maximum(wavefronts, WARP_SIZE / np.minimum(WARP_SIZE, threads_c) / lines_per_cycle)
