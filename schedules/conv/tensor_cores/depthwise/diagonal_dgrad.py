"""Gradients of inputs of depthwise convolutions without a stride, as products with diagonal matrices (`diagonals`).

The gradient is the convolution of dY with the flipped filters.
"""

from __future__ import annotations

from tvm.s_tir import Schedule

from tvmconv.registry import schedule
from tvmconv.requirements import CHANNELS_LAST_LAYOUT, all_of
from tvmconv.space import Columns, Knobs
from tvmconv.space.search_space import ResourceUsage
from tvmconv.workloads.conv_gradient import InputGradient

from ....primitives import disable_buffer_reuse
from ....tir_builder import Buffer, build_schedule
from ...nhwc_direct.depthwise_tma_dgrad import get_convolution
from .diagonal_config import DiagonalConfig, can_multiply_octets, is_promising
from .diagonals import emit_diagonals


def has_gradient_of_octets(w: InputGradient) -> bool:
    """Whether the gradient is a depthwise convolution of dY whose channels fill octets."""
    return w.direct_convolution is not None and can_multiply_octets(w.direct_convolution)


def compute_usage(w: InputGradient, columns: Columns) -> ResourceUsage:
    """Return the resources that configs use."""
    return DiagonalConfig.compute_usage(get_convolution(w), columns)


@schedule(
    "conv2d_dgrad",
    dtypes=("float16", "bfloat16"),
    usage=compute_usage,
    condition=all_of(CHANNELS_LAST_LAYOUT, has_gradient_of_octets),
    search_if=lambda w: is_promising(get_convolution(w)),
    starting_configs=lambda w: DiagonalConfig.list_starting_configs(get_convolution(w)),
    supersedes=("implicit_gemm",),
    device_kinds=("cuda",),
    min_arch=90,
)
def depthwise_diagonal(s: Schedule, w: InputGradient, k: Knobs) -> Schedule:
    """Multiply octets of channels of dY at two taps by diagonal matrices of the filters, row by row of a window."""
    config = DiagonalConfig.declare_knobs(get_convolution(w), k)
    dy, filters = w.OPERANDS
    roles = {dy: "X", filters: "K", w.RESULT: "Y"}

    def emit(arguments: dict[str, Buffer]) -> None:
        named = {roles.get(name, name): each for name, each in arguments.items()}
        emit_diagonals(config, named, is_flipped=True)

    built = build_schedule(w, emit)
    disable_buffer_reuse(built)  # TVM does not see the accesses of TMA
    return built
