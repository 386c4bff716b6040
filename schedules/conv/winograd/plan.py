"""What there is to choose in `winograd`, what choices go together, and what they use of a GPU.

Source of the six knobs behind `tile_m`: TVM 0.7 to 0.19, `topi/cuda/conv2d_winograd.py`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import numpy as np

from tvmconv.arithmetic import ceil_div
from tvmconv.knobs import Columns, Knobs, Tile
from tvmconv.knobs.space import Usage
from tvmconv.workloads import Conv2d
from tvmconv.workloads.dtypes import ACCUMULATOR, DTYPES
from tvmconv.workloads.text import MAX_ELEMENTS

from ..plan import OUTPUT_LEVELS, PIPELINES, REDUCTION_LEVELS, SLICES, VECTOR, Plan
from .cook_toom import error_growth, transforms

TILE_SIZES = (2, 4, 6)
PLACES = ("block", "vthread", "thread", "local")  # of the product's batch, the places in a tile; all blocks
UNROLLED = (0, 128, 1500)  # statements
FETCHES = ("interleaved", "vectors", "blocked")
OVERHANG, FEW_TILES, OVERHANG_OF_FEW = 0.15, 1024, 0.35
FILLED = 0.25  # of the tiles and channels, at most, are added for blocks to be whole
LEAST_SAVED = 10  # operations for a byte, of which GPUs do 10 to 40 while they move one
LEAST_FLOPS = 1e8  # of which several launches are a small part
MARGIN = 1.15  # of an expected error against the tolerance


class Grid(NamedTuple):
    """The tiles of an output, of one config or of many as columns.

    Attributes:
        m: outputs of a tile along each axis.
        alpha: inputs that they need.
        rows: tiles down an image.
        columns: tiles across it.
        count: tiles of the whole batch.
    """

    m: Any
    alpha: Any
    rows: Any
    columns: Any
    count: Any

    @classmethod
    def of(cls, w: Conv2d, m: Any) -> Grid:
        """The tiles of m × m outputs."""
        rows, columns = ceil_div(w.P, m), ceil_div(w.Q, m)
        return cls(m, m + w.R - 1, rows, columns, w.N * rows * columns)

    def place(self, tile: Any) -> tuple[Any, Any, Any]:
        """The image that a tile is of, by its number, and the first row and column of its outputs."""
        each = self.rows * self.columns
        return tile // each, tile % each // self.columns * self.m, tile % self.columns * self.m


def applies(w: Conv2d) -> bool:
    """Whether the filter is square, of 3 to 7 taps, is applied to each pixel, and some tile is right."""
    plain = w.groups == 1 and set(w.stride) == {1} and set(w.dilation) == {1}
    return plain and w.R == w.S and 3 <= w.R <= 7 and bool(tile_sizes(w))


def is_promising(w: Conv2d) -> bool:
    """Whether it saves enough arithmetic for the bytes of the transformed operands, and for its launches.

    For each tile 2·(m²·R² - α²)·C·O operations are saved, and the 4·α²·(C + O) bytes of its transformed inputs and of
    its products are written and read.
    """
    m = default_tile_size(w)
    alpha = m + w.R - 1
    saved, moved = 2 * (m * m * w.R * w.S - alpha**2) * w.C * w.O, 8 * alpha**2 * (w.C + w.O)
    return w.dtype == ACCUMULATOR and saved >= LEAST_SAVED * moved and w.flops >= LEAST_FLOPS


def tile_sizes(w: Conv2d) -> tuple[int, ...]:
    """The outputs of a tile along each axis, of those whose error is within the tolerance of float32.

    And of those whose transformed inputs and products have indices of 32 bits, tiles that fill a block up included.
    """
    return tuple(
        m
        for m in TILE_SIZES
        if expected_error(m, w.R, w.C) * MARGIN <= DTYPES[ACCUMULATOR].tolerance
        and (m + w.R - 1) ** 2 * max(w.C, w.O) * (1 + FILLED) * Grid.of(w, m).count <= MAX_ELEMENTS
    )


def expected_error(m: int, r: int, channels: int) -> float:
    """The relative L2 error of F(m × m, r × r) in float32, on random inputs and weights.

    An error of the size of the products grows along each axis (`error_growth`). The sum over the channels adds to the
    roundoff of 2^-24 what grows with its root; both numbers there were fitted to emulations with 16 to 1,280 channels,
    m of 2, 4 and 6 and r of 3 to 7, which they tell within 5%.
    """
    return float(2.0**-24 * error_growth(transforms(m, r)) * math.sqrt(1.6 + 0.09 * channels))


def default_tile_size(w: Conv2d) -> int:
    """AutoTVM's, which goes by the height alone; a smaller one, where that is not right enough."""
    wanted = 4 if w.H % 8 == 0 else 2
    sizes = tile_sizes(w)
    return max((m for m in sizes if m <= wanted), default=min(sizes))


def product(w: Conv2d) -> Conv2d:
    """The workload in the dtype of the product, whose operands are float32 whatever those of the workload are."""
    return dataclasses.replace(w, dtype=ACCUMULATOR)


def ask(k: Knobs, w: Conv2d) -> tuple[Grid, Plan]:
    """Ask for everything: the tiles of outputs, and the plan of the product."""
    grid = Grid.of(w, k.choice("tile_m", tile_sizes(w), default_tile_size(w)))
    k.tile("tile_b", grid.alpha**2, PLACES)
    overhang = OVERHANG_OF_FEW if grid.count <= FEW_TILES else OVERHANG
    plan = Plan(
        output=(
            k.tile("tile_y", w.O, OUTPUT_LEVELS, {"thread": 8, "local": 8}, overhang=OVERHANG),
            k.tile("tile_x", grid.count, OUTPUT_LEVELS, {"vthread": 2, "thread": 16, "local": 4}, overhang=overhang),
        ),
        reduction=(k.tile("tile_rc", w.C, REDUCTION_LEVELS, {"tap": 8}, exact=True),),
        max_step=k.choice("auto_unroll_max_step", UNROLLED, 0),
        explicit=k.choice("unroll_explicit", (0, 1), 0),
        slices=k.choice("slices", [n for n in SLICES if w.C % n == 0], 1),
        pipeline=k.choice("pipeline", tuple(PIPELINES), "none"),
        fetch=k.choice("fetch", FETCHES, FETCHES[0]),
        weight_layout="oihw",
        pad=0,
    )
    k.search_only(
        "a tile of the product is less than twice what there is",
        lambda c: c["tile_x"][:, 1:].prod(axis=1) < 2 * Grid.of(w, c["tile_m"]).count,
    )
    k.condition("each place in a tile is a block of its own", lambda c: np.all(c["tile_b"][:, 1:] == 1, axis=1))
    plan.demand(k, lambda c: of_columns(w, c)[1])
    k.condition(
        f"vectors of {VECTOR} fill the tiles, and the threads copy as many each",
        lambda c: (c["fetch"] != "vectors") | _vectors_fit(of_columns(w, c)[1]),
    )
    return grid, dataclasses.replace(plan, output=tuple(map(whole, plan.output)))


def of_columns(w: Conv2d, c: Columns) -> tuple[Grid, Plan]:
    """The grids and plans of many configs."""
    grid = Grid.of(w, c["tile_m"])
    tiles = [
        Tile.of_column(extent, OUTPUT_LEVELS, c[knob]) for knob, extent in (("tile_y", w.O), ("tile_x", grid.count))
    ]
    return grid, Plan(
        output=tuple(map(whole, tiles)),
        reduction=(Tile.of_column(w.C, REDUCTION_LEVELS, c["tile_rc"]),),
        slices=c["slices"],
        pipeline=c["pipeline"],
        fetch=c["fetch"],
        max_step=c["auto_unroll_max_step"],
        explicit=c["unroll_explicit"],
        weight_layout="oihw",
        pad=0 * c["slices"],
    )


def whole(tile: Tile) -> Tile:
    """A tile of an axis that was made longer for it, so that none overhangs."""
    blocks = ceil_div(tile.extent, tile.size)
    return Tile(blocks * tile.size, {**tile.factors, "block": blocks})


def _vectors_fit(plan: Plan) -> Any:
    """Whether each operand's part of a step is so many vectors for each thread."""
    rows = plan.slices * plan.reduction[0].tap
    fits = [(tile.size % VECTOR == 0) & (rows * tile.size % (VECTOR * plan.block_threads) == 0) for tile in plan.output]
    return np.all(fits, axis=0)


def usage(w: Conv2d, c: Columns) -> Usage:
    """What the products of configs use of a device; the transforms' blocks are small."""
    grid, plan = of_columns(w, c)
    y, x = (tile.size for tile in plan.output)
    rows = plan.slices * plan.reduction[0].tap
    return plan.usage(product(w), (rows * x, rows * y), outer=grid.alpha**2)
