"""No bank conflicts for any shape: a warp is 32 neighbouring output pixels, and strides are multiples of 32 words.

From `vthread`: rows and columns become one axis of output pixels (of the whole batch), whose tile is cut into virtual
threads of 32 lanes. The input is staged by filter tap: for each (input channel, filter row, filter column), the one
value that each pixel of the tile needs, side by side. Whatever the image's width, stride, dilation or padding,

* a warp reads 32 neighbouring words of shared memory, one from each bank, and its virtual threads read at strides of
  32 words;
* a warp's lanes share their output channels, so that a read of the weight is one word for the whole warp: a broadcast;
* neighbouring threads copy neighbouring elements, so that a store to shared memory touches 32 banks as well.

Where there is a single output pixel, the lanes are 32 neighbouring channels instead: the weight is staged with its
channels side by side, and it is the input that is broadcast.

This is the implicit form of convolution as a matrix product (Chetlur et al., "cuDNN: Efficient Primitives for Deep
Learning", 2014, section 3). Its price: an input value is stored in shared memory once for every tap that uses it, which
shows on large images with few channels. Sizes that the tiles do not divide are padded with zeros on the way into shared
memory, so that the inner loops have no tests.

Measured: tuning_logs/nvidia-h200/. The counters see no conflict in any launch, on loads or stores (*-banks.md), and it
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
from tvmconv.gpu import STATIC_SHARED_BYTES, WARP
from tvmconv.knobs import Columns, Knobs, Tile
from tvmconv.knobs.space import Usage
from tvmconv.library import schedule
from tvmconv.workloads import Conv
from tvmconv.workloads.declaration import OUTPUT, TAPS

from ..vocabulary import (
    bind_grid,
    channels_innermost,
    cooperative_copy,
    inline_consumers,
    inline_producers,
    own_loops,
    split_tiles,
    unroll,
)
from .sums import DTYPES, accumulate_in_registers
from .tiles import element_bytes

MAX_UNROLLED_STEPS = 4096

# Default tiles, the largest first: threads along the channels, channels of each, virtual threads and warps along the
# pixels, and how many blocks there have to be. Large ones do more arithmetic for each value read; small ones make
# enough blocks of a small image to occupy a GPU. Chosen on an H200 (132 multiprocessors) out of 1,450 configs for the
# d2l sweep and ResNet-50's 3×3 layers, where they are within 7 % of the fastest, and of 1,100 for larger images.
TILES = (
    (4, 8, 4, 2, 256),
    (2, 16, 2, 2, 96),
    (8, 4, 2, 1, 96),
    (4, 8, 1, 1, 96),
    (1, 16, 2, 2, 96),
    (1, 8, 2, 2, 96),
    (1, 4, 1, 1, 1),
)
TAPS_OF_A_STEP = 36  # products of each output between two barriers, about


def usage(w: Conv, c: Columns) -> Usage:
    """What configs use of a device."""
    staged = math.prod((c[f"tile_{name}"][:, -1] for name in ("rc", *TAPS[w.rank])), start=np.int64(1))
    channels, pixels = w.O // w.groups, w.N * math.prod(w.out)
    if pixels > 1:
        block, virtual, threads, local = c["tile_c"].T
        pixel_blocks, pixel_virtual, warps = c["tile_p"].T
        threads_x, depth = WARP * warps, WARP * warps * pixel_virtual
    else:
        block, virtual, threads = c["tile_c"].T
        local = pixel_blocks = pixel_virtual = threads_x = depth = np.ones_like(threads)
    width = virtual * threads * local
    return Usage(
        threads=threads * threads_x,
        shared_bytes=element_bytes(w) * staged * (width + depth),
        accumulators=virtual * local * pixel_virtual,
        blocks=w.groups * ceil_div(channels, width) * pixel_blocks,
        staged=staged,
        intensity=width * depth / (width + depth),
        waste=width * block * depth * pixel_blocks / (channels * pixels),
    )


@schedule("conv1d", "conv2d", "conv3d", dtypes=DTYPES, usage=usage)
def conflict_free(s: Schedule, w: Conv, k: Knobs) -> None:
    """Channel tiles are (block, virtual thread, thread, local); pixel tiles (block, virtual thread, warp), in warps."""
    channels, pixels = w.O // w.groups, w.N * math.prod(w.out)
    taps = [
        k.tile(f"tile_{name}", size, ("step", "tap"), {"tap": 3}, exact=True)
        for name, size in zip(TAPS[w.rank], w.kernel, strict=True)
    ]
    default_depth = 2 ** max(0, round(math.log2(TAPS_OF_A_STEP / math.prod(tap.tap for tap in taps))))
    depth = k.tile("tile_rc", w.C // w.groups, ("step", "tap"), {"tap": default_depth})
    reduction = [depth, *taps]
    if pixels > 1:
        default_c, default_p = default_tiles(w, channels, pixels, taps=math.prod(tile.tap for tile in reduction))
        tile_c = k.tile("tile_c", channels, ("block", "vthread", "thread", "local"), default_c)
        lanes = k.tile("tile_p", math.ceil(pixels / WARP), ("block", "vthread", "warp"), default_p)
        tile_p = Tile(pixels, {"block": lanes.block, "vthread": lanes.vthread, "thread": lanes.warp * WARP, "local": 1})
    else:  # one pixel, as in a fully connected layer: the lanes are channels
        lanes = k.tile("tile_c", channels, ("block", "vthread", "thread"), {"thread": WARP})
        tile_c = Tile(channels, {**lanes.factors, "local": 1})
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

    group, channel, *sums_over, pixel = s.get_loops(conv)
    block, vthread, thread, point = split_tiles(s, (channel, pixel), (tile_c, tile_p))
    step, tap = split_tiles(s, sums_over, reduction)
    nested = channels_innermost(thread)
    s.reorder(group, *block, *vthread, *nested, *step, *tap, *point)
    bind_grid(s, group, *block)
    y, x = (0, 1) if pixels > 1 else (1, 0)  # of (channel, pixel), the one along the lanes is x
    for kind, loops in (("vthread", vthread), ("threadIdx", thread)):
        s.bind(loops[y], f"{kind}.y")
        s.bind(loops[x], f"{kind}.x")

    s.reverse_compute_at(store, nested[-1])
    for copy in local:
        s.compute_at(copy, tap[-1], preserve_unit_loops=True)
    threads = (tile_c.thread, tile_p.thread)
    for copy in shared:
        s.compute_at(copy, step[-1], preserve_unit_loops=True)
        each = cooperative_copy(s, own_loops(s, copy), (threads[x], threads[y], 1), interleaved=True)
        unroll(s, each, MAX_UNROLLED_STEPS)
    unroll(s, tap[0], MAX_UNROLLED_STEPS)
    s.decompose_reduction(conv, step[0])


Factors = dict[str, int]


def default_tiles(w: Conv, channels: int, pixels: int, taps: int) -> tuple[Factors, Factors]:
    """The first of `TILES` that fits the channels and the shared memory and makes enough blocks.

    Args:
        w: the workload.
        channels: output channels of a group.
        pixels: of the whole batch.
        taps: input channels × filter taps that are staged at a time.

    Returns:
        Inner factors of the channel tile and of the pixel tile.
    """
    if channels == 1:  # depthwise: the pixels have to fill the block
        return {}, {"warp": 4}
    for threads, local, virtual, warps, enough in TILES:
        width, depth = threads * local, WARP * virtual * warps
        blocks = math.ceil(channels / width) * math.ceil(pixels / depth) * w.groups
        staged = element_bytes(w) * taps * (width + depth)
        if blocks >= enough and width <= channels and staged <= STATIC_SHARED_BYTES:
            break
    return {"thread": threads, "local": local}, {"vthread": virtual, "warp": warps}


def flatten_pixels(s: Schedule, w: Conv, *, channels_last: bool = False) -> SBlockRV:
    """Turn the convolution into a product over (group, channel; input channel, filter taps; pixel).

    Args:
        s: the schedule.
        w: the workload.
        channels_last: view the weight with its output channels innermost.

    Returns:
        The block that sums; its input is a view with one element for each filter tap and pixel.
    """
    conv = s.get_sblock("sum")
    strides = {f"v_{axis}": math.prod(w.out[i + 1 :]) for i, axis in enumerate(OUTPUT[w.rank])}
    pixel_strides = {"v_n": math.prod(w.out), **strides}

    def last(strides: Mapping[str, int], axes: Sequence[str]) -> IndexMap:
        """The map from these axes to those without a stride, in their order, and behind them one index of the rest."""

        def index_map(*indices: Expr) -> list[Expr]:
            index = dict(zip(axes, indices, strict=True))
            strided = [index.pop(axis) * stride for axis, stride in strides.items() if axis in index]
            return [*index.values(), sum(strided)] if strided else list(index.values())

        return IndexMap.from_func(index_map, ndim=len(axes), index_dtype="int32")

    views = [("read", 0, pixel_strides), ("write", 0, pixel_strides)]
    for kind, operand, strides in [*views, ("read", 1, {"v_o": 1})] if channels_last else views:
        s.reindex(conv, (kind, operand))
        block = s.get(conv)
        region = (block.reads if kind == "read" else block.writes)[operand].region
        axes = [index.min.name for index in region]  # reindex leaves out axes of extent 1, not always the same ones
        s.transform_layout(conv, (kind, operand), last(strides, axes))
    s.transform_block_layout(conv, last(pixel_strides, [axis.var.name for axis in s.get(conv).iter_vars]))
    return conv
