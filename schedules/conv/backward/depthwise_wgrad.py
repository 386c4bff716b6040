"""Gradients of weights of depthwise convolutions, channels first, by the sums of `depthwise_nhwc`.

A thread sums up tiles of pixels of one channel. Neighbouring threads have neighbouring tiles of a row, which are
contiguous in memory. The order of all sums is fixed, so that each run returns the same bits.
"""

from __future__ import annotations

from tvm.s_tir import Schedule

from tvmconv.registry import schedule
from tvmconv.requirements import CHANNELS_FIRST_LAYOUT, all_of
from tvmconv.space import Knobs
from tvmconv.workloads.conv_gradient import WeightGradient

from ..gradient_operators import WGRAD
from ..nhwc_direct.wgrad_kernel import build_wgrad_schedule
from ..nhwc_direct.wgrad_knobs import compute_usage, declare_knobs
from ..reduction import FLOAT_DTYPES, has_filter_per_channel


@schedule(
    *WGRAD,
    dtypes=FLOAT_DTYPES,
    usage=compute_usage,
    condition=all_of(CHANNELS_FIRST_LAYOUT, has_filter_per_channel),
    search_if=has_filter_per_channel,
    supersedes=("implicit_gemm", "tiling"),
)
def depthwise(s: Schedule, w: WeightGradient, k: Knobs) -> Schedule:
    """Sum products of dY and X in registers, over the threads of a CTA, and over parts of the pixels."""
    return build_wgrad_schedule(declare_knobs(w, k))
