"""Neighbours' values by warp shuffle: each input is loaded once a warp and passed from lane to lane.

Against shared memory it saves the barrier and the stores; a shuffle itself takes the path through the shared-memory
unit that a load would take. For CUDA only: TVM has no warp shuffles for OpenCL.
"""

from tvm.s_tir import Schedule

from tvmconv.knobs import Knobs
from tvmconv.library import schedule
from tvmconv.workloads import Filter1d

from .. import lanes


@schedule("filter1d", kinds=("cuda",), condition=lanes.fits)
def shuffle(s: Schedule, w: Filter1d, k: Knobs) -> Schedule:
    """A warp computes 32 neighbouring outputs; see `lanes`."""
    return lanes.program(w, (k.choice("warps", (1, 2, 4, 8, 16, 32), default=8), 1))
