"""Gradients of inputs of depthwise convolutions, channels first, by the strips of `depthwise_nhwc`.

A thread computes one channel of its strip. Neighbouring threads compute neighbouring columns of a row, which are
contiguous in memory, and the L1 cache serves the elements that windows share. Flipped taps, and strides without work on
zeros, are as in the gradients of `depthwise_nhwc`.
"""

from __future__ import annotations

from tvm.s_tir import Schedule

from tvmconv.registry import schedule
from tvmconv.requirements import CHANNELS_FIRST_LAYOUT, all_of
from tvmconv.space import Knobs
from tvmconv.workloads.conv_gradient import InputGradient

from ..gradient_operators import DGRAD, TRANSPOSE
from ..nhwc_direct import depthwise_dgrad
from ..nhwc_direct.depthwise_nhwc import DepthwiseNhwcKernel
from ..nhwc_direct.strip_knobs import declare_knobs
from ..nhwc_direct.strip_thread import build_conv_schedule
from ..reduction import FLOAT_DTYPES
from ..transposed_view import TransposedView


@schedule(
    *(*DGRAD, *TRANSPOSE),
    dtypes=FLOAT_DTYPES,
    usage=depthwise_dgrad.compute_usage,
    condition=all_of(CHANNELS_FIRST_LAYOUT, depthwise_dgrad.has_gradient_per_channel, depthwise_dgrad.SMALL_STRIDE),
    search_if=depthwise_dgrad.has_gradient_per_channel,
    supersedes=("implicit_gemm", "tiling"),
)
def depthwise(s: Schedule, w: InputGradient, k: Knobs) -> Schedule:
    """Compute a strip of pixels of dX per thread, of one channel; tiles count steps of the stride."""
    config = declare_knobs(depthwise_dgrad.DepthwiseGradientConfig, k, TransposedView.from_workload(w))
    return build_conv_schedule(config, DepthwiseNhwcKernel)
