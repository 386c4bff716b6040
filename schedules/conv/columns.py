"""Read the shared tiles by columns: the reduction steps along the filter's height inside, along its width outside.

From `tiling`: only the reduction tiles of height and width change places. A thread of `tiling` reads a run of
neighbouring columns, so that threads side by side start a few banks apart and collide; with one filter column a step,
the tile in shared memory is as wide as the block's output, a thread's reads go down a column, and the reads of a warp
spread over the banks.

Measured: tuning_logs/nvidia-h200/d2l-banks.md, where the conflicts of `tiling` are gone. The rows of the tile are
aligned now, and the compiler merges a thread's neighbouring loads into wide ones.
"""

from tvm.s_tir import Schedule

from tvmconv.registry import schedule
from tvmconv.space import Knobs
from tvmconv.workloads import Conv2d

from .axis_tiles import declare_tile_knobs
from .reduction import DTYPES
from .tiling import OUTPUT_FACTORS, tile_convolution
from .tiling import REDUCTION_FACTORS as ROW_REDUCTION_FACTORS

COLUMN_REDUCTION_FACTORS = {
    "rc": ROW_REDUCTION_FACTORS["rc"],
    "rh": ROW_REDUCTION_FACTORS["rw"],
    "rw": ROW_REDUCTION_FACTORS["rh"],
}


@schedule("conv2d", dtypes=DTYPES)
def columns(s: Schedule, w: Conv2d, k: Knobs) -> None:
    """Output tiles are (block, thread, local); reduction tiles are (step, substep, tap)."""
    tile_convolution(s, w, declare_tile_knobs(k, w, OUTPUT_FACTORS, COLUMN_REDUCTION_FACTORS))
