"""Tensor cores by rewriting alone: a warp multiplies tiles of 16 × 16, whose operands are copied asynchronously ahead.

It computes the same matrix product as `conflict_free`: pixels × channels, summed over the filter's taps and the input
channels. Each difference is one or two rewrites:

* `tensorize` replaces the innermost 16 × 16 × 16 products (8 deep in TF32) by two mma.sync instructions. Operands and
  accumulators are distributed over the registers of a warp's 32 lanes, in buffers of the scope "warp". A block consists
  of a few warps, each with a rectangle of tiles, so that one load serves a whole row or column of tiles.
* ldmatrix loads operands from shared memory to registers; it reads eight rows of 16 bytes at a time. A row has an odd
  number of 16-byte units, the last of them unused, so eight successive rows lie in distinct banks.
* cp.async copies operands to shared memory, 16 bytes each and without registers, some k-tiles ahead: a software
  pipeline holds `stages` of them. Eight neighbouring lanes copy the same 16 bytes of eight rows, again to distinct
  banks. Sizes that the tiles do not divide are padded with zeros during the copy.
* With `fragment_prefetch` 1, registers are loaded one slice before they are multiplied, in an inner pipeline.
* The accumulators are stored through shared memory, so that neighbouring lanes store neighbouring outputs, after the
  epilogue.
* `split_k` distributes a tile's reduction over several blocks, for small images with many channels, as in
  `implicit_gemm`.

The schedule is made for channels-last layout ("nhwc") with a multiple of 8 channels per group (4 in TF32), so that 16
bytes are neighbouring channels of one tap and pixel. Other shapes use copies of single elements, which cannot be
asynchronous in 16 bits; taps and channels then form one axis, so that an image of three channels is not padded to 16.
With channels first, tiles are channels × pixels, and neighbouring lanes store neighbouring pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from tvm.ir import Expr
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV
from tvm.tirx import IndexMap, const

from tvmconv.registry import schedule
from tvmconv.space import Knobs
from tvmconv.target import NUM_BANKS, WARP_SIZE
from tvmconv.workloads import Conv
from tvmconv.workloads.conv_te import OUTPUT_AXES, TAP_AXES
from tvmconv.workloads.dtypes import get_itemsize
from tvmconv.workloads.features import ALL_FEATURES
from tvmconv.workloads.layout import CHANNELS_FIRST, CHANNELS_LAST

from ...primitives import bind_grid, inline_consumers, inline_producers
from ..direct_config import MIN_ASYNC_COPY_BYTES
from ..reduction import split_k_over_blocks
from .tensor_intrinsics import (
    SHARED_SCOPE,
    TILE_SIZE,
    WARP_SCOPE,
    FragmentLayout,
    TensorIntrinsics,
    accumulator_layout,
    register_intrinsics,
)
from .tensorized_config import (
    ACCUMULATOR_ROW_PADDING_WORDS,
    COPY_BYTES,
    PREFETCH,
    TensorizedTileConfig,
    can_copy_16_bytes,
    compute_usage,
    declare_knobs,
    get_reduction_extents,
    is_channels_last,
)

LDMATRIX_ROWS = 8  # rows of 16 bytes in one 8 × 8 matrix of ldmatrix, which eight lanes copy
STORE_VECTOR = 4  # contiguous accumulators that a lane stores
ZERO = const(0, "int32")


def has_reduction(w: Conv) -> bool:
    """Whether an output is the sum of several products."""
    return math.prod(get_reduction_extents(w)) > 1


@schedule(
    "conv1d",
    "conv2d",
    "conv3d",
    dtypes=("float16", "bfloat16", "tf32"),
    usage=compute_usage,
    condition=has_reduction,
    search_if=lambda w: w.layout == CHANNELS_FIRST and w.groups < w.O,  # `mma_sync` is faster for channels last
    device_kinds=("cuda",),
    min_arch=80,
    features=ALL_FEATURES,
)
def tensor_core(s: Schedule, w: Conv, k: Knobs) -> None:
    """Tile rows and columns as (block, warp, tile, element), and the reduction as (k_tile, slice, element)."""
    config, tensor_intrinsics = declare_knobs(k, w), register_intrinsics(w.storage)
    (block_rows, row_warps), (columns, column_warps) = config.rows_and_columns(w)

    # A matrix product, padded to whole tiles, whose operands are staged in shared memory.
    product = convert_to_matrix_product(s, w)
    s.pad_einsum(product, [1, block_rows, columns, 1, config.block_k * config.split_k])
    if config.split_k > 1:
        product = split_k_over_blocks(s, product, depth_axis=-1, num_parts=config.split_k)
    smem_copies = [s.cache_read(product, operand, SHARED_SCOPE) for operand in (0, 1)]
    for smem_copy in smem_copies:
        inline_producers(s, smem_copy)

    # The loops over blocks, warps and k-tiles enclose the product of two tiles.
    *outer_loops, row, column, tap, depth = s.get_loops(product)
    row, row_warp, row_tile, i = s.split(row, [None, row_warps, block_rows // row_warps // TILE_SIZE, TILE_SIZE])
    column, column_warp, column_tile, j = s.split(
        column, [None, column_warps, columns // column_warps // TILE_SIZE, TILE_SIZE]
    )
    k_tile, mma_k_slice, d = s.split(depth, [None, config.block_k // tensor_intrinsics.mma_k, tensor_intrinsics.mma_k])
    grid = (column, row) if is_channels_last(w) else (row, column)
    s.reorder(*outer_loops, *grid, row_warp, column_warp, tap, k_tile, mma_k_slice, row_tile, column_tile, i, j, d)
    product = s.blockize(i)
    k_tile = s.fuse(tap, k_tile)
    bind_grid(s, s.fuse(*outer_loops), *grid)
    warp = s.fuse(row_warp, column_warp)
    s.bind(warp, "threadIdx.y")

    # Operands are copied to shared memory once per k-tile and to registers once per slice; accumulators go back.
    smem_store = s.cache_write(product, 0, SHARED_SCOPE)
    accumulators = s.cache_write(product, 0, WARP_SCOPE)
    for block in (accumulators, smem_store):
        s.reverse_compute_at(block, warp)
    fragment_loads = [s.cache_read(product, operand, WARP_SCOPE) for operand in (0, 1)]
    for fragment_load in fragment_loads:
        s.compute_at(fragment_load, mma_k_slice)
    for smem_copy, by_row in zip(smem_copies, (is_channels_last(w), True), strict=True):
        s.compute_at(smem_copy, k_tile)
        cooperative_copy_rows(s, w, smem_copy, config.warps, is_row_contiguous=by_row)
    cooperative_store(s, w, smem_store, is_final=config.split_k == 1)

    # Tiles are replaced by instructions, and copies run ahead of the products in software pipelines.
    tensorize_tiles(s, w, tensor_intrinsics, product, k_tile, fragment_loads, accumulators)
    pipeline_copies(s, w, config, k_tile, mma_k_slice)
    for loop in (row_tile, column_tile):
        s.unroll(loop)


def tensorize_tiles(
    s: Schedule,
    w: Conv,
    tensor_intrinsics: TensorIntrinsics,
    product: SBlockRV,
    k_tile: LoopRV,
    fragment_loads: Sequence[SBlockRV],
    accumulators: SBlockRV,
) -> None:
    """Replace the loads of fragments, the products and the stores of accumulators by instructions of a warp."""
    fragment_loaders = [
        (tensor_intrinsics.rows, tensor_intrinsics.rows_layout),
        (tensor_intrinsics.columns, tensor_intrinsics.columns_layout),
    ]
    for fragment_load, (name, layout) in zip(
        fragment_loads, fragment_loaders if is_channels_last(w) else reversed(fragment_loaders), strict=True
    ):
        s.transform_layout(fragment_load, ("write", 0), make_lane_map(layout, tensor_intrinsics.mma_k))
        s.tensorize(blockize_tiles(s, fragment_load, tensor_intrinsics.mma_k), name)
    s.transform_layout(accumulators, ("read", 0), make_lane_map(accumulator_layout, TILE_SIZE))
    accumulators = blockize_tiles(s, accumulators, TILE_SIZE)
    s.storage_align(accumulators, 0, axis=-2, factor=NUM_BANKS, offset=ACCUMULATOR_ROW_PADDING_WORDS)
    s.tensorize(accumulators, tensor_intrinsics.store)
    (clear,) = s.get_child_blocks(s.decompose_reduction(product, k_tile))
    s.tensorize(s.get_loops(clear)[-2], tensor_intrinsics.clear)
    (multiply,) = s.get_child_blocks(product)
    s.tensorize(
        s.get_loops(multiply)[-3],
        tensor_intrinsics.multiply if is_channels_last(w) else tensor_intrinsics.multiply_columns,
    )


def pipeline_copies(s: Schedule, w: Conv, config: TensorizedTileConfig, k_tile: LoopRV, mma_k_slice: LoopRV) -> None:
    """Let the copies of k-tiles, and optionally of fragments, run ahead of the products."""
    last_stage = config.stages - 1
    if config.fragment_prefetch == PREFETCH:
        annotate_pipeline(s, mma_k_slice, stages=[0, 0, 1], order=[0, 1, 2])
        annotate_pipeline(s, k_tile, stages=[0, 0, last_stage - 1, last_stage, last_stage], order=[0, 1, 3, 2, 4])
    else:
        s.unroll(mma_k_slice)
        annotate_pipeline(s, k_tile, stages=[0, 0, last_stage], order=[0, 1, 2])
    if can_copy_16_bytes(w) or get_itemsize(w.storage) >= MIN_ASYNC_COPY_BYTES:
        s.annotate(k_tile, "software_pipeline_async_stages", [0])


def convert_to_matrix_product(s: Schedule, w: Conv) -> SBlockRV:
    """Turn the convolution into a matrix product.

    Returns:
        The reduction block, over (group, row, column; tap, depth). Its operands are views (group, tap, pixel, depth)
        and (group, tap, channel, depth).
    """
    conv = s.get_sblock("sum")
    group, channel = {"v_g": 1}, {"v_o": 1}
    pixel = make_axis_strides({"n": w.N, **dict(zip(OUTPUT_AXES[w.spatial_ndim], w.output_size, strict=True))})
    taps, channels = dict(zip(TAP_AXES[w.spatial_ndim], w.kernel, strict=True)), {"rc": w.C // w.groups}
    if can_copy_16_bytes(w):
        tap, depth = make_axis_strides(taps), make_axis_strides(channels)
    else:  # in the weight's memory order
        tap, depth = {}, make_axis_strides({**taps, **channels} if is_channels_last(w) else {**channels, **taps})
    rows, columns = (pixel, channel) if is_channels_last(w) else (channel, pixel)
    operands = ((group, tap, pixel, depth), (group, tap, channel, depth))
    for kind, operand_idx, roles in (
        ("read", 0, operands[0]),
        ("read", 1, operands[1]),
        ("write", 0, (group, rows, columns)),
    ):
        s.reindex(conv, (kind, operand_idx))
        block = s.get(conv)
        region = (block.reads if kind == "read" else block.writes)[operand_idx].region
        s.transform_layout(conv, (kind, operand_idx), make_flattening_map([index.min.name for index in region], roles))
    iter_var_names = [axis.var.name for axis in s.get(conv).iter_vars]
    s.transform_block_layout(conv, make_flattening_map(iter_var_names, (group, rows, columns, tap, depth)))
    # The output keeps the axes (group, channel). With one axis over all channels, TVM would lose track of the padded
    # channels of a group and store them to the next group.
    (output_block,) = s.get_consumers(conv)
    inline_consumers(s, output_block)
    return conv


AxisStrides = Mapping[str, int]  # stride of each original axis within a flattened axis


def make_axis_strides(extents_by_axis: Mapping[str, int]) -> AxisStrides:
    """Return the strides of axes within one flattened axis, the last of them innermost.

    Axes of extent 1 are left out, as TVM would find no index for a flattened axis of extent 1. If all have extent 1,
    one axis that every view contains stands for them.
    """
    names, extents = list(extents_by_axis), list(extents_by_axis.values())
    axis_strides = {
        f"v_{name}": math.prod(extents[axis_idx + 1 :]) for axis_idx, name in enumerate(names) if extents[axis_idx] > 1
    }
    return axis_strides or {f"v_{name}": 1 for name in names if name in ("n", "rc")}


def make_flattening_map(axis_names: Sequence[str], axis_strides: Sequence[AxisStrides]) -> IndexMap:
    """Return the index map from the original axes to the flattened axes."""

    def index_map(*indices: Expr) -> list[Expr]:
        index_by_axis = dict(zip(axis_names, indices, strict=True))
        return [
            sum((index_by_axis[axis] * stride for axis, stride in role.items() if axis in index_by_axis), ZERO)
            for role in axis_strides
        ]

    return IndexMap.from_func(index_map, ndim=len(axis_names), index_dtype="int32")


def cooperative_copy_rows(s: Schedule, w: Conv, copy: SBlockRV, num_warps: int, *, is_row_contiguous: bool) -> None:
    """Distribute a copy to shared memory among all warps, 16 bytes or one element per access, to padded rows.

    Args:
        s: The schedule.
        w: The workload.
        copy: Block of the copy.
        num_warps: Warps per block.
        is_row_contiguous: Whether the elements of a row, not those of a column, are contiguous in memory.
    """
    row, column = s.get_loops(copy)[-2:]
    chunk_elements = COPY_BYTES // get_itemsize(w.storage)
    if can_copy_16_bytes(w):
        row, row_in_group = s.split(row, [None, LDMATRIX_ROWS])
        column, vector = s.split(column, [None, chunk_elements])
        s.reorder(row, column, row_in_group, vector)
        s.vectorize(vector)
        loop_order = [row, column, row_in_group]
    else:
        loop_order = [row, column] if is_row_contiguous else [column, row]
        s.reorder(*loop_order)
    _, warp, lane = s.split(s.fuse(*loop_order), [None, num_warps, WARP_SIZE])
    s.bind(warp, "threadIdx.y")
    s.bind(lane, "threadIdx.x")
    s.storage_align(copy, 0, axis=-2, factor=2 * chunk_elements, offset=chunk_elements)


def cooperative_store(s: Schedule, w: Conv, store: SBlockRV, *, is_final: bool) -> None:
    """Let the lanes of a warp store its tile to contiguous addresses, with the epilogue if the sums are final."""
    stores_channels = is_channels_last(w) and w.output_layout == CHANNELS_LAST
    is_vectorizable = not is_final or (stores_channels and w.O // w.groups % STORE_VECTOR == 0)
    if is_final:
        inline_consumers(s, store)
    _, lane, vector = s.split(
        s.fuse(*s.get_loops(store)[-2:]), [None, WARP_SIZE, STORE_VECTOR if is_vectorizable else 1]
    )
    s.bind(lane, "threadIdx.x")
    s.vectorize(vector)


def blockize_tiles(s: Schedule, block: SBlockRV, num_columns: int) -> SBlockRV:
    """Split the last two axes of a copy into tiles of 16 rows, and return the block of one tile."""
    i, j = s.get_loops(block)[-2:]
    i, row = s.split(i, [None, TILE_SIZE])
    j, column = s.split(j, [None, num_columns])
    s.reorder(i, j, row, column)
    s.unroll(i)
    s.unroll(j)
    return s.blockize(row)


def make_lane_map(layout: FragmentLayout, num_columns: int) -> Callable[..., list[Expr]]:
    """Return the index map from a matrix (its last two axes) to its tiles, each as (lane, register)."""

    def index_map(*indices: Expr) -> list[Expr]:
        *outer, i, j = indices
        return [*outer, i // TILE_SIZE, j // num_columns, *layout(i % TILE_SIZE, j % num_columns)]

    return index_map


def annotate_pipeline(s: Schedule, loop: LoopRV, *, stages: Sequence[int], order: Sequence[int]) -> None:
    """Annotate a loop as a software pipeline, with the stage and the order of each of its statements."""
    s.annotate(loop, "software_pipeline_stage", list(stages))
    s.annotate(loop, "software_pipeline_order", list(order))
