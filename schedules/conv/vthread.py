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

from tvmconv.knobs import Knobs
from tvmconv.library import schedule
from tvmconv.workloads import Conv2d

from ..vocabulary import bind, bind_grid, channels_innermost, split_tiles
from .columns import BY_COLUMNS
from .sums import DTYPES, accumulate_in_registers, loops, stage_operands
from .tiles import ask_tiles
from .tiling import stage

OUTPUT = {
    "c": {"vthread": 1, "thread": 4, "local": 8},
    "h": {"vthread": 1, "thread": 2, "local": 2},
    "w": {"vthread": 2, "thread": 16, "local": 2},
}


@schedule("conv2d", dtypes=DTYPES)
def vthread(s: Schedule, w: Conv2d, k: Knobs) -> None:
    """Output tiles are (block, virtual thread, thread, local); reduction tiles are (step, substep, tap)."""
    tiles = ask_tiles(k, w, OUTPUT, BY_COLUMNS)
    conv = s.get_sblock("sum")
    store = accumulate_in_registers(s)
    shared = stage_operands(s, conv, "shared")
    local = [s.cache_read(conv, operand, "local") for operand in (0, 1)]

    outer, channel, space, depth, taps = loops(s, w)
    block, piece, thread, point = split_tiles(s, (channel, *space), tiles.output)
    step, substep, tap = split_tiles(s, (depth, *taps), tiles.reduction)
    threads = channels_innermost(thread)
    s.reorder(outer, *block, *piece, *threads, *step, *substep, *tap, *point)
    bind_grid(s, s.fuse(outer, block[0]), *block[1:])
    if any(tile.vthread > 1 for tile in tiles.output):
        bind(s, "vthread", *piece)
    bind(s, "threadIdx", *thread)

    s.reverse_compute_at(store, threads[-1])
    stage(s, w, tiles, (shared, step), (local, substep))
    s.decompose_reduction(conv, step[0])
