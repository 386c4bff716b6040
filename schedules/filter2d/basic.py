"""The naive baseline: one thread a pixel, everything from global memory.

Each thread computes the channels of its pixel one after another, walks over the mask for each of them, and tests at
every tap whether the image has a pixel there. Pixels that neighbouring outputs have in common, and the mask, are loaded
again by every thread; what keeps that from the DRAM are the caches alone. As channels are interleaved, a warp uses one
word in C of what it loads, and the others when their channel's turn comes, if the L1 cache still has them.
"""

from tvm.s_tir import Schedule

from tvmconv.knobs import Knobs
from tvmconv.library import schedule
from tvmconv.workloads import Filter2d

from .. import strips
from ..filters import ask_block, read_global


@schedule("filter2d", promising=strips.too_large, baseline=True)
def basic(s: Schedule, w: Filter2d, k: Knobs) -> None:
    """A block computes as many pixels as it has threads."""
    read_global(s, w, ask_block(k, w))
