"""Gradients of 3×3 weights by Winograd's algorithm: tiles of dY are filters that slide over tiles of X.

F(3, m) computes the 3 × 3 sums of a tile of m × m elements of dY and of α × α elements of X, α = m + 2. It takes α²
products instead of 9·m²: 2.25 times fewer with m = 2, and 4 times fewer with m = 4. The sum over the tiles of all
images is a product of matrices for each of the α² points, in these stages:

- `g` (tiles, O, m, m) is dY; `gG` and `U` (α, α, tiles, O) are its transforms along the columns and both axes.
- `d` (tiles, C, α, α) is X; `Bd` and `V` (α, α, tiles, C) are its transforms.
- `M` (parts, α, α, O, C) is the products, summed over the tiles of a part (`parts`).
- `total` (α, α, O, C) is the sum of the parts in order, so that results are the same bits in every run.
- `MA` and `AMA` (O, C, 3, 3) are the transformed sums, and `dK` applies the epilogue.

Four kernels compute them: the two transforms, the products, and the rest. Tiles beyond an image are zeros. Errors are
those of F(4, 3) of forward layers with as many channels as there are tiles, a quarter of the tolerance of such sums.

Source: Lavin, Gray, "Fast Algorithms for Convolutional Neural Networks", 2015 (arXiv:1509.09308), section 4.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import numpy as np
from tvm import te, tirx
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV

from tvmconv.arithmetic import ceil_div
from tvmconv.fitted_latency import H200_FIT
from tvmconv.registry import schedule
from tvmconv.space import Columns, Knobs, Tile
from tvmconv.space.search_space import ResourceUsage
from tvmconv.target import H200
from tvmconv.workloads import Conv2d
from tvmconv.workloads.conv_gradient import WeightGradient
from tvmconv.workloads.conv_gradient_te import declare_weight_gradient_by_tiles
from tvmconv.workloads.dtypes import ACCUMULATOR, DTYPES
from tvmconv.workloads.layout import CHANNELS_FIRST, to_storage_order
from tvmconv.workloads.text import MAX_INT32_ELEMENTS

from ...primitives import get_loop_extent, hoist_guards
from ..direct_config import OUTPUT_LEVELS, PIPELINE_COPIES, DirectTileConfig
from ..reduction import FLOAT_DTYPES
from ..winograd.cook_toom import make_winograd_matrices
from ..winograd.knobs import (
    COPY_ORDERS,
    MAX_OVERHANG_FRACTION,
    MAX_PADDING_FRACTION,
    MIN_FLOPS,
    UNROLL_CHOICES,
    can_copy_vectors,
    make_product_workload,
    round_up_tile,
)
from ..winograd.schedule import bind_threads, schedule_product, schedule_transform, unroll_inside_thread
from ..winograd.te_stages import multiply_row_by_matrix, transpose

TAPS = 3  # of the filter along each axis
GRADIENT_TILE_SIZES = (4, 2)
BLOCK_K_CHOICES = (4, 8, 16)
PARTS_CHOICES = (1, 2, 3, 4, 6, 8, 12, 16)
MIN_CHANNELS = 32  # of X and dY; with fewer, the transforms take longer than what they save
DEFAULT_BLOCK = 64, 64  # channels of dY and of X of the default block
# Tiles of the product with which a search starts: (virtual thread, thread, local) of the channels of dY and of X, tiles
# of dY of a step, and pipeline.
STARTING_TILES = (
    ((1, 8, 8), (2, 16, 4), 8, "async2"),
    ((1, 8, 8), (1, 16, 4), 8, "async3"),
    ((1, 8, 8), (1, 8, 8), 8, "async3"),
    ((1, 4, 8), (2, 16, 4), 8, "async3"),
    ((1, 16, 8), (2, 16, 4), 8, "async2"),
)


class GradientTiles(NamedTuple):
    """Tiles of dY and of X, for one config or as columns for many."""

    m: Any  # elements of dY of a tile along each axis
    alpha: Any  # elements of X of a tile along each axis
    rows: Any  # tiles per image column
    columns: Any  # tiles per image row
    count: Any  # tiles of the whole batch
    per_part: Any  # tiles of a part, including zeros that fill its last step
    parts: Any  # parts of the reduction

    def origin(self, tile: tirx.Expr) -> tuple[tirx.Expr, tirx.Expr, tirx.Expr]:
        """Return the image of a tile, and its first row and column of dY."""
        per_image = self.rows * self.columns
        return tile // per_image, tile % per_image // self.columns * self.m, tile % self.columns * self.m


def is_supported(w: WeightGradient) -> bool:
    """Whether the filter is 3×3 without strides, dilation and groups, and the operands are not too large."""
    is_plain = w.groups == 1 and set(w.stride) == {1} and set(w.dilation) == {1}
    return is_plain and w.kernel == (TAPS, TAPS) and bool(list_legal_choices(w))


def is_promising(w: WeightGradient) -> bool:
    """Return whether the saved arithmetic outweighs the bytes of the transformed operands."""
    return w.dtype == ACCUMULATOR and min(w.C, w.O) >= MIN_CHANNELS and w.flops >= MIN_FLOPS


@functools.lru_cache(maxsize=64)
def list_legal_choices(w: WeightGradient) -> list[tuple[int, int]]:
    """Return the sizes of tiles and numbers of parts whose operands and products have 32-bit indices."""
    legal = []
    for m in GRADIENT_TILE_SIZES:
        for parts in PARTS_CHOICES:
            tiles = make_tiles(w, {"gradient_tile": m, "parts": parts, "block_k": BLOCK_K_CHOICES[-1]})
            elements = tiles.alpha**2 * parts * max(w.C, w.O) * max(tiles.per_part, w.C, w.O)
            if elements * (1 + MAX_PADDING_FRACTION) ** 2 <= MAX_INT32_ELEMENTS:
                legal.append((m, parts))
    return legal


def estimate_microseconds(w: WeightGradient, m: int, parts: int, block: tuple[int, int] = DEFAULT_BLOCK) -> float:
    """Return the estimated time on an H200 for tiles of m × m elements and blocks of some channels of dY and X.

    The blocks are divided evenly among the SMs, and the transformed operands and the sums are written and read once.
    """
    tiles, fit = make_tiles(w, {"gradient_tile": m, "parts": parts, "block_k": BLOCK_K_CHOICES[1]}), H200_FIT.winograd
    blocks = tiles.alpha**2 * parts * ceil_div(w.O, block[0]) * ceil_div(w.C, block[1])
    num_products = ceil_div(blocks, H200.multiprocessors) * H200.multiprocessors * tiles.per_part * math.prod(block)
    num_values = tiles.alpha**2 * (tiles.count * (w.C + w.O) + parts * w.C * w.O)
    num_bytes = 2 * DTYPES[ACCUMULATOR].itemsize * num_values + w.min_bytes
    return num_products / fit.fma_per_us + num_bytes / fit.bytes_per_us + fit.launch_us


def rank_choices(w: WeightGradient, block: tuple[int, int] = DEFAULT_BLOCK) -> list[tuple[int, int]]:
    """Return the legal sizes of tiles and numbers of parts, the one with the best estimate first."""
    return sorted(list_legal_choices(w), key=lambda choice: estimate_microseconds(w, choice[0], choice[1], block))


def make_tiles(w: WeightGradient, columns: Mapping[str, Any]) -> GradientTiles:
    """Return the tiles of the knobs' values, or those of many."""
    m, parts, block_k = (columns[name] for name in ("gradient_tile", "parts", "block_k"))
    rows, tile_columns = (ceil_div(size, m) for size in w.forward.output_size)
    count = w.N * rows * tile_columns
    per_part = ceil_div(ceil_div(count, parts), block_k) * block_k
    return GradientTiles(m, m + TAPS - 1, rows, tile_columns, count, per_part, parts)


def make_config(w: WeightGradient, columns: Columns) -> tuple[GradientTiles, DirectTileConfig]:
    """Return the tiles and the config of the product of the knobs' values, or those of many."""
    tiles, block_k = make_tiles(w, columns), columns["block_k"]
    output = (
        round_up_tile(Tile.from_column(extent, OUTPUT_LEVELS, columns[knob]))
        for knob, extent in (("tile_y", w.O), ("tile_x", w.C))
    )
    reduction = Tile(tiles.per_part, {"step": tiles.per_part // block_k, "tap": block_k})
    one = block_k * 0 + 1
    return tiles, DirectTileConfig.from_tiles(tuple(output), (reduction,), {**columns, "sliced_k": one})


def declare_knobs(w: WeightGradient, k: Knobs) -> tuple[GradientTiles, DirectTileConfig]:
    """Declare the knobs, and return the tiles and the config of the product."""
    legal, (m, parts) = list_legal_choices(w), rank_choices(w)[0]
    k.choice("gradient_tile", [size for size in GRADIENT_TILE_SIZES if size in dict(legal)], m)
    k.choice("parts", [number for number in PARTS_CHOICES if number in {parts for _, parts in legal}], parts)
    k.tile("tile_y", w.O, OUTPUT_LEVELS, {"thread": 8, "local": 8}, overhang=MAX_OVERHANG_FRACTION)
    k.tile("tile_x", w.C, OUTPUT_LEVELS, {"thread": 16, "local": 4}, overhang=MAX_OVERHANG_FRACTION)
    k.choice("block_k", BLOCK_K_CHOICES, 8)
    k.choice("auto_unroll_max_step", UNROLL_CHOICES, 0)
    k.choice("unroll_explicit", (0, 1), 0)
    k.choice("pipeline", tuple(PIPELINE_COPIES), "none")
    k.choice("copy_order", COPY_ORDERS, COPY_ORDERS[0])
    k.require(
        "the transformed operands and the products have 32-bit indices",
        lambda c: np.any([(c["gradient_tile"] == m) & (c["parts"] == parts) for m, parts in legal], axis=0),
    )
    tiles, config = make_config(w, k.values)
    config.add_constraints(k, lambda c: make_config(w, c)[1])
    k.require(
        "vector copies need tiles and copies per thread in multiples of vectors",
        lambda c: (c["copy_order"] != "vectorized") | can_copy_vectors(make_config(w, c)[1]),
    )
    return tiles, config


def compute_usage(w: WeightGradient, columns: Columns) -> ResourceUsage:
    """Return the resources that the product uses; those of the transforms are small."""
    tiles, config = make_config(w, columns)
    y, x = (tile.size * config.reduction[0].tap for tile in config.output)
    product = make_product_workload(cast(Conv2d, w.forward))
    return config.compute_usage(product, (x, y), num_outer_blocks=tiles.alpha**2 * tiles.parts)


def estimate_seconds(w: WeightGradient) -> float:
    """Return the estimated seconds of the fastest config on an H200, as for `winograd` of forward layers."""
    return 1e-6 * estimate_microseconds(w, *rank_choices(w)[0])


def list_starting_configs(w: WeightGradient) -> list[dict[str, Any]]:
    """Return the configs with which a search starts; it leaves out those that are not legal."""
    fixed = {"auto_unroll_max_step": 1500, "unroll_explicit": 0, "copy_order": "vectorized"}
    configs = []
    for rank in range(min(2, len(list_legal_choices(w)))):
        for y, x, block_k, pipeline in STARTING_TILES:
            m, parts = rank_choices(w, (math.prod(y), math.prod(x)))[rank]
            tile = {"tile_y": (-1, *y), "tile_x": (-1, *x), "block_k": block_k, "pipeline": pipeline}
            configs.append({**fixed, **tile, "gradient_tile": m, "parts": parts})
    return configs


@schedule(
    "conv2d_wgrad",
    dtypes=FLOAT_DTYPES,
    usage=compute_usage,
    condition=is_supported,
    search_if=is_promising,
    starting_configs=list_starting_configs,
    estimate_seconds=estimate_seconds,
)
def winograd(s: Schedule, w: WeightGradient, k: Knobs) -> Schedule:
    """Tile channels of dY and of X as (block, virtual thread, thread, local), and tiles as (part, step, tap)."""
    tiles, config = declare_knobs(w, k)
    channels = tuple(int(tile.extent) for tile in config.output)

    def declare_sums(dY: te.Tensor, X: te.Tensor) -> te.Tensor:
        return declare_sums_by_tiles(w, tiles, channels, dY, X)

    s = Schedule(te.create_prim_func(list(declare_weight_gradient_by_tiles(w, declare_sums))))
    divides_rows = w.layout == CHANNELS_FIRST
    for stages in (("g", "gG", "U"), ("d", "Bd", "V")):
        schedule_transform(s, *stages, order_tiles_by_rows if divides_rows else None)
    schedule_product(s, config)
    schedule_result(s, w)
    hoist_guards(s)
    return s


def declare_sums_by_tiles(
    w: WeightGradient, tiles: GradientTiles, channels: tuple[int, ...], dY: te.Tensor, X: te.Tensor
) -> te.Tensor:
    """Declare the sums (O, C, 3, 3); `channels` are those of dY and X, padded to whole blocks."""
    m, alpha, conv = tiles.m, tiles.alpha, w.forward
    A, B, G = make_winograd_matrices(TAPS, m)
    num_tiles = tiles.per_part * tiles.parts

    def read(tensor: te.Tensor, p: tirx.Expr, c: tirx.Expr, i: tirx.Expr, j: tirx.Expr) -> tirx.Expr:
        is_gradient = tensor.same_as(dY)
        low = (0, 0) if is_gradient else conv.pad_low
        sizes = conv.output_size if is_gradient else conv.input_size
        image, *origin = tiles.origin(p)
        row, column = (first + k - before for first, k, before in zip(origin, (i, j), low, strict=True))
        tests = [p < tiles.count, c < (w.O if is_gradient else w.C), row >= 0, column >= 0]
        is_inside = te.all(*tests, row < sizes[0], column < sizes[1])
        value = tensor(*to_storage_order(w.layout, (image, c, row, column))).astype(ACCUMULATOR)
        return te.if_then_else(is_inside, value, tirx.const(0.0, ACCUMULATOR))

    def transform(tensor: te.Tensor, size: int, num_channels: int, matrix: Any, names: tuple[str, ...]) -> te.Tensor:
        shape = num_tiles, num_channels
        source = te.compute((*shape, size, size), lambda p, c, i, j: read(tensor, p, c, i, j), name=names[0])
        half = te.compute(
            (*shape, size, alpha),
            lambda p, c, i, v: multiply_row_by_matrix(lambda j: source(p, c, i, j), matrix, v),
            name=names[1],
        )
        return te.compute(
            (alpha, alpha, *shape),
            lambda u, v, p, c: multiply_row_by_matrix(lambda i: half(p, c, i, v), matrix, u),
            name=names[2],
        )

    U = transform(dY, m, channels[0], transpose(G), ("g", "gG", "U"))
    V = transform(X, alpha, channels[1], B, ("d", "Bd", "V"))
    t = te.reduce_axis((0, tiles.per_part), "t")
    M = te.compute(
        (tiles.parts, alpha, alpha, *channels),
        lambda b, u, v, o, c: te.sum(U(u, v, b * tiles.per_part + t, o) * V(u, v, b * tiles.per_part + t, c), axis=t),
        name="M",
    )
    shape = w.O, w.C
    total = te.compute(
        (*shape, alpha, alpha),
        lambda o, c, u, v: functools.reduce(operator.add, (M(b, u, v, o, c) for b in range(tiles.parts))),
        name="total",
    )
    MA = te.compute(
        (*shape, alpha, TAPS),
        lambda o, c, i, v: multiply_row_by_matrix(lambda j: total(o, c, i, j), A, v),
        name="MA",
    )
    return te.compute(
        (*shape, TAPS, TAPS), lambda o, c, u, v: multiply_row_by_matrix(lambda i: MA(o, c, i, v), A, u), name="AMA"
    )


def order_tiles_by_rows(s: Schedule, loops: list[LoopRV]) -> list[LoopRV]:
    """Order tiles and channels so that a warp reads neighbouring tiles and writes neighbouring channels."""
    splits = [
        s.split(loop, [None, math.gcd(get_loop_extent(s, loop), size)])
        for loop, size in zip(loops, (4, 8), strict=True)
    ]
    return [pair[level] for level in (0, 1) for pair in splits]


def schedule_result(s: Schedule, w: WeightGradient) -> None:
    """Let each thread add the parts of one filter's channel, transform the sums and store the taps."""
    result = s.get_sblock(w.RESULT)
    axes = dict(zip(to_storage_order(w.layout, "ocrs"), s.get_loops(result), strict=True))
    s.reorder(*(axes[name] for name in "ocrs"))
    thread = bind_threads(s, [axes["o"], axes["c"]])
    stages = [s.get_sblock(name) for name in ("AMA", "MA", "total")]
    for block in stages:
        s.compute_at(block, thread)
        s.set_scope(block, 0, "local")
    unroll_inside_thread(s, thread, [result, *stages])
