"""AutoTVM's Winograd convolution: fewer products, as a product of matrices for each place in a tile of outputs.

Tiles of m × m outputs take α² multiplications, α = m + R - 1, instead of m²·R². For 3×3 filters these are 2.25 times
fewer with m = 2, 4 times with m = 4 and 5.06 times with m = 6. The cost is a loss of accuracy, and transformed operands
that pass through memory. It is faster from about 32 channels on, and increasingly so with more; `direct` is faster for
three or four channels.

It has four kernels: one transforms the filters, once if the weights do not change between calls; one transforms the
inputs; one multiplies; one transforms the outputs and applies the epilogue. The knobs tile_b, tile_y, tile_x, tile_rc,
auto_unroll_max_step and unroll_explicit have the meaning of AutoTVM's template `conv2d_nchw_winograd.cuda`: tile_b is
the α² points, tile_y output channels, tile_x output tiles, tile_rc input channels. With the other knobs at their
defaults the kernels are AutoTVM's. The other knobs are:

* output_tile: m; AutoTVM uses 4 if the image's height is divisible by 8, otherwise 2.
* sliced_k, pipeline: as in `direct`.
* copy_order: with `vectorized`, a thread copies four neighbouring elements at once.

If a tile of the product overhangs an axis, that axis is extended in memory, so that no guards are needed.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import te
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from tvmconv.registry import schedule
from tvmconv.requirements import DILATION_1, ONE_GROUP, STRIDE_1, all_of
from tvmconv.space import Knobs
from tvmconv.workloads import Conv2d
from tvmconv.workloads.dtypes import ACCUMULATOR
from tvmconv.workloads.layout import CHANNELS_FIRST, to_storage_order

from ...primitives import get_loop_extent, hoist_guards, inline_producers, mark_constant_args
from ..block_tiling import pipeline_operand_copies, split_reduction, tile_output
from ..direct_config import VECTOR_ELEMENTS, DirectTileConfig
from ..reduction import FLOAT_DTYPES
from .knobs import WinogradTileGrid, compute_usage, declare_knobs, estimate_seconds, is_promising, is_supported
from .te_stages import declare_winograd

TRANSFORM_THREADS = 128  # threads per block of a transform


@schedule(
    "conv2d",
    dtypes=FLOAT_DTYPES,
    usage=compute_usage,
    condition=all_of(ONE_GROUP, STRIDE_1, DILATION_1, is_supported),
    search_if=is_promising,
    estimate_seconds=estimate_seconds,
)
def winograd(s: Schedule, w: Conv2d, k: Knobs) -> Schedule:
    """Tile channels and output tiles as (block, virtual thread, thread, local) and reductions as (step, tap)."""
    grid, config = declare_knobs(k, w)
    channels, tiles = (tile.extent for tile in config.output)
    s = Schedule(te.create_prim_func(list(declare_winograd(w, grid, channels, tiles))))
    schedule_stages(s, w, grid, config)
    mark_constant_args(s, "K")
    return s


def schedule_stages(
    s: Schedule, w: Conv2d, grid: WinogradTileGrid, config: DirectTileConfig, output: str = "Y"
) -> None:
    """Schedule the transforms and the product that `te_stages` declares; `output` is the name of the result."""
    schedule_transform(s, "g", "gG", "U")
    schedule_transform(s, "d", "Bd", "V")
    schedule_product(s, config)
    _schedule_output_transform(s, w, grid, output)
    hoist_guards(s)


def schedule_transform(
    s: Schedule,
    source_name: str,
    half_name: str,
    whole_name: str,
    order: Callable[[Schedule, list[LoopRV]], list[LoopRV]] | None = None,
) -> None:
    """Let each thread transform one channel's part of an operand along both axes; `order` are the loops of threads."""
    source, along_columns, along_both = (s.get_sblock(name) for name in (source_name, half_name, whole_name))
    u, v, *position_loops = s.get_loops(along_both)
    store = s.cache_write(along_both, 0, "local")
    position_loops = order(s, position_loops) if order else position_loops
    s.reorder(*position_loops, u, v)
    thread = bind_threads(s, position_loops)
    s.reverse_compute_at(store, thread)
    inline_producers(s, source)
    for block in (along_columns, source):
        s.compute_at(block, thread)
        s.set_scope(block, 0, "local")
    unroll_inside_thread(s, thread, [source, along_columns, along_both, store])


def schedule_product(s: Schedule, config: DirectTileConfig) -> None:
    """Multiply the matrices of all points from shared memory; each point has its own blocks."""
    products = s.get_sblock("M")
    *points, row, column, depth = s.get_loops(products)
    blocks = split_reduction(s, products, s.fuse(*points), [row, column], [depth], config, stores_output=False)
    copies = [s.cache_read(blocks.multiply_block, operand, "shared") for operand in (0, 1)]
    nest = tile_output(s, blocks, config)
    if config.copy_order == "vectorized" and config.sliced_k == 1 and config.output[1].local % VECTOR_ELEMENTS == 0:
        (store,) = s.get_consumers(blocks.multiply_block)
        s.vectorize(s.split(s.get_loops(store)[-1], [None, VECTOR_ELEMENTS])[1])
    pipeline_operand_copies(s, blocks.multiply_block, copies, [list, list], nest, config)


def _schedule_output_transform(s: Schedule, w: Conv2d, grid: WinogradTileGrid, output: str) -> None:
    """Let each thread transform one output tile and store it with the epilogue."""
    s.compute_inline(s.get_sblock("sum"))
    outputs = s.get_sblock(output)
    axes = dict(zip(to_storage_order(w.output_layout, "nopq"), s.get_loops(outputs), strict=True))
    image, channel, row, column = (axes[name] for name in "nopq")
    (row, u), (column, v) = (s.split(axis, [None, grid.m]) for axis in (row, column))
    s.reorder(image, channel, row, column, u, v)
    thread = bind_threads(s, [image, channel, row, column])
    stages = [s.get_sblock(name) for name in ("AMA", "MA")]
    for block in stages:
        s.compute_at(block, thread)
        s.set_scope(block, 0, "local")
    unroll_inside_thread(s, thread, [outputs, *stages])
    if (
        w.output_layout == CHANNELS_FIRST
        and w.storage == ACCUMULATOR
        and w.Q % grid.m == 0
        and grid.m <= VECTOR_ELEMENTS
    ):
        s.vectorize(v)


def bind_threads(s: Schedule, loops: list[LoopRV]) -> LoopRV:
    """Distribute loops over threads, in blocks of `TRANSFORM_THREADS`, and return the thread loop."""
    fused = s.fuse(*loops)
    block, thread = s.split(fused, [None, min(TRANSFORM_THREADS, get_loop_extent(s, fused))])
    s.bind(block, "blockIdx.x")
    s.bind(thread, "threadIdx.x")
    return thread


def unroll_inside_thread(s: Schedule, thread: LoopRV, blocks: list[SBlockRV]) -> None:
    """Let TVM unroll all loops inside a thread, so that the matrix entries become constants."""
    outer = s.get(thread).loop_var
    for block in blocks:
        path = s.get_loops(block)
        depth = next(i for i, loop in enumerate(path) if s.get(loop).loop_var.same_as(outer))
        for loop in path[depth + 1 :]:
            s.unroll(loop)
