"""The block is as large as the output tile, and copies tile and halo in strides of its own size.

From `halo_threads`: no thread idles while the block computes. A thread copies several pixels instead, one block's width
to the right and one block's height below each other, as far as the tile with its halo reaches: 8x32 threads with a mask
of 5x5 take two steps in each direction, and in the last of them few threads have something to copy. Within a warp the
pixels of a step lie side by side. One channel at a time is in shared memory. Of a signal, the same is `halo_two_step`.
"""

from tvm.s_tir import Schedule

from tvmconv.registry import schedule
from tvmconv.space import Knobs
from tvmconv.workloads import Filter2d

from .output_tiling import can_stage_halo, declare_tile_knobs, schedule_from_shared_memory


@schedule("filter2d", condition=can_stage_halo)
def halo_strided(s: Schedule, w: Filter2d, k: Knobs) -> None:
    """A block computes as many pixels as it has threads."""
    threads = declare_tile_knobs(k, w)
    schedule_from_shared_memory(s, w, tile=threads, threads=threads)
