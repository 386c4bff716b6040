"""The block is as large as the input tile: each thread copies one element, and those of the halo idle while computing.

It differs from `constant` in that a block first copies its inputs to shared memory. The tile with its halo takes one
step without a guard, as there is a thread for each element; for a signal, `halo_blocks` needs three steps. For an
image, a block copies one channel, multiplies, and continues with the next one. Bounds are checked once per element, no
longer once per tap.

The output tile is smaller than the block by the number of taps minus one along each axis, and the threads outside it
wait while the others multiply. Of 32x32 threads these are 12 % for a mask of 3x3, 23 % for 5x5 and 75 % for 17x17. For
a signal this costs little if the block is much larger than the mask, so the largest block is best. A mask of more than
1,024 taps has no such block, nor has one of 33x17, as block sizes are powers of two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

import numpy as np
from tvm.s_tir import Schedule

from tvmconv.registry import schedule
from tvmconv.space import Knobs
from tvmconv.target import MAX_THREADS_PER_BLOCK
from tvmconv.workloads.filters import Filter
from tvmconv.workloads.text import join_sizes

from .output_tiling import (
    AxisSizes,
    can_place_mask_in_constant_memory,
    declare_block_knobs,
    list_thread_knobs,
    schedule_from_shared_memory,
)


def can_block_cover_mask(w: Filter) -> bool:
    """Whether the mask fits constant memory, and a block can have as many threads as taps along each axis."""
    return can_place_mask_in_constant_memory(w) and bool(_list_blocks_covering_mask(w))


@schedule("filter1d", "filter2d", condition=can_block_cover_mask)
def halo_threads(s: Schedule, w: Filter, k: Knobs) -> None:
    """Compute the block without its halo; by default the block is the one with the fewest idle threads."""
    default_block = max(_list_blocks_covering_mask(w), key=lambda block: math.prod(_remove_halo(w, block)))
    threads = declare_block_knobs(k, w, default_block)
    k.require(
        f"a block has at least the mask's {join_sizes(w.mask_shape)} threads",
        lambda c: np.all(
            [c[name] >= taps for name, taps in zip(list_thread_knobs(w), w.mask_shape, strict=True)], axis=0
        ),
    )
    schedule_from_shared_memory(s, tile=_remove_halo(w, threads), threads=threads)


def _remove_halo(w: Filter, block: Sequence[int]) -> AxisSizes:
    """Return the output tile whose inputs are one element per thread of a block."""
    return tuple(size - taps + 1 for size, taps in zip(block, w.mask_shape, strict=True))


def _list_blocks_covering_mask(w: Filter) -> list[AxisSizes]:
    """Return the block shapes, in powers of two, with at least as many threads as taps along each axis."""
    sizes = [2**i for i in range(MAX_THREADS_PER_BLOCK.bit_length())]
    choices = ([size for size in sizes if size >= taps] for taps in w.mask_shape)
    return [block for block in product(*choices) if math.prod(block) <= MAX_THREADS_PER_BLOCK]
