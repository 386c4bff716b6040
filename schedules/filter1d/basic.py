"""The naive baseline: one thread an output, everything from global memory.

Each thread walks over the mask and tests at every tap whether the signal has a sample there. Samples that neighbouring
outputs have in common, and the mask, are loaded again by every thread; what keeps that from the DRAM are the caches
alone. The other variants are measured against this one.
"""

from tvm.s_tir import Schedule

from tvmconv.knobs import Knobs
from tvmconv.library import schedule
from tvmconv.workloads import Filter1d

from .. import strips
from ..filters import ask_block, read_global


@schedule("filter1d", promising=strips.too_large, baseline=True)
def basic(s: Schedule, w: Filter1d, k: Knobs) -> None:
    """A block computes as many outputs as it has threads."""
    read_global(s, w, ask_block(k, w))
