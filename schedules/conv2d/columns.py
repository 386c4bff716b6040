"""Read the shared tiles by columns: the reduction steps along the filter's height inside, along its width outside.

From `tiling`: only the reduction tiles of height and width change places. A thread of `tiling` reads a run of
neighbouring columns, so that threads side by side start a few banks apart and collide; with one filter column a step,
the tile in shared memory is as wide as the block's output, a thread's reads go down a column, and the reads of a warp
spread over the banks.
"""

from tvm.s_tir import Schedule

from schedules.conv2d.tiling import block_thread_local, tile_and_stage
from tvmconv.knobs import Knobs
from tvmconv.library import schedule
from tvmconv.workloads import Conv2d


@schedule("conv2d")
def columns(s: Schedule, w: Conv2d, k: Knobs) -> None:
    """Output tiles are (block, thread, local); reduction tiles are (outer, middle, inner)."""
    tile_rc = k.split("tile_rc", w.C // w.groups, parts=3, default=(-1, 1, 1), exact=True)
    tile_rh = k.split("tile_rh", w.R, parts=3, default=(-1, 1, 3), exact=True)
    tile_rw = k.split("tile_rw", w.S, parts=3, default=(-1, 1, 1), exact=True)
    tile_and_stage(s, w, block_thread_local(w, k), (tile_rc, tile_rh, tile_rw))
