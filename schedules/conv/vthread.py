"""Virtual threads: each thread's outputs lie in strided pieces across the block's tile.

It differs from `columns` in that the width's tile is split into two halves, and each thread computes a piece of both.
Of a thread's four columns, two are neighbours and the other two lie half a tile away. The threads of a warp then read
shared memory at a stride of two words instead of four, with fewer bank conflicts for the same work and registers.

A virtual thread is a loop between blocks and threads that TVM expands into copies of a thread's work, one per piece.
Everything else is as in `columns`.

Measured: tuning_logs/nvidia-h200/. With 64 columns, the compiler's wide loads already avoid conflicts in `columns`, and
little is gained. With 56 columns, where half a tile is 28 columns and 14 threads, there are more conflicts than before.
"""

from tvm.s_tir import Schedule

from tvmconv.registry import schedule
from tvmconv.space import Knobs
from tvmconv.workloads import Conv2d

from ..primitives import bind, bind_grid, order_channels_innermost, split_tiles
from .axis_tiles import declare_tile_knobs
from .columns import COLUMN_REDUCTION_FACTORS
from .reduction import DTYPES, accumulate_in_registers, cache_operands, get_conv_loops
from .tiling import place_operand_copies

OUTPUT_FACTORS = {
    "c": {"vthread": 1, "thread": 4, "local": 8},
    "h": {"vthread": 1, "thread": 2, "local": 2},
    "w": {"vthread": 2, "thread": 16, "local": 2},
}


@schedule("conv2d", dtypes=DTYPES)
def vthread(s: Schedule, w: Conv2d, k: Knobs) -> None:
    """Tile outputs as (block, virtual thread, thread, local) and reductions as (step, substep, tap)."""
    tiles = declare_tile_knobs(k, w, OUTPUT_FACTORS, COLUMN_REDUCTION_FACTORS)
    conv = s.get_sblock("sum")
    store = accumulate_in_registers(s)
    shared = cache_operands(s, conv, "shared")
    local = [s.cache_read(conv, operand, "local") for operand in (0, 1)]

    outer_loop, channel, space, depth, taps = get_conv_loops(s, w)
    block, vthread_loops, thread, point = split_tiles(s, (channel, *space), tiles.output)
    step_loops, substep_loops, tap_loops = split_tiles(s, (depth, *taps), tiles.reduction)
    threads = order_channels_innermost(thread)
    s.reorder(outer_loop, *block, *vthread_loops, *threads, *step_loops, *substep_loops, *tap_loops, *point)
    bind_grid(s, s.fuse(outer_loop, block[0]), *block[1:])
    if any(tile.vthread > 1 for tile in tiles.output):
        bind(s, "vthread", *vthread_loops)
    bind(s, "threadIdx", *thread)

    s.reverse_compute_at(store, threads[-1])
    place_operand_copies(s, w, tiles, (shared, step_loops), (local, substep_loops))
    s.decompose_reduction(conv, step_loops[0])
