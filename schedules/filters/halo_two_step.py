"""Tile and halo copied to shared memory in two steps, as if they were one array: all threads, then the first few.

It differs from `halo_blocks` in that the copy starts at the left halo. Thread t first copies element t of the tile with
its halo, and then element t + threads; the second step has as many elements as the mask has taps minus one. The same
elements are copied with one guard less, in steps that start at the same thread. Only their global addresses are shifted
by the left halo, so that a warp's loads span one more cache line. A mask with more taps than the block has threads
takes more steps. For an image, the same is `halo_strided`.
"""

from tvm.s_tir import Schedule

from tvmconv.registry import schedule
from tvmconv.space import Knobs
from tvmconv.workloads import Filter1d

from .output_tiling import can_stage_halo, declare_tile_knobs, schedule_from_shared_memory


@schedule("filter1d", condition=can_stage_halo)
def halo_two_step(s: Schedule, w: Filter1d, k: Knobs) -> None:
    """Compute as many outputs per block as it has threads."""
    threads = declare_tile_knobs(k, w)
    schedule_from_shared_memory(s, tile=threads, threads=threads)
