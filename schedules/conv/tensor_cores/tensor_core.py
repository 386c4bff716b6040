"""Tensor cores: a warp multiplies tiles of 16 × 16, whose operands are copied asynchronously, steps ahead.

From `conflict_free`: the same product of matrices, pixels × channels, summed over the filter's taps and the input
channels. What changes, each by a rewrite or two:

* What is multiplied at once are no two numbers but two tiles: `tensorize` replaces the innermost 16 × 16 × 16 products
  (8 deep in TF32) by two mma.sync. Operands and sums lie in registers, spread over the 32 lanes of a warp as the
  instruction wants them: buffers of the scope "warp". A block is a few warps, each with a rectangle of tiles; what it
  loads once serves a whole row, or column, of them.
* Operands go from shared memory to registers by ldmatrix, which reads eight rows of 16 bytes at a time. Rows have an
  odd number of 16 bytes, the last of them unused: eight that follow each other lie in distinct banks.
* Operands come to shared memory by cp.async, 16 bytes each, not through registers, and some steps of the reduction
  ahead: a software pipeline holds `stages` of them. Eight neighbouring lanes copy the same 16 bytes of eight rows, to
  distinct banks again. Sizes that tiles do not divide are padded with zeros on this way.
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

from tvm.ir import Expr
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV
from tvm.tirx import IndexMap, const

from tvmconv import gpu
from tvmconv.gpu import WARP
from tvmconv.knobs import Knobs
from tvmconv.library import schedule
from tvmconv.workloads import Conv
from tvmconv.workloads.declaration import OUTPUT, TAPS
from tvmconv.workloads.layout import CHANNELS_FIRST

from ...vocabulary import bind_grid, inline_consumers, inline_producers
from ..plan import ASYNC_BYTES
from ..sums import add_up
from ..tiles import element_bytes
from .intrinsics import REGISTERS, SHARED, SIDE, Layout, intrinsics, sums_layout
from .tensor_plan import AHEAD, COPIED, SUM_ROW, ask, channels_last, copies_16_bytes, summed, usage

ROWS = 8  # of 16 bytes, that ldmatrix reads together, and eight lanes copy
STORED = 4  # neighbouring sums that a lane stores
ZERO = const(0, "int32")


def sums_products(w: Conv) -> bool:
    """Whether an output is the sum of several products."""
    return math.prod(summed(w)) > 1


@schedule(
    "conv1d",
    "conv2d",
    "conv3d",
    dtypes=("float16", "bfloat16", "tf32"),
    usage=usage,
    condition=sums_products,
    promising=lambda w: w.layout == CHANNELS_FIRST and w.groups < w.O,  # of others, `mma_sync` is faster
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
    grid = (column, row) if channels_last(w) else (row, column)
    s.reorder(*outer, *grid, row_warp, column_warp, tap, step, piece, row_tile, column_tile, i, j, d)
    product = s.blockize(i)
    step = s.fuse(tap, step)
    bind_grid(s, s.fuse(*outer), *grid)
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
    # The output is written over (group, channel) from now on. Over all channels, TVM would forget which of a group's
    # are padding, as soon as some are, and store them to the next group.
    (result,) = s.get_consumers(conv)
    inline_consumers(s, result)
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
    add_up(s, total)
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
