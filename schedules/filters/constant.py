"""The mask in constant memory: what all threads read at once is an operand of the multiplication.

It differs from `basic` in the reads of the mask. All threads of a warp need the same tap at the same time, and the
constant cache serves such a uniform read in one access. With unrolled taps, each tap is an operand of its multiply-add,
read from the constant bank or, since Hopper, from a uniform register that one instruction loads for the whole warp. The
mask needs no address and no register per thread, and half of the loads disappear. The signal or image is read as
before. Constant memory holds 64 KiB, which limits the mask.
"""

from tvm.s_tir import Schedule

from tvmconv.registry import schedule
from tvmconv.space import Knobs
from tvmconv.workloads.filters import Filter

from ..primitives import set_memory_scope
from .output_tiling import can_place_mask_in_constant_memory, declare_block_knobs, schedule_from_global_memory


@schedule("filter1d", "filter2d", condition=can_place_mask_in_constant_memory)
def constant(s: Schedule, w: Filter, k: Knobs) -> None:
    """Compute as many samples or pixels per block as it has threads."""
    schedule_from_global_memory(s, declare_block_knobs(k, w))
    set_memory_scope(s, K="constant")
