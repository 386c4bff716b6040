"""Knobs, constraints, resource usage and defaults of the schedule `tensor_core`.

A `TensorizedTileConfig` holds one config as numbers or many configs as columns, as `direct_config` does.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from tvmconv.arithmetic import ceil_div, round_up
from tvmconv.space import Columns, Knobs
from tvmconv.space.search_space import ResourceUsage
from tvmconv.target import NUM_BANKS, PORTABLE_SHARED_BYTES, REGISTERS_PER_MULTIPROCESSOR, WARP_SIZE
from tvmconv.workloads import Conv
from tvmconv.workloads.dtypes import get_itemsize
from tvmconv.workloads.layout import CHANNELS_LAST

from ..direct_config import ACCUMULATOR_BYTES, MAX_SPLIT_K_BLOCKS, SPLIT_K_CHOICES
from ..tile_config import Rule, TileConfig, add_rules, declare_choices
from .tensor_intrinsics import MMA_K_BYTES, TILE_SIZE

COPY_BYTES = 16  # bytes of one cp.async
# Offset in words of a row of accumulators from a multiple of all banks, so that stores of pairs have no conflicts.
ACCUMULATOR_ROW_PADDING_WORDS = 8

BLOCK_SIZES = (16, 32, 64, 128, 256)  # pixels or channels of a block's tile
WARPS_CHOICES = (1, 2, 4, 8)
STAGES_CHOICES = (2, 3, 4, 5, 6)
NO_PREFETCH, PREFETCH = 0, 1

MAX_ACCUMULATORS = 128
OVERHEAD_REGISTERS = 40  # minimum number of registers per thread besides the accumulators
MIN_THREADS = 64

# Default tiles, the largest first: pixels, channels, warps along each. The first one with enough blocks to occupy a GPU
# is the default; if none has enough, the third one is, with a split reduction.
DEFAULT_TILES = ((128, 128, 2, 4), (128, 64, 2, 2), (64, 64, 2, 2), (64, 32, 2, 2), (32, 32, 2, 2))
SPLIT_TILE = DEFAULT_TILES[2]
MIN_BLOCKS = 96


def is_channels_last(w: Conv) -> bool:
    """Return whether channels of X and K are last; the output channels are then the columns of the product."""
    return w.input_layout == CHANNELS_LAST


def can_copy_16_bytes(w: Conv) -> bool:
    """Return whether 16 bytes of an operand are neighbouring input channels of one tap."""
    return is_channels_last(w) and w.C // w.groups * get_itemsize(w.storage) % COPY_BYTES == 0


def get_reduction_extents(w: Conv) -> tuple[int, int]:
    """Return the extents of the two reduction axes: (taps, channels), or (1, taps × channels) if they form one axis."""
    taps, channels = math.prod(w.kernel), w.C // w.groups
    return (taps, channels) if can_copy_16_bytes(w) else (1, taps * channels)


@dataclasses.dataclass(frozen=True)
class TensorizedTileConfig(TileConfig):
    """One config, or many configs as columns."""

    block_m: Any  # pixels per block
    block_n: Any  # output channels per block
    block_k: Any  # input channels per k-tile; elements of the joint axis if taps and channels form one axis
    warps_m: Any  # warps along the pixels
    warps_n: Any  # warps along the output channels
    stages: Any  # number of pipeline stages in shared memory
    fragment_prefetch: Any  # when registers are loaded: just before the product (0) or one slice earlier (1)
    split_k: Any  # number of blocks that share the reduction of a tile

    @property
    def warps(self) -> Any:
        """Warps per block."""
        return self.warps_m * self.warps_n

    @property
    def num_accumulators(self) -> Any:
        """Accumulator registers per thread."""
        return self.block_m * self.block_n // (self.warps * WARP_SIZE)

    def rows_and_columns(self, w: Conv) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
        """Return the rows and the columns of a block's tile, each with the number of warps along them."""
        pixels, channels = (self.block_m, self.warps_m), (self.block_n, self.warps_n)
        return (pixels, channels) if is_channels_last(w) else (channels, pixels)

    def k_tiles_per_block(self, w: Conv) -> Any:
        """Return the number of k-tiles per block."""
        taps, num_channels = get_reduction_extents(w)
        return taps * ceil_div(num_channels, self.block_k * self.split_k)

    def dynamic_smem_bytes(self, w: Conv) -> Any:
        """Return the shared memory per block in bytes: the stages, whose memory the accumulators reuse at the end."""
        itemsize = get_itemsize(w.storage)
        row_bytes = self.block_k * itemsize + COPY_BYTES
        operand_bytes = [self.stages * size * row_bytes for size in (self.block_m, self.block_n)]
        (rows, _), (columns, _) = self.rows_and_columns(w)
        accumulator_bytes = ACCUMULATOR_BYTES * rows * (columns + (ACCUMULATOR_ROW_PADDING_WORDS - columns) % NUM_BANKS)
        if itemsize < ACCUMULATOR_BYTES:
            return np.maximum(sum(operand_bytes), accumulator_bytes)
        # TVM's StorageRewrite lets accumulators of the operands' own dtype reuse the memory of one operand, the larger
        # one, which grows if necessary.
        return np.minimum(*operand_bytes) + np.maximum(np.maximum(*operand_bytes), accumulator_bytes)


def declare_knobs(k: Knobs, w: Conv) -> TensorizedTileConfig:
    """Declare the knobs, with defaults that fit the workload, and return their values."""
    options = {
        "block_m": BLOCK_SIZES,
        "block_n": BLOCK_SIZES,
        "block_k": tuple(MMA_K_BYTES // get_itemsize(w.storage) * pieces for pieces in (1, 2, 4, 8)),
        "warps_m": WARPS_CHOICES,
        "warps_n": WARPS_CHOICES,
        "stages": STAGES_CHOICES,
        "fragment_prefetch": (NO_PREFETCH, PREFETCH),
        "split_k": SPLIT_K_CHOICES,
    }
    config = TensorizedTileConfig(**declare_choices(k, options, select_default_config(w)))
    _, extent = get_reduction_extents(w)
    max_extent = max(2 * extent - 1, options["block_k"][0])  # one k-tile covers a short reduction
    required: list[Rule] = [
        (
            "warps have whole tiles of 16 pixels and 16 channels",
            lambda t: (t.block_m % (TILE_SIZE * t.warps_m) == 0) & (t.block_n % (TILE_SIZE * t.warps_n) == 0),
        ),
        (
            "fragments are loaded ahead only with two slices per k-tile, three stages and enough k-tiles",
            lambda t: (t.fragment_prefetch == NO_PREFETCH) | can_prefetch_fragments(w, t),
        ),
    ]
    pruned: list[Rule] = [
        ("a k-tile is not mostly padding", lambda t: t.block_k * t.split_k <= max_extent),
        (
            "a reduction is split only if blocks are few",
            lambda t: (t.split_k == 1) | (count_tiles(w, t) <= MAX_SPLIT_K_BLOCKS),
        ),
        (
            "at most as many stages as k-tiles",
            lambda t: t.stages <= np.maximum(t.k_tiles_per_block(w), STAGES_CHOICES[0]),
        ),
        (f"at most {MAX_ACCUMULATORS} accumulators per thread", lambda t: t.num_accumulators <= MAX_ACCUMULATORS),
        (f"at least {MIN_THREADS} threads", lambda t: t.warps * WARP_SIZE >= MIN_THREADS),
        (
            "the registers of all threads fit",
            lambda t: (t.num_accumulators + OVERHEAD_REGISTERS) * t.warps * WARP_SIZE <= REGISTERS_PER_MULTIPROCESSOR,
        ),
    ]
    add_rules(k, TensorizedTileConfig.from_columns, required, pruned)
    return config


def can_prefetch_fragments(w: Conv, config: TensorizedTileConfig) -> Any:
    """Return whether registers can be loaded a slice ahead, which TVM's pipeline needs enough k-tiles for."""
    mma_k_per_k_tile = config.block_k * get_itemsize(w.storage) // MMA_K_BYTES
    return (mma_k_per_k_tile >= 2) & (config.stages >= 3) & (config.k_tiles_per_block(w) >= config.stages - 1)


def count_tiles(w: Conv, config: TensorizedTileConfig) -> Any:
    """Return the number of output tiles of all groups."""
    pixels, channels = w.N * math.prod(w.output_size), w.O // w.groups
    return w.groups * ceil_div(pixels, config.block_m) * ceil_div(channels, config.block_n)


def compute_usage(w: Conv, columns: Columns) -> ResourceUsage:
    """Return the resources that configs use."""
    config = TensorizedTileConfig.from_columns(columns)
    num_blocks, k_tiles = config.split_k * count_tiles(w, config), config.k_tiles_per_block(w)
    staged_elements = (config.block_m + config.block_n) * config.block_k
    macs_per_k_tile = config.block_m * config.block_n * config.block_k
    return ResourceUsage(
        threads=config.warps * WARP_SIZE,
        shared_bytes=0 * config.warps,
        accumulators=config.num_accumulators,
        blocks=num_blocks,
        dynamic_shared_bytes=config.dynamic_smem_bytes(w),
        steps=k_tiles,
        products=macs_per_k_tile // (config.warps * WARP_SIZE),
        intensity=macs_per_k_tile / staged_elements,
        traffic=num_blocks * k_tiles * staged_elements,
        all_threads=num_blocks * config.warps * WARP_SIZE,
    )


def select_default_config(w: Conv) -> TensorizedTileConfig:
    """Return a config that fits the shape and the shared memory of every architecture."""
    pixels, channels = w.N * math.prod(w.output_size), w.O // w.groups
    _, extent = get_reduction_extents(w)
    mma_k = MMA_K_BYTES // get_itemsize(w.storage)

    def make_config(tile: tuple[int, int, int, int]) -> TensorizedTileConfig:
        block_m, warps_m = shrink_tile_side(pixels, tile[0], tile[2])
        block_n, warps_n = shrink_tile_side(channels, tile[1], tile[3])
        block_k_multiples = (2, 1) if block_m * block_n > SPLIT_TILE[0] * SPLIT_TILE[1] else (4, 2, 1)
        block_k = min((mma_k * n for n in block_k_multiples), key=lambda n: round_up(extent, n))  # the least padding
        return TensorizedTileConfig(block_m, block_n, block_k, warps_m, warps_n, 4, NO_PREFETCH, 1)

    candidates = [make_config(tile) for tile in DEFAULT_TILES]
    selected = next((candidate for candidate in candidates if count_tiles(w, candidate) >= MIN_BLOCKS), None)
    if selected is None:
        selected = make_config(SPLIT_TILE)
        split_k_candidates = (
            n
            for n in SPLIT_K_CHOICES
            if n * count_tiles(w, selected) >= MIN_BLOCKS or 2 * n * selected.block_k > extent
        )
        selected = dataclasses.replace(selected, split_k=next(split_k_candidates, SPLIT_K_CHOICES[-1]))
    for stages in (4, 3, 2):
        selected = dataclasses.replace(selected, stages=stages)
        if stages <= selected.k_tiles_per_block(w) and selected.dynamic_smem_bytes(w) <= PORTABLE_SHARED_BYTES:
            break
    return dataclasses.replace(
        selected, fragment_prefetch=PREFETCH if can_prefetch_fragments(w, selected) else NO_PREFETCH
    )


def shrink_tile_side(extent: int, size: int, warps: int) -> tuple[int, int]:
    """Return a side of a tile and the warps along it, halved as long as half of the side covers the extent."""
    while size > TILE_SIZE and size // 2 >= extent:
        size, warps = size // 2, max(warps // 2, 1) if size // 2 < TILE_SIZE * warps else warps
    return size, warps
