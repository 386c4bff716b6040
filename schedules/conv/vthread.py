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
from tvmconv.workloads.features import ALL_FEATURES

from .axis_tiles import declare_tile_knobs
from .columns import COLUMN_REDUCTION_FACTORS
from .reduction import DTYPES
from .tiling import tile_convolution

OUTPUT_FACTORS = {
    "c": {"vthread": 1, "thread": 4, "local": 8},
    "h": {"vthread": 1, "thread": 2, "local": 2},
    "w": {"vthread": 2, "thread": 16, "local": 2},
}


@schedule("conv2d", dtypes=DTYPES, features=ALL_FEATURES)
def vthread(s: Schedule, w: Conv2d, k: Knobs) -> None:
    """Tile outputs as (block, virtual thread, thread, local) and reductions as (step, substep, tap)."""
    tile_convolution(s, w, declare_tile_knobs(k, w, OUTPUT_FACTORS, COLUMN_REDUCTION_FACTORS))
