"""Gradients of the weights of grouped convolutions with few channels per group, by multiply-adds in registers.

The kernel is that of depthwise gradients. A thread multiplies a vector of channels of dY by a vector of channels of X
of the same group (`vector_in`), and keeps the sums of all pairs for some taps.
"""

from __future__ import annotations

from tvm.s_tir import Schedule

from tvmconv.registry import schedule
from tvmconv.requirements import CHANNELS_LAST_LAYOUT, all_of
from tvmconv.space import Knobs
from tvmconv.workloads.conv_gradient import WeightGradient

from ..gradient_operators import WGRAD
from ..reduction import FLOAT_DTYPES
from .grouped_nhwc import MAX_GRADIENT_GROUP_CHANNELS, has_groups
from .wgrad_kernel import build_wgrad_schedule
from .wgrad_knobs import compute_usage, declare_knobs, list_starting_configs


@schedule(
    *WGRAD,
    dtypes=FLOAT_DTYPES,
    usage=compute_usage,
    condition=all_of(CHANNELS_LAST_LAYOUT, has_groups),
    search_if=lambda w: has_groups(w) and w.C // w.groups <= MAX_GRADIENT_GROUP_CHANNELS,
    starting_configs=list_starting_configs,
    supersedes=("implicit_gemm",),
)
def grouped_nhwc(s: Schedule, w: WeightGradient, k: Knobs) -> Schedule:
    """Sum products of a group's channels in registers, over the threads of a CTA, and over parts of the pixels."""
    return build_wgrad_schedule(declare_knobs(w, k))
