"""Convolution as a matrix product, channels × pixels: the tiles of `direct` on the flattened output, tuned.

The rows and columns of the whole batch form one axis of pixels, as in `conflict_free`. A tile of a 14 × 14 or 7 × 7
image therefore need not follow its rows, and several images share a block. The input is staged by filter tap, with one
value for each tap and pixel. 1×1 filters, for which this costs nothing, gain most; `direct` reads less for larger
filters.

Tiles that overhang are padded with zeros during the copy to shared memory, except for split or sliced reductions.

`conflict_free` fixes warps along the pixels; here everything is a knob, including the slices, the pipeline and the
weight layout of `direct`. The knob `split_k` splits the reduction of a tile over blocks by input channels, for small
images with too few tiles to fill a GPU. The blocks write partial sums to a workspace, and a second kernel adds them up
and applies the epilogue. Measured: tuning_logs/nvidia-h200/.
"""

import functools
import math

from tvm.ir import Expr
from tvm.s_tir import Schedule
from tvm.tirx import IndexMap

from tvmconv.registry import schedule
from tvmconv.space import Columns, Knobs
from tvmconv.space.search_space import ResourceUsage
from tvmconv.workloads import Conv
from tvmconv.workloads.features import ALL_FEATURES

from ..primitives import inline_producers
from .bias_init import initialize_with_bias
from .block_tiling import (
    LoopOrder,
    ReductionBlocks,
    pipeline_operand_copies,
    set_weight_layout,
    split_reduction,
    tile_output,
)
from .conflict_free import flatten_pixels
from .direct_config import DirectTileConfig, TiledAxes, TiledAxis
from .reduction import DTYPES, sort_axes_by_memory, split_k_over_blocks

MAX_SMALL_IMAGE_PIXELS = 256  # blocks are few up to this size: measured on the 14 × 14 and 7 × 7 images of ResNet-50
KERNEL_KNOBS = ("tile_rz", "tile_ry", "tile_rx")  # depth, height and width, of which the last `spatial_ndim` are used


def compute_usage(w: Conv, columns: Columns) -> ResourceUsage:
    """Return the resources that configs use."""
    config = DirectTileConfig.from_columns(columns, make_tiled_axes(w))
    f, p = (tile.size for tile in config.output)
    taps = config.taps_per_k_tile * config.sliced_k
    return config.compute_usage(w, (taps * p, taps * config.weight_row_elements(w, f)), num_outer_blocks=w.groups)


def is_promising(w: Conv) -> bool:
    """Return whether the filter is 1×1, images are small enough for split-K, or `direct` does not apply."""
    is_small = w.N * math.prod(w.output_size) <= MAX_SMALL_IMAGE_PIXELS
    return w.spatial_ndim != 2 or (w.groups == 1 and (is_small or set(w.kernel) == {1}))


@schedule(
    *("conv1d", "conv2d", "conv3d"),
    dtypes=DTYPES,
    usage=compute_usage,
    search_if=is_promising,
    features=ALL_FEATURES,
)
def implicit_gemm(s: Schedule, w: Conv, k: Knobs) -> Schedule:
    """Tile channels and pixels as (block, virtual thread, thread, local) and reductions as (step, tap)."""
    f, p = (axis.extent for axis in make_tiled_axes(w).output)
    config = DirectTileConfig.declare_knobs(
        k, w, make_tiled_axes(w), allow_sliced_k=min(f, p) > 1, allow_split_k=w.groups == 1
    )
    multiply_block = flatten_pixels(s, w)
    num_block_axes = len(s.get_loops(multiply_block))
    s.transform_block_layout(
        multiply_block, IndexMap.from_func(move_reduction_last, ndim=num_block_axes, index_dtype="int32")
    )
    if config.split_k > 1:
        depth_axis = len(("group", "channel", "pixel"))
        multiply_block = split_k_over_blocks(s, multiply_block, depth_axis, config.split_k)
        part_loop, group, *_ = s.get_loops(multiply_block)
        s.fuse(part_loop, group)
    outer, channel, pixel, *reduction = s.get_loops(multiply_block)
    blocks = split_reduction(
        s, multiply_block, outer, [channel, pixel], reduction, config, stores_output=config.split_k == 1
    )
    if config.sliced_k == config.split_k == 1 and not all(tile.divides for tile in config.output):
        blocks = pad_operands_with_zeros(s, blocks, config)
    copies = [s.cache_read(blocks.multiply_block, operand, "shared") for operand in (0, 1)]
    for copy in copies:
        inline_producers(s, copy)
    name = str(s.get(blocks.multiply_block).name_hint)
    set_weight_layout(s, w, copies[1], config)
    # The input view has an element for each tap and pixel, in the order of its loops.
    orders: list[LoopOrder] = [list, functools.partial(sort_axes_by_memory, w)]
    pipeline_operand_copies(s, blocks.multiply_block, copies, orders, tile_output(s, blocks, config), config)
    return s if config.split_k > 1 else initialize_with_bias(s, w, name, config, group_axis=0)


def pad_operands_with_zeros(s: Schedule, blocks: ReductionBlocks, config: DirectTileConfig) -> ReductionBlocks:
    """Pad the operands of overhanging tiles with zeros in the copies to shared memory; products need no guards."""
    (store,) = s.get_consumers(blocks.multiply_block)
    s.pad_einsum(
        blocks.multiply_block, [1, *(tile.size for tile in config.output), *(1 for _ in blocks.reduction_loops)]
    )
    s.reverse_compute_inline(store)
    outer, channel, pixel, *reduction = s.get_loops(blocks.multiply_block)
    return ReductionBlocks(blocks.multiply_block, None, outer, [channel, pixel], reduction)


def move_reduction_last(group: Expr, channel: Expr, *other_axes: Expr) -> list[Expr]:
    """Return the axes with the pixels before the reduction, so that the blocks of slices have the same order."""
    *reduction, pixel = other_axes
    return [group, channel, pixel, *reduction]


def make_tiled_axes(w: Conv) -> TiledAxes:
    """Return the tiled axes: output channels of a group, pixels of the whole batch; input channels and taps."""
    output = (
        TiledAxis("tile_f", w.O // w.groups, {"thread": 8, "local": 4}),
        TiledAxis("tile_p", w.N * math.prod(w.output_size), {"thread": 32, "local": 2}),
    )
    preferred = [*(1,) * (w.spatial_ndim - 1), 3]  # taps along the last axis are contiguous
    knobs = zip(KERNEL_KNOBS[-w.spatial_ndim :], w.kernel, preferred, strict=True)
    channel_axis = TiledAxis("tile_rc", w.C // w.groups, {"tap": 8})
    return TiledAxes(output, (channel_axis, *(TiledAxis(knob, size, {"tap": tap}) for knob, size, tap in knobs)))
