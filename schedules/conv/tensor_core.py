"""Tensor cores: a warp multiplies 16 × 16 tiles by mma.sync, whose operands are copied asynchronously, steps ahead.

From `conflict_free`: the same matrix product, pixels × channels, its sum over the taps of the filter and the input
channels. What changes, each by one or two rewrites of the scheduled loops:

* The unit is no product of two numbers but of two tiles: `tensorize` replaces the innermost 16 × 16 × 16 loops (8 deep in
  TF32) by mma.sync. Operands and sums are spread over the 32 lanes of a warp: buffers of the scope "warp", whose layout
  is that of the instruction. A block is a few warps, each with a rectangle of such tiles, for each of which an operand
  tile that was loaded once is used.
* The operands go from shared memory to registers by ldmatrix, which reads 8 rows of 16 bytes at a time. Rows are padded
  to an odd number of 16 bytes, so that any 8 of them lie in different banks; sizes that tiles do not divide are padded
  with zeros there.
* They come to shared memory by cp.async, 16 bytes at a time and past the registers, some steps of the reduction ahead:
  the software pipeline keeps as many `stages` of them. Eight neighbouring lanes copy one column of 16 bytes of eight
  rows, without conflicts for the same reason.
* With `fragments` "ahead", also what ldmatrix loads is one slice ahead of what is multiplied: a pipeline inside of the
  first.
* The sums leave through shared memory, for the epilogue to be applied where neighbouring lanes store neighbours.
* `split_k` shares a tile's sums among blocks, as in `implicit_gemm`: for small images with many channels.

16 bytes of an operand are input channels of one tap and pixel: channels last in memory ("nhwc"), and a multiple of 8 in
a group (4 in TF32). All else is right too, but is copied element by element, and in 16 bits not asynchronously: with
taps and channels as one axis, so that a filter of three input channels does not multiply zeros mostly. Channels first,
the tiles are transposed, channels × pixels, so that neighbouring lanes store neighbouring pixels.
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

from tvmconv.gpu import REGISTERS, WARP
from tvmconv.knobs import Columns, Knobs
from tvmconv.knobs.space import Usage
from tvmconv.library import schedule
from tvmconv.workloads import Conv
from tvmconv.workloads.declaration import OUTPUT, TAPS

from ..vocabulary import bind_grid, inline_consumers, inline_producers
from .implicit_gemm import ADDING_THREADS
from .intrinsics import DEPTH_BYTES, SHARED, SIDE, Layout, intrinsics, sums_layout
from .intrinsics import REGISTERS as WARP_SCOPE
from .tiles import element_bytes

COPIED = 16  # bytes, by cp.async
ROWS = 8  # that ldmatrix reads together, and that eight lanes copy
STORED = 4  # neighbouring sums that a lane stores
SUM_BYTES = 4
ZERO = const(0, "int32")

NOW, AHEAD = "now", "ahead"
SPLITS = (1, 2, 4, 8, 16, 32)
STAGES = (1, 2, 3, 4, 5, 6)


class Plan(NamedTuple):
    """One config, or many as columns.

    Attributes:
        block_m: pixels of a block.
        block_n: output channels of a block.
        block_k: input channels of a step.
        warps_m: warps along the pixels.
        warps_n: warps along the output channels.
        stages: steps whose operands are in shared memory or on their way there.
        fragments: whether registers are loaded a slice ahead.
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


@schedule("conv1d", "conv2d", "conv3d", dtypes=("float16", "bfloat16", "tf32"), kinds=("cuda",), since=80)
def tensor_core(s: Schedule, w: Conv, k: Knobs) -> None:
    """Tiles of pixels and of channels are (block, warp, tile, row or column of it); steps (step, slice, depth of it)."""
    plan = Plan(
        block_m = k.choice("block_m", (16, 32, 64, 128, 256), 64),
        block_n = k.choice("block_n", (16, 32, 64, 128, 256), 64),
        block_k = k.choice("block_k", (8, 16, 32, 64, 128), 32),
        warps_m = k.choice("warps_m", (1, 2, 4), 2),
        warps_n = k.choice("warps_n", (1, 2, 4), 2),
        stages = k.choice("stages", STAGES, 3),
        fragments = k.choice("fragments", (NOW, AHEAD), NOW),
        split_k = k.choice("split_k", SPLITS, 1),
    )
    tensor = intrinsics(w.storage)
    last = w.layout == "nhwc"
    pixels, channels = (plan.block_m, plan.warps_m), (plan.block_n, plan.warps_n)
    sides = (pixels, channels) if last else (channels, pixels)

    product = as_product(s, w)
    s.pad_einsum(product, [1, sides[0][0], sides[1][0], 1, plan.block_k * plan.split_k])
    if plan.split_k > 1:
        product = split_over_blocks(s, product, plan.split_k)
    copies = [s.cache_read(product, operand, SHARED) for operand in (0, 1)]
    for copy in copies:
        inline_producers(s, copy)

    *outer, row, column, tap, depth = s.get_loops(product)
    (row, row_warp, row_tile, i), (column, column_warp, column_tile, j) = (
        s.split(loop, [None, warps, size // warps // SIDE, SIDE]) for loop, (size, warps) in zip((row, column), sides)
    )
    step, piece, inner = s.split(depth, [None, plan.block_k // tensor.depth, tensor.depth])
    s.reorder(*outer, row, column, row_warp, column_warp, tap, step, piece, row_tile, column_tile, i, j, inner)
    step = s.fuse(tap, step)
    product = s.blockize(i)
    bind_grid(s, s.fuse(*outer), *((column, row) if last else (row, column)))
    warp = s.fuse(row_warp, column_warp)
    s.bind(warp, "threadIdx.y")

    store = s.cache_write(product, 0, SHARED)
    sums = s.cache_write(product, 0, WARP_SCOPE)
    for block in (sums, store):
        s.reverse_compute_at(block, warp)
    loads = [s.cache_read(product, operand, WARP_SCOPE) for operand in (0, 1)]
    for load in loads:
        s.compute_at(load, piece)
    for operand, copy in enumerate(copies):
        s.compute_at(copy, step)
        copy_chunks(s, w, copy, plan.warps, by_row=last or operand == 1)

    names = (tensor.rows, tensor.columns)
    layouts = (tensor.rows_layout, tensor.columns_layout)
    for load, which in zip(loads, (0, 1) if last else (1, 0)):
        s.transform_layout(load, ("write", 0), spread(layouts[which], tensor.depth))
        s.tensorize(tiles(s, load, tensor.depth), names[which])
    s.transform_layout(sums, ("read", 0), spread(sums_layout, SIDE))
    (clear,) = s.get_child_blocks(s.decompose_reduction(product, step))
    s.tensorize(s.get_loops(clear)[-2], tensor.clear)
    tile = tiles(s, sums, SIDE)
    sums = s.blockize(tile)
    s.storage_align(sums, 0, axis=-2, factor=32, offset=8)
    s.tensorize(sums, tensor.store)
    (multiply,) = s.get_child_blocks(product)
    s.tensorize(s.get_loops(multiply)[-3], tensor.multiply if last else tensor.multiply_columns)

    if plan.split_k == 1:
        inline_consumers(s, store)
    vector = STORED if last and (w.O // w.groups) % STORED == 0 else 1
    _, lane, vector = s.split(s.fuse(*s.get_loops(store)[-2:]), [None, WARP, vector])
    s.bind(lane, "threadIdx.x")
    s.vectorize(vector)
    if plan.fragments == AHEAD:
        pipeline(s, piece, [0, 0, 1], [0, 1, 2])
        pipeline(s, step, [0, 0, plan.stages - 2, plan.stages - 1, plan.stages - 1], [0, 1, 3, 2, 4])
    elif plan.stages > 1:
        pipeline(s, step, [0, 0, plan.stages - 1], [0, 1, 2])
    if vectors(w) or element_bytes(w) == 4:
        s.annotate(step, "software_pipeline_async_stages", [0])
    for loop in (row_tile, column_tile) if plan.fragments == AHEAD else (piece, row_tile, column_tile):
        s.unroll(loop)


def vectors(w):
    chunk = COPIED // element_bytes(w)
    return w.layout == "nhwc" and (w.C // w.groups) % chunk == 0


def pipeline(s, loop, stages, order):
    s.annotate(loop, "software_pipeline_stage", stages)
    s.annotate(loop, "software_pipeline_order", order)


def copy_chunks(s, w, copy, warps, *, by_row):
    chunk = COPIED // element_bytes(w)
    row, column = s.get_loops(copy)[-2:]
    s.storage_align(copy, 0, axis=-2, factor=2 * chunk, offset=chunk)
    if vectors(w):
        row, eight = s.split(row, [None, ROWS])
        column, vector = s.split(column, [None, chunk])
        s.reorder(row, column, eight, vector)
        s.vectorize(vector)
        fused = s.fuse(row, column, eight)
    elif by_row:
        fused = s.fuse(row, column)
    else:
        s.reorder(column, row)
        fused = s.fuse(column, row)
    _, thread, lane = s.split(fused, [None, warps, WARP])
    s.bind(thread, "threadIdx.y")
    s.bind(lane, "threadIdx.x")


def split_over_blocks(s, total, parts):
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


def tiles(s: Schedule, block: SBlockRV, columns: int) -> LoopRV:
    i, j = s.get_loops(block)[-2:]
    i, row = s.split(i, [None, SIDE])
    j, column = s.split(j, [None, columns])
    s.reorder(i, j, row, column)
    s.unroll(i)
    s.unroll(j)
    return row


def spread(layout, columns):
    def index_map(*indices):
        *outer, i, j = indices
        return [*outer, i // SIDE, j // columns, *layout(i % SIDE, j % columns)]

    return index_map


def as_product(s: Schedule, w: Conv) -> SBlockRV:
    """."""
    conv = s.get_sblock("sum")
    group, channel = {"v_g": 1}, {"v_o": 1}
    pixel = strides(("n", *OUTPUT[w.rank]), (w.N, *w.out))
    if vectors(w):
        tap, depth = strides(TAPS[w.rank], w.kernel), {"v_rc": 1}
    elif w.layout == "nhwc":
        tap, depth = {}, strides((*TAPS[w.rank], "rc"), (*w.kernel, w.C // w.groups))
    else:
        tap, depth = {}, strides(("rc", *TAPS[w.rank]), (w.C // w.groups, *w.kernel))
    rows, columns = (pixel, channel) if w.layout == "nhwc" else (channel, pixel)
    views = (("read", 0, (group, tap, pixel, depth)), ("read", 1, (group, tap, channel, depth)), ("write", 0, (group, rows, columns)))
    for kind, operand, roles in views:
        s.reindex(conv, (kind, operand))
        block = s.get(conv)
        region = (block.reads if kind == "read" else block.writes)[operand].region
        s.transform_layout(conv, (kind, operand), flattened([index.min.name for index in region], roles))
    s.transform_block_layout(conv, flattened([axis.var.name for axis in s.get(conv).iter_vars], (group, rows, columns, tap, depth)))
    return conv


def strides(axes: Sequence[str], sizes: Sequence[int]) -> dict[str, int]:
    """The distance of two neighbours along each of these axes, flattened into one."""
    return {f"v_{axis}": math.prod(sizes[place + 1 :]) for place, axis in enumerate(axes)}


def flattened(axes: Sequence[str], roles: Sequence[Mapping[str, int]]) -> IndexMap:
    """The map from these axes to one for each role."""

    def index_map(*indices: Expr) -> list[Expr]:
        at = dict(zip(axes, indices, strict=True))
        return [sum((at[axis] * stride for axis, stride in role.items() if axis in at), ZERO) for role in roles]

    return IndexMap.from_func(index_map, ndim=len(axes), index_dtype="int32")
