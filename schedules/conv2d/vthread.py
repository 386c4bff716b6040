"""Virtual threads: each thread's outputs lie in strided pieces across the block's tile.

From `columns`: the width's tile is cut into two halves, and each thread computes a piece of both. Where a thread's four
columns lay side by side, two lie side by side and the other two half a tile away, so that the threads of a warp read
shared memory at a stride of two words instead of four: fewer of them meet in a bank, for the same work and registers.

Measured: tuning_logs/nvidia-h200/. At 64 columns the compiler's wide loads have left `columns` without conflicts
already, and little is gained; at 56, where half a tile is 28 columns and 14 threads, more of them collide than before.
"""

from tvm.s_tir import Schedule

from tvmconv.knobs import Knobs
from tvmconv.library import schedule
from tvmconv.workloads import Conv2d

from .tiles import declare_tiles
from .tiling import tile_and_stage

OUTPUT = {"c": (1, 4, 8), "h": (1, 2, 2), "w": (2, 16, 2)}  # virtual threads, threads, and the outputs of each
REDUCTION = {"rc": (1, 1), "rh": (1, 3), "rw": (1, 1)}  # steps in registers, and taps of each


@schedule("conv2d")
def vthread(s: Schedule, w: Conv2d, k: Knobs) -> None:
    """Output tiles are (block, virtual thread, thread, local); reduction tiles are (outer, middle, inner)."""
    output, reduction = declare_tiles(w, k, OUTPUT, REDUCTION)
    tile_and_stage(s, w, output, reduction)
