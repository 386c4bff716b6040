"""Gradients of the weights of depthwise convolutions: a sum over all pixels of the batch for each tap and channel.

The result is small and the sum is long. A thread keeps the float32 sums of some filter rows for a vector of channels in
registers. It walks over tiles of pixels of dY, and loads the window of X around each tile once. Large filters are
divided among the threads of a CTA and among CTAs, which share dY and X through the caches.

The threads of a CTA add their sums in shared memory, and the CTAs through a workspace that a second kernel reads. The
order of all sums is fixed, so that each run returns the same bits (`wgrad_kernel`). Any stride and dilation is allowed.
"""

from __future__ import annotations

from tvm.s_tir import Schedule

from tvmconv.registry import schedule
from tvmconv.requirements import CHANNELS_LAST_LAYOUT, all_of
from tvmconv.space import Knobs
from tvmconv.workloads.conv_gradient import WeightGradient

from ..gradient_operators import WGRAD
from ..reduction import FLOAT_DTYPES, has_filter_per_channel
from .wgrad_kernel import build_wgrad_schedule
from .wgrad_knobs import compute_usage, declare_knobs, list_starting_configs


@schedule(
    *WGRAD,
    dtypes=FLOAT_DTYPES,
    usage=compute_usage,
    condition=all_of(CHANNELS_LAST_LAYOUT, has_filter_per_channel),
    search_if=has_filter_per_channel,
    starting_configs=list_starting_configs,
    supersedes=("implicit_gemm",),
)
def depthwise_nhwc(s: Schedule, w: WeightGradient, k: Knobs) -> Schedule:
    """Sum products of dY and X in registers, over the threads of a CTA, and over parts of the pixels."""
    return build_wgrad_schedule(declare_knobs(w, k))
