"""Outputs and inputs in registers, vector loads, the mask in constant memory: as near the memory's limit as it gets.

A thread computes a few rows of four neighbouring elements. It walks down the input rows that these see; each is loaded
once, in aligned vectors, and added to every output row whose mask covers it: an input comes from the L1 cache once a
thread and neighbouring column instead of once a tap. Large masks would make the text too long; they are walked through
row by row in a loop, which loads more and computes as much. Nothing is staged in shared memory, and no thread waits for
another. Rows that no vector divides take narrower ones, down to single elements.
"""

from tvm.s_tir import Schedule

from tvmconv.knobs import Knobs
from tvmconv.library import schedule
from tvmconv.workloads import Filter2d

from .. import strips


@schedule("filter2d", usage=strips.usage, condition=strips.fits, promising=strips.fits)
def register(s: Schedule, w: Filter2d, k: Knobs) -> Schedule:
    """A thread computes a few rows of neighbouring outputs; see `strips`."""
    return strips.program(w, strips.ask(w, k))
