"""Only the tile itself in shared memory: the halo is read where it is needed, through the L2 cache.

From `halo_threads`: the block is as large as the tile of the output and copies that tile alone, in a single step, an
element a thread without a guard. The halo is some other block's tile, so that its elements are likely to have been read
into the L2 cache; they are read from there as often as taps meet them. The code to copy is the simplest, but each tap
asks where its element lies, and warps at the tile's edge take both ways.
"""

from tvm.s_tir import Schedule

from tvmconv.knobs import Knobs
from tvmconv.library import schedule
from tvmconv.workloads import Filter1d

from ..cached_halo import read_tile_and_global
from ..filters import ask_block, mask_is_constant


@schedule("filter1d", condition=mask_is_constant)
def caching(s: Schedule, w: Filter1d, k: Knobs) -> Schedule:
    """A block computes as many outputs as it has threads."""
    return read_tile_and_global(w, ask_block(k, w))
