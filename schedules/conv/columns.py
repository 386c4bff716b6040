"""Read the shared tiles by columns: the reduction steps along the filter's height inside, along its width outside.

It differs from `tiling` in that the reduction tiles of height and width are exchanged. A thread of `tiling` reads a run
of neighbouring columns, so that neighbouring threads start a few banks apart and conflict. With one filter column per
step, the tile in shared memory is as wide as the block's output. A thread's reads then go down a column, and the reads
of a warp spread over the banks.

Measured: tuning_logs/nvidia-h200/d2l/d2l-banks.md, in which the conflicts of `tiling` are gone. The rows of the tile
are now aligned, and the compiler merges a thread's neighbouring loads into wide ones.
"""

from tvm.s_tir import Schedule

from tvmconv.registry import schedule
from tvmconv.space import Knobs
from tvmconv.workloads import Conv2d

from .axis_tiles import declare_tile_knobs
from .reduction import DTYPES
from .tiling import OUTPUT_FACTORS, tile_convolution
from .tiling import REDUCTION_FACTORS as ROW_REDUCTION_FACTORS

COLUMN_REDUCTION_FACTORS = {a: ROW_REDUCTION_FACTORS[b] for a, b in (("rc", "rc"), ("rh", "rw"), ("rw", "rh"))}


@schedule("conv2d", dtypes=DTYPES)
def columns(s: Schedule, w: Conv2d, k: Knobs) -> None:
    """Tile outputs as (block, thread, local) and reductions as (step, substep, tap)."""
    tile_convolution(s, w, declare_tile_knobs(k, w, OUTPUT_FACTORS, COLUMN_REDUCTION_FACTORS))
