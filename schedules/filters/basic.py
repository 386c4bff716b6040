"""The naive baseline: one thread a sample or a pixel, everything from global memory.

Each thread loops over the mask and checks the bounds of the signal or image at every tap. Every thread loads the mask
again, and the inputs that it shares with its neighbours; only the caches keep these loads from DRAM. The other variants
are compared with this one.

A thread computes the channels of its pixel one after another. As channels are interleaved, a warp uses one of C loaded
words at a time, and the others later if the L1 cache still holds them.
"""

from tvm.s_tir import Schedule

from tvmconv.registry import schedule, schedules
from tvmconv.space import Knobs
from tvmconv.workloads.filters import Filter

from .output_tiling import declare_block_knobs, schedule_from_global_memory


def is_mask_too_large_for_register(w: Filter) -> bool:
    """Return whether the mask is too large for `register`, which is searched otherwise."""
    return all(candidate.name != "register" for candidate in schedules(w))


@schedule("filter1d", "filter2d", search_if=is_mask_too_large_for_register, baseline=True)
def basic(s: Schedule, w: Filter, k: Knobs) -> None:
    """Compute as many samples or pixels per block as it has threads."""
    schedule_from_global_memory(s, declare_block_knobs(k, w))
