"""The block is as large as the output tile, and copies tile and halo in strides of its own size.

It differs from `halo_threads` in that no thread idles during the computation. Instead, a thread copies several pixels,
one block's width to the right and one block's height down from each other, over the tile with its halo. A block of 8x32
threads with a mask of 5x5 takes two steps in each direction, and in the last of them few threads copy anything. Within
a warp, the pixels of a step are contiguous. One channel at a time is in shared memory. For a signal, the same is
`halo_two_step`.
"""

from tvm.s_tir import Schedule

from tvmconv.registry import schedule
from tvmconv.space import Knobs
from tvmconv.workloads import Filter2d

from .output_tiling import can_stage_halo, declare_tile_knobs, schedule_from_shared_memory


@schedule("filter2d", condition=can_stage_halo)
def halo_strided(s: Schedule, w: Filter2d, k: Knobs) -> None:
    """Compute as many pixels per block as it has threads."""
    threads = declare_tile_knobs(k, w)
    schedule_from_shared_memory(s, tile=threads, threads=threads)
