"""Knobs of `winograd_fused`: choices, constraints and resource usage, for one config or as columns for many."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tvmconv.arithmetic import ceil_div, round_up
from tvmconv.fitted_latency import H200_FIT
from tvmconv.space import Columns, Knobs
from tvmconv.space.search_space import ResourceUsage
from tvmconv.target import MAX_THREADS_PER_BLOCK, REGISTERS_PER_MULTIPROCESSOR, WARP_SIZE
from tvmconv.workloads import Conv2d
from tvmconv.workloads.dtypes import ACCUMULATOR, DTYPES

from ..direct_config import ACCUMULATOR_BYTES, MAX_ACCUMULATORS, MAX_PRODUCTS, MIN_THREADS, VECTOR_ELEMENTS
from ..tile_config import Rule, TileConfig, add_rules
from .knobs import WinogradTileGrid, list_output_tile_sizes, select_default_output_tile

SIZE_CHOICES = (1, 2, 4, 8, 16)
BLOCK_K_CHOICES = (1, 2, 4, 8)
POINTS_PER_THREAD_CHOICES = (1, 2, 3, 4, 6, 7, 8, 9)  # divisors of α² for some m and R
DEFAULT_THREADS_Y = 4
OVERHEAD_REGISTERS = 48  # minimum number of registers per thread besides the accumulators: those of a transform


@dataclasses.dataclass(frozen=True)
class WinogradTileConfig(TileConfig):
    """Tile of a block."""

    w: Conv2d
    grid: WinogradTileGrid
    points_per_thread: Any  # points, of the α² of a tile, per thread
    threads_y: Any  # threads along the output channels
    local_y: Any  # output channels per thread
    threads_x: Any  # threads along the output tiles
    local_x: Any  # output tiles per thread
    block_k: Any  # input channels between two barriers
    # Channels per thread whose products are in shared memory at a time in the output transform.
    channels_per_exchange: Any

    @property
    def num_points(self) -> Any:
        """Points of an input tile, α²."""
        return self.grid.alpha**2

    @property
    def num_threads(self) -> Any:
        """Threads per block."""
        return self.num_points // self.points_per_thread * self.threads_y * self.threads_x

    @property
    def block_channels(self) -> Any:
        """Output channels per block."""
        return self.threads_y * self.local_y

    @property
    def block_tiles(self) -> Any:
        """Output tiles per block."""
        return self.threads_x * self.local_x

    @property
    def grid_shape(self) -> tuple[Any, Any]:
        """Blocks along the output channels and along the output tiles."""
        return ceil_div(self.w.O, self.block_channels), ceil_div(self.grid.count, self.block_tiles)

    @property
    def num_accumulators(self) -> Any:
        """Accumulators per thread."""
        return self.points_per_thread * self.local_y * self.local_x

    @property
    def padded_channels(self) -> Any:
        """Input channels, rounded up to whole k-tiles."""
        return round_up(self.w.C, self.block_k)

    @property
    def padded_output_channels(self) -> Any:
        """Output channels, rounded up to whole blocks."""
        return round_up(self.w.O, self.block_channels)

    @property
    def num_filters(self) -> Any:
        """Filters of one input channel each, with the padding of both axes."""
        return self.padded_channels * self.padded_output_channels

    @property
    def exchanged_channels(self) -> Any:
        """Output channels whose products are in shared memory at a time."""
        return self.threads_y * self.channels_per_exchange

    @property
    def vector_elements(self) -> int:
        """Neighbouring channels that a thread copies at once."""
        return VECTOR_ELEMENTS if self.block_channels % VECTOR_ELEMENTS == 0 else 1

    @property
    def shared_bytes(self) -> Any:
        """Shared memory per block in bytes: operands of a k-tile, whose memory the products reuse at the end."""
        staged_rows = self.block_k * (self.block_channels + self.block_tiles)
        exchanged_rows = self.exchanged_channels * self.block_tiles
        return ACCUMULATOR_BYTES * self.num_points * np.maximum(staged_rows, exchanged_rows)


def declare_knobs(w: Conv2d, k: Knobs) -> WinogradTileConfig:
    """Declare the knobs and return their values."""
    m = k.choice("output_tile", list_output_tile_sizes(w), select_default_output_tile(w))
    alpha = m + w.R - 1
    points_choices = [
        n for n in POINTS_PER_THREAD_CHOICES if alpha**2 % n == 0 and alpha**2 // n * 16 <= MAX_THREADS_PER_BLOCK
    ]
    k.choice("points_per_thread", POINTS_PER_THREAD_CHOICES, points_choices[0])
    k.choice("threads_y", SIZE_CHOICES, DEFAULT_THREADS_Y)
    k.choice("local_y", SIZE_CHOICES, select_default_local_y(w))
    k.choice("threads_x", SIZE_CHOICES, 4)
    k.choice("local_x", SIZE_CHOICES, 4 if alpha <= 6 else 2)
    k.choice("block_k", BLOCK_K_CHOICES, 4 if alpha <= 6 else 2)
    k.choice("channels_per_exchange", SIZE_CHOICES[:-1], 1)

    required: list[Rule] = [
        ("threads divide the points evenly", lambda t: t.num_points % t.points_per_thread == 0),
        ("exchanges divide a thread's channels evenly", lambda t: t.local_y % t.channels_per_exchange == 0),
    ]
    pruned: list[Rule] = [
        (f"at most {MAX_ACCUMULATORS} accumulators per thread", lambda t: t.num_accumulators <= MAX_ACCUMULATORS),
        (f"at least {2 * MIN_THREADS} threads", lambda t: t.num_threads >= 2 * MIN_THREADS),
        (
            "the registers of all threads fit",
            lambda t: (
                (t.num_accumulators + OVERHEAD_REGISTERS) * round_up(t.num_threads, WARP_SIZE)
                <= REGISTERS_PER_MULTIPROCESSOR
            ),
        ),
        (
            f"at most {MAX_PRODUCTS} unrolled products per thread and k-tile",
            lambda t: t.num_accumulators * t.block_k <= MAX_PRODUCTS,
        ),
        (
            "tiles are less than twice as large as the product",
            lambda t: (t.block_channels < 2 * w.O) & (t.block_tiles < 2 * t.grid.count),
        ),
    ]
    add_rules(k, lambda columns: make_config(w, columns), required, pruned)
    return make_config(w, k.values)


def select_default_local_y(w: Conv2d) -> int:
    """Return the default number of output channels per thread."""
    return 8 if w.O >= 32 else 4


def estimate_seconds(w: Conv2d) -> float:
    """Return the estimated seconds of a good config on an H200, by the sum of its arithmetic, bytes and launches.

    The coefficients are those of `winograd`, as the float32 arithmetic and the filter transform are the same. The
    arithmetic is that of the products, and 2·α³ multiply-adds for each transform of an input tile of one channel, which
    the blocks of other output channels repeat. The bytes are those of X, K and Y, and those of the transformed filters,
    which are written and read. Only one layer of `winograd_fused` is among the logged measurements, so the error is not
    known: the layer of the example took 5.7 µs, and its estimate is 6.8 µs.

    Example:
        >>> from tvmconv import parse
        >>> round(estimate_seconds(parse("conv2d:1x16x55x55,64x16x3x3,s1,p1")) * 1e6, 1)
        6.8
    """
    grid, fit = WinogradTileGrid.from_workload(w, select_default_output_tile(w)), H200_FIT.winograd
    num_products = grid.alpha**2 * grid.count * w.C * w.O
    num_channel_blocks = ceil_div(w.O, DEFAULT_THREADS_Y * select_default_local_y(w))
    num_transform_fmas = 2 * grid.alpha**3 * grid.count * w.C * num_channel_blocks
    num_bytes = 2 * DTYPES[ACCUMULATOR].itemsize * grid.alpha**2 * w.C * w.O + w.min_bytes
    num_fmas = num_products + num_transform_fmas
    return float(1e-6 * (num_fmas / fit.fma_per_us + num_bytes / fit.bytes_per_us + fit.launch_us))


def make_config(w: Conv2d, columns: Columns) -> WinogradTileConfig:
    """Return the config of the knobs' values, or the configs of many."""
    grid = WinogradTileGrid.from_workload(w, columns["output_tile"])
    return WinogradTileConfig.from_columns(columns, w=w, grid=grid)


def compute_usage(w: Conv2d, columns: Columns) -> ResourceUsage:
    """Return the resources that configs use, without those of the filter transform."""
    config = make_config(w, columns)
    channel_blocks, tile_blocks = config.grid_shape
    k_tiles = config.padded_channels // config.block_k
    staged_elements = config.block_k * (config.block_channels + config.block_tiles)
    macs_per_k_tile = config.block_k * config.block_channels * config.block_tiles
    return ResourceUsage(
        threads=config.num_threads,
        shared_bytes=config.shared_bytes,
        accumulators=config.num_accumulators,
        blocks=channel_blocks * tile_blocks,
        steps=k_tiles,
        products=config.num_points * macs_per_k_tile // config.num_threads,
        intensity=macs_per_k_tile / staged_elements,
        traffic=channel_blocks * tile_blocks * k_tiles * config.num_points * staged_elements,
        all_threads=channel_blocks * tile_blocks * config.num_threads,
    )
