"""The block is as large as the input tile: each thread copies one element, and those of the halo idle while computing.

From `constant`: a block first copies what it reads to shared memory, tile and halo in a single step without a guard, as
there is a thread for each element; of an image it copies one channel, multiplies, and goes on to the next. (From
`halo_blocks`: one step in place of three, of a signal.) Bounds are checked once an element, no longer once a tap.

The tile of the output is smaller than the block by the taps but one, along each axis, and the threads outside it wait
while the others multiply: of 32x32 threads 12 % with a mask of 3x3, 23 % with 5x5 and 75 % with 17x17. Of a signal that
costs little where the block is much larger than the mask, for which the largest block is best. A mask of more than
1,024 taps has no such block, nor has one of 33x17, as a block's sizes are powers of two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

import numpy as np
from tvm.s_tir import Schedule

from tvmconv.gpu import MAX_THREADS
from tvmconv.knobs import Knobs
from tvmconv.library import schedule
from tvmconv.workloads.filters import Filter
from tvmconv.workloads.text import by

from .tiles import Sizes, ask_block, mask_is_constant, read_shared, thread_knobs


def fits(w: Filter) -> bool:
    """Whether the mask fits constant memory, and a block can have as many threads as taps along each axis."""
    return mask_is_constant(w) and bool(_blocks_over_mask(w))


@schedule("filter1d", "filter2d", condition=fits)
def halo_threads(s: Schedule, w: Filter, k: Knobs) -> None:
    """A tile of the output is the block without the halo; by default the block is the one with the fewest idle."""
    fewest_idle = max(_blocks_over_mask(w), key=lambda block: math.prod(_without_halo(w, block)))
    threads = ask_block(k, w, fewest_idle)
    k.condition(
        f"a block has at least the mask's {by(w.mask_shape)} threads",
        lambda c: np.all([c[name] >= taps for name, taps in zip(thread_knobs(w), w.mask_shape, strict=True)], axis=0),
    )
    read_shared(s, w, tile=_without_halo(w, threads), threads=threads)


def _without_halo(w: Filter, block: Sequence[int]) -> Sizes:
    """The tile of the output for which as many threads as in a block have one element to read each."""
    return tuple(size - taps + 1 for size, taps in zip(block, w.mask_shape, strict=True))


def _blocks_over_mask(w: Filter) -> list[Sizes]:
    """Blocks, in powers of two, of as many threads as taps along each axis, or more."""
    sizes = [2**i for i in range(MAX_THREADS.bit_length())]
    choices = ([size for size in sizes if size >= taps] for taps in w.mask_shape)
    return [block for block in product(*choices) if math.prod(block) <= MAX_THREADS]
