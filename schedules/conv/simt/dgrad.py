"""Gradients of inputs, and transposed convolutions, in float32 on the FMA units: the kernel of `mma_sync` on dY.

A small launch transposes the weight, so that the reduction is contiguous in both operands. A lane loads two elements of
each of its rows and columns at once, and multiplies them where `mma_sync` has an mma of TF32. All else is that of
`mma_sync`: with a stride, each residue class of the pixels has its taps, and no product is one with an inserted zero.
"""

from __future__ import annotations

from tvm.s_tir import Schedule

from tvmconv.registry import schedule
from tvmconv.space import Knobs
from tvmconv.workloads.conv_gradient import InputGradient
from tvmconv.workloads.dtypes import ACCUMULATOR

from ..gradient_operators import DGRAD, TRANSPOSE
from ..tensor_cores.mma_sync.dgrad import build_gradient, compute_gradient_usage, is_gradient_promising

MIN_CHANNELS = 8  # of dX and of dY in each group


def has_enough_channels(w: InputGradient) -> bool:
    """Return whether the channels of a group fill the columns of a warp."""
    return is_gradient_promising(w) and min(w.C, w.O) // w.groups >= MIN_CHANNELS


@schedule(
    *(*DGRAD, *TRANSPOSE),
    dtypes=(ACCUMULATOR,),
    usage=compute_gradient_usage,
    search_if=has_enough_channels,
    supersedes=("implicit_gemm", "tiling"),
    device_kinds=("cuda",),
    min_arch=80,
)
def simt(s: Schedule, w: InputGradient, k: Knobs) -> Schedule:
    """Emit the kernel of the convolution of dY, or of one for each residue class, which reads a transposed weight."""
    return build_gradient(w, k)
