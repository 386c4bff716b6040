"""Knobs of `winograd`: choices, constraints, resource usage and defaults.

Source of the knobs tile_b, tile_y, tile_x, tile_rc, auto_unroll_max_step and unroll_explicit: TVM 0.7 to 0.19,
`topi/cuda/conv2d_winograd.py`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import numpy as np

from tvmconv.arithmetic import ceil_div
from tvmconv.fitted_latency import H200_FIT
from tvmconv.space import Columns, Knobs, Tile
from tvmconv.space.search_space import ResourceUsage
from tvmconv.workloads import Conv2d
from tvmconv.workloads.dtypes import ACCUMULATOR, DTYPES
from tvmconv.workloads.text import MAX_INT32_ELEMENTS

from ..direct_config import (
    OUTPUT_LEVELS,
    PIPELINE_COPIES,
    REDUCTION_LEVELS,
    SLICED_K_CHOICES,
    VECTOR_ELEMENTS,
    DirectTileConfig,
)
from .cook_toom import compute_error_growth, make_winograd_matrices

OUTPUT_TILE_SIZES = (2, 4, 6)
POINT_LEVELS = ("block", "vthread", "thread", "local")  # of the α² points of a tile, all of which are blocks
UNROLL_CHOICES = (0, 128, 1500)  # statements
COPY_ORDERS = ("coalesced", "vectorized", "contiguous")
MAX_OVERHANG_FRACTION, MAX_FEW_TILES, MAX_OVERHANG_FRACTION_OF_FEW_TILES = 0.15, 1024, 0.35
MAX_PADDING_FRACTION = 0.25  # maximum fraction of tiles and channels that are added so that blocks are whole
MIN_SAVED_FLOPS_PER_BYTE = 10  # GPUs do 10 to 40 operations in the time of moving one byte
MIN_FLOPS = 1e8  # the additional launches take a small part of the time of such workloads
ERROR_MARGIN = 1.15  # minimum ratio of the tolerance to the expected error


class WinogradTileGrid(NamedTuple):
    """Grid of output tiles, for one config or as columns for many."""

    m: Any  # outputs of a tile along each axis
    alpha: Any  # inputs of a tile along each axis
    rows: Any  # tiles per image column
    columns: Any  # tiles per image row
    count: Any  # tiles of the whole batch

    @classmethod
    def from_workload(cls, w: Conv2d, m: Any) -> WinogradTileGrid:
        """Return the grid of tiles of m × m outputs."""
        num_rows, num_columns = ceil_div(w.P, m), ceil_div(w.Q, m)
        return cls(m, m + w.R - 1, num_rows, num_columns, w.N * num_rows * num_columns)

    def tile_origin(self, tile_idx: Any) -> tuple[Any, Any, Any]:
        """Return the image of a tile, and the first row and column of its outputs."""
        tiles_per_image = self.rows * self.columns
        row = tile_idx % tiles_per_image // self.columns
        return tile_idx // tiles_per_image, row * self.m, tile_idx % self.columns * self.m


def is_supported(w: Conv2d) -> bool:
    """Whether the filter is square, with 3 to 7 taps and stride 1, and some tile size is accurate enough."""
    is_plain = w.groups == 1 and set(w.stride) == {1} and set(w.dilation) == {1}
    return is_plain and w.R == w.S and 3 <= w.R <= 7 and bool(list_output_tile_sizes(w))


def is_promising(w: Conv2d) -> bool:
    """Return whether the saved arithmetic outweighs the bytes of the transformed operands and the additional launches.

    Each tile saves 2·(m²·R² - α²)·C·O operations. The 4·α²·(C + O) bytes of its transformed inputs and of its products
    are written and read.
    """
    m = select_default_output_tile(w)
    alpha = m + w.R - 1
    saved_flops, moved_bytes = 2 * (m * m * w.R * w.S - alpha**2) * w.C * w.O, 8 * alpha**2 * (w.C + w.O)
    return w.dtype == ACCUMULATOR and saved_flops >= MIN_SAVED_FLOPS_PER_BYTE * moved_bytes and w.flops >= MIN_FLOPS


def list_output_tile_sizes(w: Conv2d) -> tuple[int, ...]:
    """Return the options for outputs per tile and axis whose error is within the tolerance of float32.

    The transformed inputs and products must also have 32-bit indices, including the padding of whole blocks.
    """
    return tuple(
        m
        for m in OUTPUT_TILE_SIZES
        if estimate_relative_error(m, w.R, w.C) * ERROR_MARGIN <= DTYPES[ACCUMULATOR].tolerance
        and (m + w.R - 1) ** 2 * max(w.C, w.O) * (1 + MAX_PADDING_FRACTION) * WinogradTileGrid.from_workload(w, m).count
        <= MAX_INT32_ELEMENTS
    )


def estimate_relative_error(m: int, r: int, num_channels: int) -> float:
    """Return the expected relative L2 error of F(m × m, r × r) in float32, on random inputs and weights.

    Rounding errors of the products grow along each axis (`compute_error_growth`). The sum over the channels adds a term
    to the roundoff of 2^-24 that grows with the root of their number. Both constants were fitted to emulations with 16
    to 1,280 channels, m of 2, 4 and 6 and r of 3 to 7, which they predict within 5 %.
    """
    return float(2.0**-24 * compute_error_growth(make_winograd_matrices(m, r)) * math.sqrt(1.6 + 0.09 * num_channels))


def estimate_seconds(w: Conv2d) -> float:
    """Return the estimated seconds of the fastest config on an H200, by the sum of its products, bytes and launches.

    The bytes are those of X, K, Y and of the transformed inputs, filters and products, each written and read once.

    Args:
        w: Workload that the schedule supports.

    Example:
        >>> from tvmconv import parse
        >>> round(estimate_seconds(parse("conv2d:32x64x56x56,64x64x3x3,s1,p1")) * 1e6)
        74
    """
    grid, fit = WinogradTileGrid.from_workload(w, select_default_output_tile(w)), H200_FIT.winograd
    num_points = grid.alpha**2
    num_products = num_points * grid.count * w.C * w.O
    num_values = num_points * (grid.count * (w.C + w.O) + w.C * w.O)
    num_bytes = 2 * DTYPES[ACCUMULATOR].itemsize * num_values + w.min_bytes
    return 1e-6 * (num_products / fit.fma_per_us + num_bytes / fit.bytes_per_us + fit.launch_us)


def select_default_output_tile(w: Conv2d) -> int:
    """Return AutoTVM's choice, which depends on the height alone, or a smaller tile if its error is too large."""
    autotvm_size = 4 if w.H % 8 == 0 else 2
    sizes = list_output_tile_sizes(w)
    return max((m for m in sizes if m <= autotvm_size), default=min(sizes))


def make_product_workload(w: Conv2d) -> Conv2d:
    """Return the workload in the dtype of the product, whose operands are always float32."""
    return dataclasses.replace(w, dtype=ACCUMULATOR)


def declare_knobs(k: Knobs, w: Conv2d) -> tuple[WinogradTileGrid, DirectTileConfig]:
    """Declare the knobs, and return the grid of output tiles and the config of the product."""
    m = k.choice("output_tile", list_output_tile_sizes(w), select_default_output_tile(w))
    grid = WinogradTileGrid.from_workload(w, m)
    k.tile("tile_b", grid.alpha**2, POINT_LEVELS)
    max_overhang_fraction = MAX_OVERHANG_FRACTION_OF_FEW_TILES if grid.count <= MAX_FEW_TILES else MAX_OVERHANG_FRACTION
    k.tile("tile_y", w.O, OUTPUT_LEVELS, {"thread": 8, "local": 8}, overhang=MAX_OVERHANG_FRACTION)
    default_tiles = {"vthread": 2, "thread": 16, "local": 4}
    k.tile("tile_x", grid.count, OUTPUT_LEVELS, default_tiles, overhang=max_overhang_fraction)
    k.tile("tile_rc", w.C, REDUCTION_LEVELS, {"tap": 8}, exact=True)
    k.choice("auto_unroll_max_step", UNROLL_CHOICES, 0)
    k.choice("unroll_explicit", (0, 1), 0)
    k.choice("sliced_k", [n for n in SLICED_K_CHOICES if w.C % n == 0], 1)
    k.choice("pipeline", tuple(PIPELINE_COPIES), "none")
    k.choice("copy_order", COPY_ORDERS, COPY_ORDERS[0])
    grid, config = configs_from_columns(w, k.values)
    k.prune(
        "tiles are less than twice as large as the product",
        lambda c: c["tile_x"][:, 1:].prod(axis=1) < 2 * WinogradTileGrid.from_workload(w, c["output_tile"]).count,
    )
    k.require("each point of a tile has its own blocks", lambda c: np.all(c["tile_b"][:, 1:] == 1, axis=1))
    config.add_constraints(k, lambda c: configs_from_columns(w, c)[1])
    k.require(
        f"vector copies need tiles and copies per thread in multiples of {VECTOR_ELEMENTS} elements",
        lambda c: (c["copy_order"] != "vectorized") | can_copy_vectors(configs_from_columns(w, c)[1]),
    )
    return grid, config


def configs_from_columns(w: Conv2d, columns: Columns) -> tuple[WinogradTileGrid, DirectTileConfig]:
    """Return the grid and the product's config of the knobs' values, or those of many."""
    grid = WinogradTileGrid.from_workload(w, columns["output_tile"])
    tiles = [
        Tile.from_column(extent, OUTPUT_LEVELS, columns[knob])
        for knob, extent in (("tile_y", w.O), ("tile_x", grid.count))
    ]
    reduction = Tile.from_column(w.C, REDUCTION_LEVELS, columns["tile_rc"])
    return grid, DirectTileConfig.from_tiles(tuple(map(round_up_tile, tiles)), (reduction,), columns)


def round_up_tile(tile: Tile) -> Tile:
    """Return a tile of an axis whose extent is rounded up to whole blocks, so that nothing overhangs."""
    num_blocks = ceil_div(tile.extent, tile.size)
    return Tile(num_blocks * tile.size, {**tile.factors, "block": num_blocks})


def can_copy_vectors(config: DirectTileConfig) -> Any:
    """Return whether each thread copies whole vectors of each operand's part of a k-tile."""
    rows_per_k_tile = config.sliced_k * config.reduction[0].tap
    is_filled = [
        (tile.size % VECTOR_ELEMENTS == 0) & (rows_per_k_tile * tile.size % (VECTOR_ELEMENTS * config.num_threads) == 0)
        for tile in config.output
    ]
    return np.all(is_filled, axis=0)


def compute_usage(w: Conv2d, columns: Columns) -> ResourceUsage:
    """Return the resources that the product uses; those of the transforms are small."""
    grid, config = configs_from_columns(w, columns)
    y, x = (tile.size for tile in config.output)
    rows_per_k_tile = config.sliced_k * config.reduction[0].tap
    elements = rows_per_k_tile * x, rows_per_k_tile * y
    return config.compute_usage(make_product_workload(w), elements, num_outer_blocks=grid.alpha**2)
