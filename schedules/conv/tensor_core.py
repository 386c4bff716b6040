"""Tensor cores: a warp multiplies tiles of 16 × 16, whose operands are copied asynchronously, steps ahead.

From `conflict_free`: the same product of matrices, pixels × channels, summed over the filter's taps and the input
channels. What changes, each by a rewrite or two:

* What is multiplied at once are no two numbers but two tiles: `tensorize` replaces the innermost 16 × 16 × 16 products
  (8 deep in TF32) by two mma.sync. Operands and sums lie in registers, spread over the 32 lanes of a warp as the
  instruction wants them: buffers of the scope "warp". A block is a few warps, each with a rectangle of tiles; what it
  loads once serves a whole row, or column, of them.
* Operands go from shared memory to registers by ldmatrix, which reads eight rows of 16 bytes at a time. The rows have an
  odd number of 16 bytes, the last of which are unused, so that any eight that follow each other lie in distinct banks.
* Operands come to shared memory by cp.async, 16 bytes each, not through registers, and some steps of the reduction
  ahead: a software pipeline holds `stages` of them. Eight neighbouring lanes copy the same 16 bytes of eight rows, again
  to distinct banks. Sizes that tiles do not divide are padded with zeros on this way.
* With `fragments` "ahead", registers are loaded one slice before they are multiplied: a pipeline inside of the other.
* The sums leave through shared memory, so that neighbouring lanes store neighbouring outputs, with the epilogue.
* `split_k` shares a tile's sums among blocks, for small images with many channels, as in `implicit_gemm`.

It wants channels last ("nhwc") and a multiple of 8 of them in a group (of 4 in TF32): 16 bytes then are neighbouring
channels of one tap and pixel. It computes all else, too, with copies of single elements, which in 16 bits cannot be
asynchronous; taps and channels are one axis then, so that an image of three channels is not padded to 16. Where
channels are first, tiles are channels × pixels, and neighbouring lanes store neighbouring pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from tvm.ir import Expr
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV
from tvm.tirx import IndexMap, const

from tvmconv import gpu
from tvmconv.gpu import WARP
from tvmconv.knobs import Columns, Knobs
from tvmconv.knobs.space import Usage
from tvmconv.library import schedule
from tvmconv.workloads import Conv
from tvmconv.workloads.declaration import OUTPUT, TAPS

from ..vocabulary import bind_grid, inline_consumers, inline_producers
from .implicit_gemm import ADDING_THREADS
from .intrinsics import DEPTH_BYTES, REGISTERS, SHARED, SIDE, Layout, intrinsics, sums_layout
from .tiles import element_bytes

COPIED = 16  # bytes, by one cp.async
ASYNC_BYTES = 4  # that one copies at least
ROWS = 8  # of 16 bytes, that ldmatrix reads together, and eight lanes copy
STORED = 4  # neighbouring sums that a lane stores
SUM_BYTES = 4  # of a float32
SUM_ROW = 8  # words by which a row of sums begins behind a multiple of all banks: pairs of sums meet in none
ZERO = const(0, "int32")

SIZES = (16, 32, 64, 128, 256)  # of a block's tile
WARPS = (1, 2, 4, 8)
STAGES = (2, 3, 4, 5, 6)
SPLITS = (1, 2, 4, 8, 16, 32)
NOW, AHEAD = "now", "ahead"
REUSE = 16  # how many times as large as another an array may be for one to take the other's place

MAX_ACCUMULATORS = 128
OWN_REGISTERS = 40  # of a thread besides its accumulators, at least
MIN_THREADS = 64
FEW_BLOCKS = 512  # some blocks for each multiprocessor of the largest GPUs: more gain nothing from a split reduction

# Default tiles, the largest first: pixels, channels, warps along each. Chosen is the first that makes enough blocks to
# occupy a GPU; where none does, the third, with the reduction split.
TILES = ((128, 128, 2, 4), (128, 64, 2, 2), (64, 64, 2, 2), (64, 32, 2, 2), (32, 32, 2, 2))
SPLIT_TILE = TILES[2]
ENOUGH_BLOCKS = 96
LEAST_SHARED_BYTES = 99 << 10  # that a launch may ask for, of the architectures since sm_80


class Plan(NamedTuple):
    """One config, or many as columns.

    Attributes:
        block_m: pixels of a block.
        block_n: output channels of a block.
        block_k: input channels of a step; where taps and channels are one axis, elements of that.
        warps_m: warps along the pixels.
        warps_n: warps along the output channels.
        stages: steps whose operands are in shared memory or on their way there.
        fragments: whether registers are loaded just `now`, or one slice `ahead`.
        split_k: blocks that share the sums of a tile.
    """

    block_m: Any
    block_n: Any
    block_k: Any
    warps_m: Any
    warps_n: Any
    stages: Any
    fragments: Any
    split_k: Any

    @property
    def warps(self) -> Any:
        """Warps of a block."""
        return self.warps_m * self.warps_n

    @property
    def accumulators(self) -> Any:
        """Sums of a thread."""
        return self.block_m * self.block_n // (self.warps * WARP)

    def sides(self, w: Conv) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
        """Rows and columns of a block's tile, each with the warps along them."""
        pixels, channels = (self.block_m, self.warps_m), (self.block_n, self.warps_n)
        return (pixels, channels) if channels_last(w) else (channels, pixels)

    def steps(self, w: Conv) -> Any:
        """Steps of a block."""
        taps, depth = summed(w)
        return taps * -(-depth // (self.block_k * self.split_k))

    def dynamic_shared_bytes(self, w: Conv) -> Any:
        """Shared memory of a block: what is staged of both operands, whose place the sums take in the end."""
        element = element_bytes(w)
        odd_row = self.block_k * element + np.where(self.block_k * element % (2 * COPIED) == 0, COPIED, 0)
        staged = [self.stages * size * odd_row for size in (self.block_m, self.block_n)]
        (rows, _), (columns, _) = self.sides(w)
        sums = SUM_BYTES * rows * (columns + (SUM_ROW - columns) % gpu.BANKS)
        if element < SUM_BYTES:
            return np.maximum(sum(staged), sums)
        # Of the same type as an operand, the sums take the place of that one alone, which grows if it has to
        # (tirx.transform.StorageRewrite).
        large, small = np.maximum(*staged), np.minimum(*staged)
        grown = np.where(sums <= small, small + large, large + np.maximum(small, sums))
        return np.where(sums <= large, small + large, np.where(sums <= REUSE * large, small + sums, grown))


@schedule(
    "conv1d",
    "conv2d",
    "conv3d",
    dtypes=("float16", "bfloat16", "tf32"),
    usage=lambda w, c: usage(w, c),
    condition=lambda w: math.prod(summed(w)) > 1,
    kinds=("cuda",),
    since=80,
)
def tensor_core(s: Schedule, w: Conv, k: Knobs) -> None:
    """Rows and columns are tiled as (block, warp, tile, row or column of it), the reduction as (step, slice, depth)."""
    plan, tensor = ask(k, w), intrinsics(w.storage)
    (rows, row_warps), (columns, column_warps) = plan.sides(w)

    # A product of matrices, padded to whole tiles, of operands that are staged in shared memory.
    product = as_product(s, w)
    s.pad_einsum(product, [1, rows, columns, 1, plan.block_k * plan.split_k])
    if plan.split_k > 1:
        product = split_over_blocks(s, product, plan.split_k)
    copies = [s.cache_read(product, operand, SHARED) for operand in (0, 1)]
    for copy in copies:
        inline_producers(s, copy)

    # Blocks, warps and steps, around the product of two tiles.
    *outer, row, column, tap, depth = s.get_loops(product)
    row, row_warp, row_tile, i = s.split(row, [None, row_warps, rows // row_warps // SIDE, SIDE])
    column, column_warp, column_tile, j = s.split(column, [None, column_warps, columns // column_warps // SIDE, SIDE])
    step, piece, d = s.split(depth, [None, plan.block_k // tensor.depth, tensor.depth])
    s.reorder(*outer, row, column, row_warp, column_warp, tap, step, piece, row_tile, column_tile, i, j, d)
    product = s.blockize(i)
    step = s.fuse(tap, step)
    bind_grid(s, s.fuse(*outer), *((column, row) if channels_last(w) else (row, column)))
    warp = s.fuse(row_warp, column_warp)
    s.bind(warp, "threadIdx.y")

    # The way of the operands: shared memory at each step, registers at each slice. The way of the sums back.
    store = s.cache_write(product, 0, SHARED)
    sums = s.cache_write(product, 0, REGISTERS)
    for block in (sums, store):
        s.reverse_compute_at(block, warp)
    loads = [s.cache_read(product, operand, REGISTERS) for operand in (0, 1)]
    for load in loads:
        s.compute_at(load, piece)
    for copy, by_row in zip(copies, (w.layout == "nhwc", True), strict=True):
        s.compute_at(copy, step)
        copy_together(s, w, copy, plan.warps, by_row=by_row)
    store_together(s, w, store, is_final=plan.split_k == 1)

    # Tiles become instructions.
    sides = [(tensor.rows, tensor.rows_layout), (tensor.columns, tensor.columns_layout)]
    for load, (name, layout) in zip(loads, sides if channels_last(w) else reversed(sides), strict=True):
        s.transform_layout(load, ("write", 0), spread_over_lanes(layout, tensor.depth))
        s.tensorize(tiles(s, load, tensor.depth), name)
    s.transform_layout(sums, ("read", 0), spread_over_lanes(sums_layout, SIDE))
    sums = tiles(s, sums, SIDE)
    s.storage_align(sums, 0, axis=-2, factor=gpu.BANKS, offset=SUM_ROW)
    s.tensorize(sums, tensor.store)
    (clear,) = s.get_child_blocks(s.decompose_reduction(product, step))
    s.tensorize(s.get_loops(clear)[-2], tensor.clear)
    (multiply,) = s.get_child_blocks(product)
    s.tensorize(s.get_loops(multiply)[-3], tensor.multiply if channels_last(w) else tensor.multiply_columns)

    # Copies run ahead of the products.
    last = plan.stages - 1
    if plan.fragments == AHEAD:
        pipeline(s, piece, stages=[0, 0, 1], order=[0, 1, 2])
        pipeline(s, step, stages=[0, 0, last - 1, last, last], order=[0, 1, 3, 2, 4])
    else:
        s.unroll(piece)
        pipeline(s, step, stages=[0, 0, last], order=[0, 1, 2])
    if copies_16_bytes(w) or element_bytes(w) >= ASYNC_BYTES:
        s.annotate(step, "software_pipeline_async_stages", [0])
    for loop in (row_tile, column_tile):
        s.unroll(loop)


def channels_last(w: Conv) -> bool:
    """Whether neighbouring outputs are of neighbouring channels, which then are the columns of the product."""
    return w.layout == "nhwc"


def copies_16_bytes(w: Conv) -> bool:
    """Whether 16 bytes of an operand are neighbouring input channels of one tap."""
    return channels_last(w) and w.C // w.groups * element_bytes(w) % COPIED == 0


def summed(w: Conv) -> tuple[int, int]:
    """The extents of the two axes of the reduction: taps and input channels, or 1 and all of them as one axis."""
    taps, channels = math.prod(w.kernel), w.C // w.groups
    return (taps, channels) if copies_16_bytes(w) else (1, taps * channels)


def as_product(s: Schedule, w: Conv) -> SBlockRV:
    """Turn the convolution into a product of matrices.

    Returns:
        The block that sums, over (group, row, column; tap, depth). Its operands are views (group, tap, pixel, depth)
        and (group, tap, channel, depth).
    """
    conv = s.get_sblock("sum")
    group, channel = {"v_g": 1}, {"v_o": 1}
    pixel = strides({"n": w.N, **dict(zip(OUTPUT[w.rank], w.out, strict=True))})
    taps, channels = dict(zip(TAPS[w.rank], w.kernel, strict=True)), {"rc": w.C // w.groups}
    if copies_16_bytes(w):
        tap, depth = strides(taps), strides(channels)
    else:  # in the order in which the weight lies in memory
        tap, depth = {}, strides({**taps, **channels} if channels_last(w) else {**channels, **taps})
    rows, columns = (pixel, channel) if channels_last(w) else (channel, pixel)
    operands = ((group, tap, pixel, depth), (group, tap, channel, depth))
    for kind, number, roles in (
        ("read", 0, operands[0]),
        ("read", 1, operands[1]),
        ("write", 0, (group, rows, columns)),
    ):
        s.reindex(conv, (kind, number))
        block = s.get(conv)
        region = (block.reads if kind == "read" else block.writes)[number].region
        s.transform_layout(conv, (kind, number), flattened([index.min.name for index in region], roles))
    own = [axis.var.name for axis in s.get(conv).iter_vars]
    s.transform_block_layout(conv, flattened(own, (group, rows, columns, tap, depth)))
    return conv


Role = Mapping[str, int]  # axes that are flattened into one, and how far apart their neighbours are there


def strides(sizes: Mapping[str, int]) -> Role:
    """The role that all of these axes have together, the last of them innermost.

    Axes of extent 1 have no part in it: TVM would find no index in it where all are. One of them that a view always has
    is there for them.
    """
    names, extents = list(sizes), list(sizes.values())
    role = {f"v_{name}": math.prod(extents[place + 1 :]) for place, name in enumerate(names) if extents[place] > 1}
    return role or {f"v_{name}": 1 for name in names if name in ("n", "rc")}


def flattened(axes: Sequence[str], roles: Sequence[Role]) -> IndexMap:
    """The map from axes to one for each role."""

    def index_map(*indices: Expr) -> list[Expr]:
        at = dict(zip(axes, indices, strict=True))
        return [sum((at[axis] * stride for axis, stride in role.items() if axis in at), ZERO) for role in roles]

    return IndexMap.from_func(index_map, ndim=len(axes), index_dtype="int32")


def split_over_blocks(s: Schedule, total: SBlockRV, parts: int) -> SBlockRV:
    """Split a reduction into parts that are summed to scratch memory, and add these up in a step of its own.

    Returns:
        The block of the partial sums, over (part, group, row, column; tap, depth).
    """
    *output, tap, depth = s.get_loops(total)
    part, rest = s.split(depth, [parts, None])
    s.reorder(part, *output, tap, rest)
    partial = s.rfactor(part, 0)

    part, *output = s.get_loops(total)
    store = s.cache_write(total, 0, "local")
    inline_consumers(s, store)
    s.reorder(*output, part)
    block, thread = s.split(s.fuse(*output), [None, ADDING_THREADS])
    s.bind(block, "blockIdx.x")
    s.bind(thread, "threadIdx.x")
    s.reverse_compute_at(store, thread)
    s.decompose_reduction(total, part)
    return partial


def copy_together(s: Schedule, w: Conv, copy: SBlockRV, warps: int, *, by_row: bool) -> None:
    """Share a copy to shared memory among all warps, 16 bytes or one element at a time, to rows of odd lengths.

    Args:
        s: the schedule.
        w: the workload.
        copy: the block.
        warps: of a block.
        by_row: whether elements of a row are neighbours in memory, rather than those of a column.
    """
    row, column = s.get_loops(copy)[-2:]
    chunk = COPIED // element_bytes(w)
    if copies_16_bytes(w):
        row, eight = s.split(row, [None, ROWS])
        column, vector = s.split(column, [None, chunk])
        s.reorder(row, column, eight, vector)
        s.vectorize(vector)
        order = [row, column, eight]
    else:
        order = [row, column] if by_row else [column, row]
        s.reorder(*order)
    _, warp, lane = s.split(s.fuse(*order), [None, warps, WARP])
    s.bind(warp, "threadIdx.y")
    s.bind(lane, "threadIdx.x")
    s.storage_align(copy, 0, axis=-2, factor=2 * chunk, offset=chunk)


def store_together(s: Schedule, w: Conv, store: SBlockRV, *, is_final: bool) -> None:
    """Let the lanes of a warp store its tile, with the epilogue if the sums are final, neighbours to neighbours."""
    whole = not is_final or (channels_last(w) and w.O // w.groups % STORED == 0)
    if is_final:
        inline_consumers(s, store)
    _, lane, vector = s.split(s.fuse(*s.get_loops(store)[-2:]), [None, WARP, STORED if whole else 1])
    s.bind(lane, "threadIdx.x")
    s.vectorize(vector)


def tiles(s: Schedule, block: SBlockRV, columns: int) -> SBlockRV:
    """Cut the last two axes of a copy into tiles of 16 rows; returns the block of one tile."""
    i, j = s.get_loops(block)[-2:]
    i, row = s.split(i, [None, SIDE])
    j, column = s.split(j, [None, columns])
    s.reorder(i, j, row, column)
    s.unroll(i)
    s.unroll(j)
    return s.blockize(row)


def spread_over_lanes(layout: Layout, columns: int) -> Callable[..., list[Expr]]:
    """The map from a matrix, its last two axes, to its tiles, each as (lane, register)."""

    def index_map(*indices: Expr) -> list[Expr]:
        *outer, i, j = indices
        return [*outer, i // SIDE, j // columns, *layout(i % SIDE, j % columns)]

    return index_map


def pipeline(s: Schedule, loop: LoopRV, *, stages: Sequence[int], order: Sequence[int]) -> None:
    """Let the statements in a loop run ahead: each in its stage, within an iteration in this order."""
    s.annotate(loop, "software_pipeline_stage", list(stages))
    s.annotate(loop, "software_pipeline_order", list(order))


def ask(k: Knobs, w: Conv) -> Plan:
    """Ask for the knobs, with defaults that fit the workload."""
    default, depth = default_plan(w), DEPTH_BYTES // element_bytes(w)
    plan = Plan(
        block_m=k.choice("block_m", SIZES, default.block_m),
        block_n=k.choice("block_n", SIZES, default.block_n),
        block_k=k.choice("block_k", tuple(depth * pieces for pieces in (1, 2, 4, 8)), default.block_k),
        warps_m=k.choice("warps_m", WARPS, default.warps_m),
        warps_n=k.choice("warps_n", WARPS, default.warps_n),
        stages=k.choice("stages", STAGES, default.stages),
        fragments=k.choice("fragments", (NOW, AHEAD), default.fragments),
        split_k=k.choice("split_k", SPLITS, default.split_k),
    )
    k.condition(
        "warps have whole tiles of 16 pixels and 16 channels",
        lambda c: (c["block_m"] % (SIDE * c["warps_m"]) == 0) & (c["block_n"] % (SIDE * c["warps_n"]) == 0),
    )
    k.condition(
        "fragments are loaded ahead where a step has two slices, and there are three stages and steps for them",
        lambda c: (c["fragments"] == NOW) | can_load_ahead(w, of_columns(c)),
    )
    taps, extent = summed(w)
    k.search_only("a step is not mostly padding", lambda c: c["block_k"] * c["split_k"] < 2 * extent)
    k.search_only(
        "a reduction is split where blocks are few",
        lambda c: (c["split_k"] == 1) | (tile_count(w, of_columns(c)) <= FEW_BLOCKS),
    )
    k.search_only(
        "as many stages as steps at most", lambda c: c["stages"] <= np.maximum(of_columns(c).steps(w), STAGES[0])
    )
    k.search_only("few enough accumulators", lambda c: of_columns(c).accumulators <= MAX_ACCUMULATORS)
    k.search_only(f"at least {MIN_THREADS} threads", lambda c: of_columns(c).warps * WARP >= MIN_THREADS)
    k.search_only(
        "all threads' registers fit",
        lambda c: (of_columns(c).accumulators + OWN_REGISTERS) * of_columns(c).warps * WARP <= gpu.REGISTERS,
    )
    return plan


def of_columns(c: Columns) -> Plan:
    """The plans of many configs."""
    return Plan(**{name: c[name] for name in Plan._fields})


def can_load_ahead(w: Conv, plan: Plan) -> Any:
    """Whether registers can be loaded a slice ahead: TVM's pipeline has no constant to wait for otherwise."""
    slices = plan.block_k * element_bytes(w) // DEPTH_BYTES
    return (slices >= 2) & (plan.stages >= 3) & (plan.steps(w) >= plan.stages - 1)


def tile_count(w: Conv, plan: Plan) -> Any:
    """Tiles of the output, of all groups."""
    pixels, channels = w.N * math.prod(w.out), w.O // w.groups
    return w.groups * -(-pixels // plan.block_m) * -(-channels // plan.block_n)


def usage(w: Conv, c: Columns) -> Usage:
    """What configs use of a device."""
    plan = of_columns(c)
    blocks, steps = plan.split_k * tile_count(w, plan), plan.steps(w)
    staged, products = (plan.block_m + plan.block_n) * plan.block_k, plan.block_m * plan.block_n * plan.block_k
    return Usage(
        threads=plan.warps * WARP,
        shared_bytes=0 * plan.warps,
        accumulators=plan.accumulators,
        blocks=blocks,
        dynamic_shared_bytes=plan.dynamic_shared_bytes(w),
        steps=steps,
        products=products // (plan.warps * WARP),
        intensity=products / staged,
        traffic=blocks * steps * staged,
        all_threads=blocks * plan.warps * WARP,
    )


def default_plan(w: Conv) -> Plan:
    """Tiles that fit the shape, in the shared memory of every architecture."""
    pixels, channels = w.N * math.prod(w.out), w.O // w.groups
    _, extent = summed(w)
    depth = DEPTH_BYTES // element_bytes(w)

    def plan(tile: tuple[int, int, int, int], stages: int = 4, split_k: int = 1) -> Plan:
        block_m, warps_m = narrowed(pixels, tile[0], tile[2])
        block_n, warps_n = narrowed(channels, tile[1], tile[3])
        pieces = (2, 1) if block_m * block_n > SPLIT_TILE[0] * SPLIT_TILE[1] else (4, 2, 1)
        block_k = min((depth * n for n in pieces), key=lambda size: -(-extent // size) * size)  # with the fewest zeros
        return Plan(block_m, block_n, block_k, warps_m, warps_n, stages, NOW, split_k)

    candidates = [plan(tile) for tile in TILES]
    chosen = next((each for each in candidates if tile_count(w, each) >= ENOUGH_BLOCKS), None)
    if chosen is None:
        chosen = plan(SPLIT_TILE)
        fitting = (n for n in SPLITS if n * tile_count(w, chosen) >= ENOUGH_BLOCKS or 2 * n * chosen.block_k > extent)
        chosen = chosen._replace(split_k=next(fitting, SPLITS[-1]))
    for stages in (4, 3, 2):
        chosen = chosen._replace(stages=stages)
        if stages <= chosen.steps(w) and chosen.dynamic_shared_bytes(w) <= LEAST_SHARED_BYTES:
            break
    return chosen._replace(fragments=AHEAD if can_load_ahead(w, chosen) else NOW)


def narrowed(extent: int, size: int, warps: int) -> tuple[int, int]:
    """A side of a tile, and the warps along it, halved while half of it covers the extent."""
    while size > SIDE and size // 2 >= extent:
        size, warps = size // 2, max(warps // 2, 1) if size // 2 < SIDE * warps else warps
    return size, warps
