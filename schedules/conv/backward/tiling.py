"""Gradients in tiles: shared memory for the block, registers for the thread, as in `tiling` of convolutions.

A block computes a tile of channels × rows × columns of dX, and a thread a small tile of it. For each step of the
reduction, the threads of a block copy a tile of dY, with the zeros of its border and of a stride, and the flipped taps
of K to shared memory. In a wgrad, rows and columns of the result are those of the filter, and the reduction runs over
images, rows and columns of dY.
"""

import math
from typing import Any, cast

from tvm.s_tir import Schedule

from tvmconv.registry import schedule
from tvmconv.space import Columns, Knobs
from tvmconv.target import MAX_THREADS_PER_BLOCK, MAX_THREADS_Z, STATIC_SHARED_BYTES
from tvmconv.workloads import Conv2d
from tvmconv.workloads.conv_gradient import DerivedConv

from ..axis_tiles import compute_staged_bytes, declare_tile_knobs
from ..reduction import FLOAT_DTYPES
from ..tiling import OUTPUT_FACTORS, REDUCTION_FACTORS, tile_convolution


@schedule("conv2d_dgrad", "conv2d_wgrad", "conv2d_transpose", dtypes=FLOAT_DTYPES)
def tiling(s: Schedule, w: DerivedConv, k: Knobs) -> None:
    """Tile results as (block, thread, local) and reductions as (step, substep, tap)."""
    conv = cast(Conv2d, w.as_convolution)
    tiles = declare_tile_knobs(k, conv, OUTPUT_FACTORS, REDUCTION_FACTORS)
    _prune_large_tiles(k, conv)
    tile_convolution(s, conv, tiles)


def _prune_large_tiles(k: Knobs, conv: Conv2d) -> None:
    """Leave out of searches the tiles whose threads or operands exceed a block."""

    def count_threads(columns: Columns) -> Any:
        return math.prod(columns[f"tile_{axis}"][:, 1] for axis in OUTPUT_FACTORS)

    def count_bytes(columns: Columns) -> Any:
        axes = (*OUTPUT_FACTORS, *REDUCTION_FACTORS)
        return compute_staged_bytes(conv, {axis: tuple(columns[f"tile_{axis}"][:, 1:].T) for axis in axes})

    k.prune(
        f"at most {MAX_THREADS_PER_BLOCK} threads per block, and {MAX_THREADS_Z} along the channels",
        lambda c: (count_threads(c) <= MAX_THREADS_PER_BLOCK) & (c["tile_c"][:, 1] <= MAX_THREADS_Z),
    )
    k.prune(
        f"at most {STATIC_SHARED_BYTES} bytes of shared memory per block",
        lambda c: count_bytes(c) <= STATIC_SHARED_BYTES,
    )
