"""The block is as large as the input tile: each thread copies one pixel, and those of the halo idle while computing.

From `constant`: a block copies what it reads of one channel to shared memory, a pixel a thread, multiplies, and goes on
to the next channel. The tile of the output is smaller than the block by the mask but one, in height and in width, and
the threads outside it wait while the others multiply: of 32x32 threads 12 % with a mask of 3x3, 23 % with 5x5 and 75 %
with 17x17. The bounds are checked once an element, no longer once a tap.
"""

from tvm.s_tir import Schedule

from tvmconv.knobs import Knobs
from tvmconv.library import schedule
from tvmconv.workloads import Filter2d

from ..filters import ask_block_with_halo, block_exceeds_mask, read_shared, without_halo


@schedule("filter2d", condition=block_exceeds_mask)
def halo_threads(s: Schedule, w: Filter2d, k: Knobs) -> None:
    """A tile of the output is the block without the halo."""
    threads = ask_block_with_halo(k, w)
    read_shared(s, w, without_halo(w, threads), threads)
