"""Gradients of inputs of depthwise layers, and transposed ones, as products with diagonal matrices (`diagonals`).

The gradient is a convolution of dY with flipped filters. With a stride, the residue classes of outputs have different
taps, and read the same fragments of dY.
"""

from __future__ import annotations

from tvm.s_tir import Schedule

from tvmconv.registry import schedule
from tvmconv.requirements import CHANNELS_LAST_LAYOUT, all_of
from tvmconv.space import Columns, Knobs
from tvmconv.space.search_space import ResourceUsage
from tvmconv.workloads.conv_gradient import InputGradient

from ...gradient_operators import DGRAD, TRANSPOSE
from ...transposed_view import TransposedView
from .diagonal_config import MAX_AXES, DiagonalConfig, fits_octets, is_promising
from .diagonals import build_diagonal_schedule


def has_octets(w: InputGradient) -> bool:
    """Whether the kernel can compute the gradient."""
    return not w.forward.has_large_tensors and fits_octets(TransposedView.from_workload(w))


def compute_usage(w: InputGradient, columns: Columns) -> ResourceUsage:
    """Return the resources that configs use."""
    return DiagonalConfig.compute_usage(TransposedView.from_workload(w), columns)


@schedule(
    *(*DGRAD[:MAX_AXES], *TRANSPOSE[:MAX_AXES]),
    dtypes=("float16", "bfloat16"),
    usage=compute_usage,
    condition=all_of(CHANNELS_LAST_LAYOUT, has_octets),
    search_if=is_promising,
    starting_configs=lambda w: DiagonalConfig.list_starting_configs(TransposedView.from_workload(w)),
    supersedes=("implicit_gemm",),
    device_kinds=("cuda",),
    min_arch=90,
)
def depthwise_diagonal(s: Schedule, w: InputGradient, k: Knobs) -> Schedule:
    """Multiply octets of channels of dY at two shifts by diagonal matrices of the filters, row by row of a window."""
    return build_diagonal_schedule(w, DiagonalConfig.declare_knobs(TransposedView.from_workload(w), k))
