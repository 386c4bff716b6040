"""No bank conflicts for any shape: a warp is 32 neighbouring output pixels, and strides are multiples of 32 words.

It differs from `vthread` in that rows and columns become one axis of output pixels of the whole batch, whose tile is
split into virtual threads of 32 lanes. The input is staged by filter tap: for each (input channel, filter row, filter
column), the values of all pixels of the tile are contiguous. For any image width, stride, dilation and padding:

* A warp reads 32 neighbouring words of shared memory, one from each bank, and its virtual threads read at strides of 32
  words.
* The lanes of a warp share their output channels, so that each read of the weight is a broadcast of one word.
* Neighbouring threads copy neighbouring elements, so that a store to shared memory also accesses 32 banks.

For a single output pixel, the lanes are 32 neighbouring channels instead: the weight is staged with contiguous
channels, and the input is broadcast.

This is the implicit form of convolution as a matrix product (Chetlur et al., "cuDNN: Efficient Primitives for Deep
Learning", 2014, section 3). Its cost is that an input value is stored in shared memory once for every tap that uses it,
which is noticeable for large images with few channels. Sizes that the tiles do not divide are padded with zeros during
the copy to shared memory, so that the inner loops need no guards.

Measured: tuning_logs/nvidia-h200/. The counters show no conflict in any launch, on loads or stores (*-banks.md), and it
is faster than `vthread` on every layer there.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from tvm.ir import Expr
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import SBlockRV
from tvm.tirx import IndexMap

from tvmconv.arithmetic import ceil_div
from tvmconv.registry import schedule
from tvmconv.space import Columns, Knobs, Tile
from tvmconv.space.search_space import ResourceUsage
from tvmconv.target import STATIC_SHARED_BYTES, WARP_SIZE
from tvmconv.workloads import Conv
from tvmconv.workloads.conv_te import OUTPUT_AXES, TAP_AXES
from tvmconv.workloads.dtypes import get_itemsize
from tvmconv.workloads.features import ALL_FEATURES

from ..primitives import (
    bind_grid,
    block_loops,
    cooperative_copy,
    inline_consumers,
    inline_producers,
    order_channels_innermost,
    split_tiles,
    unroll,
)
from .reduction import DTYPES, accumulate_in_registers

MAX_UNROLLED_STEPS = 4096

# Default tiles, the largest first: threads along the channels, channels per thread, virtual threads and warps along the
# pixels, and the minimum number of blocks. Large tiles do more arithmetic per value read; small tiles give enough CTAs
# to occupy a GPU for small images. They were chosen on an H200 (132 SMs) among 1,450 configs for the d2l sweep and
# ResNet-50's 3×3 layers, where they are within 7 % of the fastest, and among 1,100 configs for larger images.
DEFAULT_TILES = (
    (4, 8, 4, 2, 256),
    (2, 16, 2, 2, 96),
    (8, 4, 2, 1, 96),
    (4, 8, 1, 1, 96),
    (1, 16, 2, 2, 96),
    (1, 8, 2, 2, 96),
    (1, 4, 1, 1, 1),
)
TAPS_PER_K_TILE = 36  # approximate number of products per output between two barriers


def compute_usage(w: Conv, columns: Columns) -> ResourceUsage:
    """Return the resources that configs use."""
    staged_taps = math.prod(
        (columns[f"tile_{name}"][:, -1] for name in ("rc", *TAP_AXES[w.spatial_ndim])), start=np.int64(1)
    )
    channels, pixels = w.O // w.groups, w.N * math.prod(w.output_size)
    if pixels > 1:
        num_channel_blocks, num_vthreads, threads, outputs_per_thread = columns["tile_c"].T
        pixel_blocks, pixel_virtual, warps = columns["tile_p"].T
        threads_x, pixels_per_block = WARP_SIZE * warps, WARP_SIZE * warps * pixel_virtual
    else:
        num_channel_blocks, num_vthreads, threads = columns["tile_c"].T
        outputs_per_thread = pixel_blocks = pixel_virtual = threads_x = pixels_per_block = np.ones_like(threads)
    channels_per_block = num_vthreads * threads * outputs_per_thread
    return ResourceUsage(
        threads=threads * threads_x,
        shared_bytes=get_itemsize(w.storage) * staged_taps * (channels_per_block + pixels_per_block),
        accumulators=num_vthreads * outputs_per_thread * pixel_virtual,
        blocks=w.groups * ceil_div(channels, channels_per_block) * pixel_blocks,
        staged=staged_taps,
        intensity=channels_per_block * pixels_per_block / (channels_per_block + pixels_per_block),
        padding_ratio=channels_per_block * num_channel_blocks * pixels_per_block * pixel_blocks / (channels * pixels),
    )


@schedule("conv1d", "conv2d", "conv3d", dtypes=DTYPES, usage=compute_usage, features=ALL_FEATURES)
def conflict_free(s: Schedule, w: Conv, k: Knobs) -> None:
    """Tile channels as (block, virtual thread, thread, local) and pixels as (block, virtual thread, warp), in warps."""
    channels, pixels = w.O // w.groups, w.N * math.prod(w.output_size)
    taps = [
        k.tile(f"tile_{name}", size, ("step", "tap"), {"tap": 3}, exact=True)
        for name, size in zip(TAP_AXES[w.spatial_ndim], w.kernel, strict=True)
    ]
    default_depth = 2 ** max(0, round(math.log2(TAPS_PER_K_TILE / math.prod(tap.tap for tap in taps))))
    depth = k.tile("tile_rc", w.C // w.groups, ("step", "tap"), {"tap": default_depth})
    reduction = [depth, *taps]
    if pixels > 1:
        default_c, default_p = select_default_tiles(w, channels, pixels, math.prod(tile.tap for tile in reduction))
        tile_c = k.tile("tile_c", channels, ("block", "vthread", "thread", "local"), default_c)
        lane_tile = k.tile("tile_p", math.ceil(pixels / WARP_SIZE), ("block", "vthread", "warp"), default_p)
        block, vthreads, warps = lane_tile.factors.values()
        tile_p = Tile(pixels, {"block": block, "vthread": vthreads, "thread": warps * WARP_SIZE, "local": 1})
    else:  # one pixel, as in a fully connected layer: the lanes are channels
        lane_tile = k.tile("tile_c", channels, ("block", "vthread", "thread"), {"thread": WARP_SIZE})
        tile_c = Tile(channels, {**lane_tile.factors, "local": 1})
        tile_p = Tile(1, dict.fromkeys(("block", "vthread", "thread", "local"), 1))

    conv = flatten_pixels(s, w, channels_last=pixels == 1)
    accumulate_in_registers(s)
    s.pad_einsum(conv, [1, tile_c.size, *(tile.size for tile in reduction), tile_p.size])
    (store,) = s.get_consumers(conv)
    inline_consumers(s, store)
    shared = [s.cache_read(conv, operand, "shared") for operand in (0, 1)]
    for copy in shared:
        inline_producers(s, copy)
    local = [s.cache_read(conv, operand, "local") for operand in (0, 1)]

    group, channel, *reduction_loops, pixel = s.get_loops(conv)
    block, vthread, thread, point = split_tiles(s, (channel, pixel), (tile_c, tile_p))
    step_loops, tap = split_tiles(s, reduction_loops, reduction)
    nested_threads = order_channels_innermost(thread)
    s.reorder(group, *block, *vthread, *nested_threads, *step_loops, *tap, *point)
    bind_grid(s, group, *block)
    y_axis, x_axis = (0, 1) if pixels > 1 else (1, 0)  # the axis along the lanes is x
    for kind, loops in (("vthread", vthread), ("threadIdx", thread)):
        s.bind(loops[y_axis], f"{kind}.y")
        s.bind(loops[x_axis], f"{kind}.x")

    s.reverse_compute_at(store, nested_threads[-1])
    for copy in local:
        s.compute_at(copy, tap[-1], preserve_unit_loops=True)
    threads = (tile_c.thread, tile_p.thread)
    for copy in shared:
        s.compute_at(copy, step_loops[-1], preserve_unit_loops=True)
        element_loop = cooperative_copy(s, block_loops(s, copy), (threads[x_axis], threads[y_axis], 1), coalesced=True)
        unroll(s, element_loop, MAX_UNROLLED_STEPS)
    unroll(s, tap[0], MAX_UNROLLED_STEPS)
    s.decompose_reduction(conv, step_loops[0])


def select_default_tiles(
    w: Conv, num_channels: int, num_pixels: int, staged_taps: int
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the first of `DEFAULT_TILES` that fits the channels and shared memory and gives enough blocks.

    The channels are those of a group, the pixels those of the whole batch, and `staged_taps` is input channels × filter
    taps per k-tile. The result is the inner factors of the channel tile and of the pixel tile.
    """
    if num_channels == 1:  # depthwise: the pixels must fill the block
        return {}, {"warp": 4}
    for threads, local, virtual, warps, min_blocks in DEFAULT_TILES:
        width, depth = threads * local, WARP_SIZE * virtual * warps
        blocks = math.ceil(num_channels / width) * math.ceil(num_pixels / depth) * w.groups
        staged_bytes = get_itemsize(w.storage) * staged_taps * (width + depth)
        if blocks >= min_blocks and width <= num_channels and staged_bytes <= STATIC_SHARED_BYTES:
            break
    return {"thread": threads, "local": local}, {"vthread": virtual, "warp": warps}


def flatten_pixels(s: Schedule, w: Conv, *, channels_last: bool = False) -> SBlockRV:
    """Turn the convolution into a product over (group, channel; input channel, filter taps; pixel).

    The input of the returned reduction block is a view with one element for each filter tap and pixel. With
    `channels_last`, the weight is viewed with its output channels innermost.
    """
    conv = s.get_sblock("sum")
    axis_strides = {
        f"v_{axis}": math.prod(w.output_size[i + 1 :]) for i, axis in enumerate(OUTPUT_AXES[w.spatial_ndim])
    }
    pixel_strides = {"v_n": math.prod(w.output_size), **axis_strides}

    def make_flattening_map(axis_strides: Mapping[str, int], axis_names: Sequence[str]) -> IndexMap:
        """Return the map that keeps axes without a stride, in order, followed by one flattened index of the others."""

        def index_map(*indices: Expr) -> list[Expr]:
            index_by_axis = dict(zip(axis_names, indices, strict=True))
            strided_terms = [
                index_by_axis.pop(axis) * stride for axis, stride in axis_strides.items() if axis in index_by_axis
            ]
            return [*index_by_axis.values(), sum(strided_terms)] if strided_terms else list(index_by_axis.values())

        return IndexMap.from_func(index_map, ndim=len(axis_names), index_dtype="int32")

    views = [("read", 0, pixel_strides), ("write", 0, pixel_strides)]
    for kind, operand, axis_strides in [*views, ("read", 1, {"v_o": 1})] if channels_last else views:
        s.reindex(conv, (kind, operand))
        block = s.get(conv)
        region = (block.reads if kind == "read" else block.writes)[operand].region
        axes = [index.min.name for index in region]  # reindex omits axes of extent 1, which differ between operands
        s.transform_layout(conv, (kind, operand), make_flattening_map(axis_strides, axes))
    s.transform_block_layout(
        conv, make_flattening_map(pixel_strides, [axis.var.name for axis in s.get(conv).iter_vars])
    )
    return conv
