"""Gradients in tiles: shared memory for the block, registers for the thread, as in `tiling` of convolutions.

A block computes a tile of channels × rows × columns of dX, and a thread a small tile of it. For each step of the
reduction, the threads of a block copy a tile of dY, with the zeros of its border and of a stride, and the flipped taps
of K to shared memory. In a wgrad, rows and columns of the result are those of the filter, and the reduction runs over
images, rows and columns of dY.
"""

from typing import cast

from tvm.s_tir import Schedule

from tvmconv.registry import schedule
from tvmconv.space import Knobs
from tvmconv.workloads import Conv2d
from tvmconv.workloads.conv_gradient import DerivedConv

from ..axis_tiles import declare_tile_knobs
from ..reduction import DTYPES
from ..tiling import OUTPUT_FACTORS, REDUCTION_FACTORS, tile_convolution


@schedule("conv2d_dgrad", "conv2d_wgrad", "conv2d_transpose", dtypes=DTYPES)
def tiling(s: Schedule, w: DerivedConv, k: Knobs) -> None:
    """Tile results as (block, thread, local) and reductions as (step, substep, tap)."""
    conv = cast(Conv2d, w.as_convolution)
    tile_convolution(s, conv, declare_tile_knobs(k, conv, OUTPUT_FACTORS, REDUCTION_FACTORS))
