"""Virtual threads: each thread's outputs lie in strided pieces across the block's tile.

From `columns`: the width's tile is cut into two halves, and each thread computes a piece of both. Where a thread's four
columns lay side by side, two lie side by side and the other two half a tile away, so that the threads of a warp read
shared memory at a stride of two words instead of four: fewer of them meet in a bank, for the same work and registers.

A virtual thread is a loop between blocks and threads, of which TVM makes copies of a thread's work, one a piece. All
but that loop is as in `columns`.

Measured: tuning_logs/nvidia-h200/. At 64 columns the compiler's wide loads have left `columns` without conflicts
already, and little is gained; at 56, where half a tile is 28 columns and 14 threads, more of them collide than before.
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
    """Output tiles are (block, virtual thread, thread, local); reduction tiles are (step, substep, tap)."""
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
