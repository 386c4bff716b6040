"""Virtual threads: each thread's outputs lie in strided pieces across the block's tile.

From `columns`: the width's tile is cut into two halves, and each thread computes a piece of both. Where a thread's four
columns lay side by side, two lie side by side and the other two half a tile away, so that the threads of a warp read
shared memory at a stride of two words instead of four: fewer of them meet in a bank, for the same work and registers.
"""

from tvm.s_tir import Schedule

from schedules.conv2d.stages import tiled_channels
from schedules.conv2d.tiling import tile_and_stage
from tvmconv.knobs import Knobs
from tvmconv.library import schedule
from tvmconv.workloads import Conv2d


@schedule("conv2d")
def vthread(s: Schedule, w: Conv2d, k: Knobs) -> None:
    """Output tiles are (block, virtual thread, thread, local); reduction tiles are (outer, middle, inner)."""
    tile_c = k.split("tile_c", tiled_channels(w), parts=4, default=(-1, 1, 4, 8))
    tile_h = k.split("tile_h", w.P, parts=4, default=(-1, 1, 2, 2))
    tile_w = k.split("tile_w", w.Q, parts=4, default=(-1, 2, 16, 2))
    tile_rc = k.split("tile_rc", w.C // w.groups, parts=3, default=(-1, 1, 1), exact=True)
    tile_rh = k.split("tile_rh", w.R, parts=3, default=(-1, 1, 3), exact=True)
    tile_rw = k.split("tile_rw", w.S, parts=3, default=(-1, 1, 1), exact=True)
    tile_and_stage(s, w, (tile_c, tile_h, tile_w), (tile_rc, tile_rh, tile_rw))
