"""Outputs and inputs in registers, vector loads, the mask in constant memory: as near the memory's limit as it gets.

A thread computes a vector of four neighbouring samples from three aligned vector loads: its own four and those on both
sides, which its neighbours load as well, so that the L1 cache serves two of the three. Nothing is staged in shared
memory, and no thread waits for another. Per output that is one load instruction in place of one a tap, hence enough
loads in flight to keep the memory busy. A signal whose length no vector divides has its last elements loaded and stored
one by one.
"""

from tvm.s_tir import Schedule

from tvmconv.knobs import Knobs
from tvmconv.library import schedule
from tvmconv.workloads import Filter1d

from .. import strips


@schedule("filter1d", usage=strips.usage, condition=strips.fits, promising=strips.fits)
def register(s: Schedule, w: Filter1d, k: Knobs) -> Schedule:
    """A thread computes a few vectors of neighbouring outputs; see `strips`."""
    return strips.program(w, strips.ask(w, k))
