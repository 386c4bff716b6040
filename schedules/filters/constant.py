"""The mask in constant memory: what all threads read at once is an operand of the multiplication.

From `basic`: all threads of a warp need the same tap at the same time, and a read that is the same for all of them is
what the constant cache serves in one go. With the taps unrolled, each is an operand of its multiply-add, straight from
the constant bank or, since Hopper, by way of a uniform register that one instruction fills for the whole warp. The mask
takes no address and no register of a thread, and half of the loads are gone. The signal or image is read as before.
Constant memory holds 64 KiB, which bounds the mask.
"""

from tvm.s_tir import Schedule

from tvmconv.registry import schedule
from tvmconv.space import Knobs
from tvmconv.workloads.filters import Filter

from ..primitives import set_memory_scope
from .output_tiling import can_place_mask_in_constant_memory, declare_block_knobs, schedule_from_global_memory


@schedule("filter1d", "filter2d", condition=can_place_mask_in_constant_memory)
def constant(s: Schedule, w: Filter, k: Knobs) -> None:
    """A block computes as many samples or pixels as it has threads."""
    schedule_from_global_memory(s, w, declare_block_knobs(k, w))
    set_memory_scope(s, K="constant")
