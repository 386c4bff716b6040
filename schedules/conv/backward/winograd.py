"""Gradients of inputs by Winograd's algorithm: the tiles of `winograd` on the convolution of dY.

At stride 1, dX is a convolution of dY with flipped filters, whose transform reads K in that order. Weights change in
each step of a training, so that their transform is part of the time of each launch.
"""

from __future__ import annotations

import functools
from typing import cast

from tvm import te
from tvm.s_tir import Schedule

from tvmconv.registry import schedule
from tvmconv.space import Knobs
from tvmconv.workloads import Conv2d
from tvmconv.workloads.conv_gradient import InputGradient
from tvmconv.workloads.conv_gradient_te import declare_direct_convolution

from ..reduction import FLOAT_DTYPES
from ..winograd import knobs
from ..winograd.schedule import schedule_stages
from ..winograd.te_stages import declare_outputs


def view_as_convolution(w: InputGradient) -> Conv2d:
    """Return the convolution of dY."""
    return cast(Conv2d, w.direct_convolution)


def is_supported(w: InputGradient) -> bool:
    """Whether dX is a convolution of dY, with filters that Winograd's algorithm computes accurately enough."""
    return w.direct_convolution is not None and knobs.is_supported(view_as_convolution(w))


@schedule(
    "conv2d_dgrad",
    dtypes=FLOAT_DTYPES,
    usage=lambda w, columns: knobs.compute_usage(view_as_convolution(w), columns),
    condition=is_supported,
    search_if=lambda w: knobs.is_promising(view_as_convolution(w)),
    estimate_seconds=lambda w: knobs.estimate_seconds(view_as_convolution(w)),
)
def winograd(s: Schedule, w: InputGradient, k: Knobs) -> Schedule:
    """Tile channels and output tiles as (block, virtual thread, thread, local) and reductions as (step, tap)."""
    conv = view_as_convolution(w)
    grid, config = knobs.declare_knobs(k, conv)
    channels, tiles = (tile.extent for tile in config.output)
    declare_sums = functools.partial(declare_outputs, conv, grid, channels, tiles)
    s = Schedule(te.create_prim_func(list(declare_direct_convolution(w, conv, declare_sums))))
    schedule_stages(s, conv, grid, config, w.RESULT)
    return s
