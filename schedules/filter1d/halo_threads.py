"""The block is as large as the input tile: each thread copies one element, and those of the halo idle while computing.

From `halo_blocks`: tile and halo are copied in a single step without a guard, as there is a thread for each element.
The tile of the output is smaller than the block by the taps but one, and as many threads wait while the others
multiply. That costs little where the block is much larger than the mask, for which the largest block is best; a mask of
more than 1,024 taps has no such block.
"""

from tvm.s_tir import Schedule

from tvmconv.knobs import Knobs
from tvmconv.library import schedule
from tvmconv.workloads import Filter1d

from ..filters import ask_block_with_halo, block_exceeds_mask, read_shared, without_halo


@schedule("filter1d", condition=block_exceeds_mask)
def halo_threads(s: Schedule, w: Filter1d, k: Knobs) -> None:
    """A tile of the output is the block without the halo."""
    threads = ask_block_with_halo(k, w)
    read_shared(s, w, without_halo(w, threads), threads)
