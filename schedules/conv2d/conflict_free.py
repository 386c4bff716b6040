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

from tvm.ir import Expr
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import SBlockRV
from tvm.tirx import IndexMap

from tvmconv.knobs import Knobs
from tvmconv.library import schedule
from tvmconv.workloads import Conv2d

from ..vocabulary import (
    bind_grid,
    channels_innermost,
    cooperative_copy,
    inline_consumers,
    inline_producers,
    split_all,
    unroll,
)
from .stages import accumulate_in_registers
from .tiles import SHARED_BYTES, WORD

WARP = 32
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


@schedule("conv2d")
def conflict_free(s: Schedule, w: Conv2d, k: Knobs) -> None:
    """Channel tiles are (block, virtual thread, thread, local); pixel tiles (block, virtual thread, warp), in warps."""
    channels, pixels = w.O // w.groups, w.N * w.P * w.Q
    tile_rh = k.split("tile_rh", w.R, parts=2, default=(-1, 3), exact=True)
    tile_rw = k.split("tile_rw", w.S, parts=2, default=(-1, 3), exact=True)
    default_rc = 2 ** max(0, round(math.log2(TAPS_OF_A_STEP / (tile_rh[1] * tile_rw[1]))))
    tile_rc = k.split("tile_rc", w.C // w.groups, parts=2, default=(-1, default_rc))
    if pixels > 1:
        default_c, default_p = default_tiles(channels, pixels, w.groups, taps=tile_rc[1] * tile_rh[1] * tile_rw[1])
        tile_c = k.split("tile_c", channels, parts=4, default=(-1, *default_c))
        blocks, vthreads, warps = k.split("tile_p", math.ceil(pixels / WARP), parts=3, default=(-1, *default_p))
        tile_p = (blocks, vthreads, warps * WARP, 1)  # (block, virtual thread, thread, local)
    else:  # one pixel, as in a fully connected layer: the lanes are channels
        tile_c = (*k.split("tile_c", channels, parts=3, default=(-1, 1, WARP)), 1)
        tile_p = (1, 1, 1, 1)

    conv = flatten_pixels(s, w, channels_last=pixels == 1)
    padding = [math.prod(tile[1:]) for tile in (tile_c, tile_rc, tile_rh, tile_rw, tile_p)]
    s.pad_einsum(conv, padding if w.groups == 1 else [1, *padding])
    (store,) = s.get_consumers(conv)
    inline_consumers(s, store)
    shared = [s.cache_read(conv, operand, "shared") for operand in (0, 1)]
    for copy in shared:
        inline_producers(s, copy)
    local = [s.cache_read(conv, operand, "local") for operand in (0, 1)]

    *group, channel, rc, rh, rw, pixel = s.get_loops(conv)
    block, vthread, thread, point = split_all(s, (channel, pixel), (tile_c, tile_p))
    step, tap = split_all(s, (rc, rh, rw), (tile_rc, tile_rh, tile_rw))
    nested = channels_innermost(thread)
    s.reorder(*group, *block, *vthread, *nested, *step, *tap, *point)
    bind_grid(s, *(group or [s.add_unit_loop(block[0])]), *block)
    y, x = (0, 1) if pixels > 1 else (1, 0)  # of (channel, pixel), the one along the lanes is x
    for kind, loops in (("vthread", vthread), ("threadIdx", thread)):
        s.bind(loops[y], f"{kind}.y")
        s.bind(loops[x], f"{kind}.x")

    s.reverse_compute_at(store, nested[-1])
    for copy in local:
        s.compute_at(copy, tap[-1], preserve_unit_loops=True)
    threads = (tile_c[2], tile_p[2])
    for copy in shared:
        s.compute_at(copy, step[-1], preserve_unit_loops=True)
        unroll(s, cooperative_copy(s, copy, (threads[x], threads[y], 1), interleaved=True), MAX_UNROLLED_STEPS)
    unroll(s, tap[0], MAX_UNROLLED_STEPS)
    s.decompose_reduction(conv, step[0])


def default_tiles(channels: int, pixels: int, groups: int, taps: int) -> tuple[tuple[int, int, int], tuple[int, int]]:
    """The first of `TILES` that fits the channels and the shared memory and makes enough blocks.

    Args:
        channels: output channels of a group.
        pixels: of the whole batch.
        groups: number of groups.
        taps: (input channel, filter row, filter column) triples that are staged at a time.

    Returns:
        Inner factors of the channel tile (virtual thread, thread, local) and the pixel tile (virtual thread, warp).
    """
    if channels == 1:  # depthwise: the pixels have to fill the block
        return (1, 1, 1), (1, 4)
    for threads, local, virtual, warps, enough in TILES:
        width, depth = threads * local, WARP * virtual * warps
        blocks = math.ceil(channels / width) * math.ceil(pixels / depth) * groups
        if blocks >= enough and width <= channels and WORD * taps * (width + depth) <= SHARED_BYTES:
            break
    return (1, threads, local), (virtual, warps)


def flatten_pixels(s: Schedule, w: Conv2d, *, channels_last: bool) -> SBlockRV:
    """Turn the convolution into a product over ([group,] channel; input channel, filter row, filter column; pixel).

    Args:
        s: the schedule.
        w: the workload.
        channels_last: view the weight with its output channels innermost.

    Returns:
        The block, accumulating in registers; its input is a view with one element for each filter tap and pixel.
    """
    conv = s.get_sblock("Y" if w.groups == 1 else "conv")
    pixel_strides = {"v_n": w.P * w.Q, "v_p": w.Q, "v_q": 1}

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
    accumulate_in_registers(s, conv)
    return conv
