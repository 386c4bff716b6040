"""The naive baseline: one thread a sample or a pixel, everything from global memory.

Each thread walks over the mask and tests at every tap whether the signal or the image has something there. Inputs that
neighbouring outputs have in common, and the mask, are loaded again by every thread; what keeps that from the DRAM are
the caches alone. The other variants are measured against this one.

A thread computes the channels of its pixel one after another. As channels are interleaved, a warp uses one word in C of
what it loads, and the others when their channel's turn comes, if the L1 cache still has them.
"""

from tvm.s_tir import Schedule

from tvmconv.registry import schedule, schedules
from tvmconv.space import Knobs
from tvmconv.workloads.filters import Filter

from .output_tiling import declare_block_knobs, schedule_from_global_memory


def is_mask_too_large_for_register(w: Filter) -> bool:
    """Whether the mask is too large for `register`, which is searched otherwise."""
    return all(candidate.name != "register" for candidate in schedules(w))


@schedule("filter1d", "filter2d", search_if=is_mask_too_large_for_register, baseline=True)
def basic(s: Schedule, w: Filter, k: Knobs) -> None:
    """A block computes as many samples or pixels as it has threads."""
    schedule_from_global_memory(s, w, declare_block_knobs(k, w))
