"""Neighbours' values by warp shuffle: of each row, an input is loaded once a warp and passed from lane to lane.

Rows are shared through the L1 cache: a warp loads every row that the mask reaches, as its neighbours above and below
do. Against shared memory it saves the barrier and the stores; a shuffle itself takes the path through the shared-memory
unit that a load would take. For CUDA only: TVM has no warp shuffles for OpenCL.
"""

from tvm.s_tir import Schedule

from tvmconv.knobs import Knobs
from tvmconv.library import schedule
from tvmconv.workloads import Filter2d

from .. import lanes


@schedule("filter2d", kinds=("cuda",), condition=lanes.fits)
def shuffle(s: Schedule, w: Filter2d, k: Knobs) -> Schedule:
    """A warp computes 32 neighbouring outputs of a row, channels interleaved; see `lanes`."""
    along = k.choice("warps_x", (1, 2, 4), default=1)
    return lanes.program(w, (along, k.choice("threads_y", (1, 2, 4, 8), default=8)))
