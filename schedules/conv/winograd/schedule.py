"""AutoTVM's Winograd convolution: fewer products, as a product of matrices for each place in a tile of outputs.

Tiles of m × m outputs take α² multiplications, α = m + R - 1, in place of m²·R²: for 3×3 filters 2.25 times fewer with
m = 2, 4 times with m = 4, 5.06 times with m = 6, at the price of digits, and of transformed operands that pass through
memory. It pays from some 32 channels on, and the more there are, the more; with three or four, `direct` is faster.

Four kernels: one transforms the filters, which a caller whose weights stay the same does once; one transforms the
inputs; one multiplies; one transforms the outputs and applies the epilogue. The knobs tile_b, tile_y, tile_x, tile_rc,
auto_unroll_max_step and unroll_explicit mean what they mean in AutoTVM's template `conv2d_nchw_winograd.cuda`: tile_b
are the α² products, tile_y output channels, tile_x tiles of outputs, tile_rc input channels. With the other knobs at
their defaults the kernels are AutoTVM's. What those are for:

* tile_m: m; AutoTVM took 4 where the image's height is divisible by 8, and else 2.
* slices, pipeline: as in `direct`.
* fetch: `vectors`: a thread copies four neighbouring elements at once.

Where a tile of the product overhangs an axis, that axis is made longer in memory, so that nothing is tested for.
"""

from __future__ import annotations

from tvm import te
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from tvmconv.knobs import Knobs
from tvmconv.library import schedule
from tvmconv.requirements import DILATION_1, ONE_GROUP, STRIDE_1, all_of
from tvmconv.workloads import Conv2d
from tvmconv.workloads.dtypes import ACCUMULATOR
from tvmconv.workloads.layout import CHANNELS_FIRST, stored

from ...vocabulary import extent, hoist_guards, inline_producers, keep
from ..blocked import copy_in_steps, share_out, tile_output
from ..plan import VECTOR, Plan
from ..sums import DTYPES
from .plan import Grid, applies, ask, is_promising, usage
from .stages import declare

THREADS = 128  # of a block that transforms


@schedule(
    "conv2d",
    dtypes=DTYPES,
    usage=usage,
    condition=all_of(ONE_GROUP, STRIDE_1, DILATION_1, applies),
    promising=is_promising,
)
def winograd(s: Schedule, w: Conv2d, k: Knobs) -> Schedule:
    """Tiles of channels and of output tiles are (block, virtual thread, thread, local); reduction tiles (step, tap)."""
    grid, plan = ask(k, w)
    channels, tiles = (tile.extent for tile in plan.output)
    s = Schedule(te.create_prim_func(list(declare(w, grid, channels, tiles))))
    _transform(s, "g", "gG", "U")
    _transform(s, "d", "Bd", "V")
    _multiply(s, plan)
    _transform_outputs(s, w, grid)
    keep(s, "K")
    hoist_guards(s)
    return s


def _transform(s: Schedule, operand: str, half: str, whole: str) -> None:
    """Let each thread transform one channel's part of an operand, along both axes."""
    source, along_columns, along_both = (s.get_sblock(name) for name in (operand, half, whole))
    u, v, *place = s.get_loops(along_both)
    store = s.cache_write(along_both, 0, "local")
    s.reorder(*place, u, v)
    thread = _share(s, place)
    s.reverse_compute_at(store, thread)
    inline_producers(s, source)
    for block in (along_columns, source):
        s.compute_at(block, thread)
        s.set_scope(block, 0, "local")
    _unroll_below(s, thread, [source, along_columns, along_both, store])


def _multiply(s: Schedule, plan: Plan) -> None:
    """Multiply the matrices of all places, each by blocks of its own, from shared memory."""
    products = s.get_sblock("M")
    u, v, channel, tile, depth = s.get_loops(products)
    sums = share_out(s, products, s.fuse(u, v), [channel, tile], [depth], plan, to_output=False)
    copies = [s.cache_read(sums.products, operand, "shared") for operand in (0, 1)]
    nest = tile_output(s, sums, plan)
    if plan.fetch == "vectors" and plan.slices == 1 and plan.output[1].local % VECTOR == 0:
        (store,) = s.get_consumers(sums.products)
        s.vectorize(s.split(s.get_loops(store)[-1], [None, VECTOR])[1])
    copy_in_steps(s, sums.products, copies, [list, list], nest, plan)


def _transform_outputs(s: Schedule, w: Conv2d, grid: Grid) -> None:
    """Let each thread transform one tile of outputs, and store it with the epilogue."""
    s.compute_inline(s.get_sblock("sum"))
    outputs = s.get_sblock("Y")
    axes = dict(zip(stored(w.layout, "nopq"), s.get_loops(outputs), strict=True))
    image, channel, row, column = (axes[name] for name in "nopq")
    (row, u), (column, v) = (s.split(axis, [None, grid.m]) for axis in (row, column))
    s.reorder(image, channel, row, column, u, v)
    thread = _share(s, [image, channel, row, column])
    stages = [s.get_sblock(name) for name in ("AMA", "MA")]
    for block in stages:
        s.compute_at(block, thread)
        s.set_scope(block, 0, "local")
    _unroll_below(s, thread, [outputs, *stages])
    if w.layout == CHANNELS_FIRST and w.storage == ACCUMULATOR and w.Q % grid.m == 0 and grid.m <= VECTOR:
        s.vectorize(v)


def _share(s: Schedule, loops: list[LoopRV]) -> LoopRV:
    """Share these loops out to threads, in blocks of `THREADS`; returns the threads' loop."""
    fused = s.fuse(*loops)
    block, thread = s.split(fused, [None, min(THREADS, extent(s, fused))])
    s.bind(block, "blockIdx.x")
    s.bind(thread, "threadIdx.x")
    return thread


def _unroll_below(s: Schedule, thread: LoopRV, blocks: list[SBlockRV]) -> None:
    """Let TVM unroll all that a thread does, so that each statement knows which of a matrix's entries it has."""
    outer = s.get(thread).loop_var
    for block in blocks:
        path = s.get_loops(block)
        depth = next(i for i, loop in enumerate(path) if s.get(loop).loop_var.same_as(outer))
        for loop in path[depth + 1 :]:
            s.unroll(loop)
