"""Gradients of inputs of stride 1, and transposed convolutions, by mma.sync: the kernel of `mma_sync` on dY.

The gradient is a convolution of dY with other filters: its input channels are the weight's filters, its output channels
are the weight's channels, and taps are flipped. A small launch transposes the weight, so that the reduction of the
product is contiguous. The loader of the filters flips the taps. All else is that of `mma_sync`.
"""

from __future__ import annotations

from typing import cast

from tvm.s_tir import Schedule

from tvmconv.registry import schedule
from tvmconv.space import Columns, Knobs
from tvmconv.space.search_space import ResourceUsage
from tvmconv.workloads import Conv
from tvmconv.workloads.conv_gradient import InputGradient

from ....tir_builder import Buffer
from ...gradient_conversion import build_channels_last_gradient
from ...gradient_operators import DGRAD, TRANSPOSE
from ..filter_transposition import emit_transposed_filters
from ..gemm.cp_async import TransposedFilterGather
from .kernel import emit_kernels
from .knobs import compute_usage, declare_knobs
from .schedule import DTYPES, is_promising


def is_direct_convolution(w: InputGradient) -> bool:
    """Whether strides are 1, and padding hides no element of dY."""
    return w.direct_convolution is not None


def view_as_convolution(w: InputGradient) -> Conv:
    """Return the convolution of dY that the gradient is, channels last."""
    return cast("Conv", w.direct_convolution).to_channels_last()


def compute_gradient_usage(w: InputGradient, columns: Columns) -> ResourceUsage:
    """Return the resources that configs use."""
    return compute_usage(view_as_convolution(w), columns)


@schedule(
    *(*DGRAD, *TRANSPOSE),
    dtypes=DTYPES,
    usage=compute_gradient_usage,
    condition=is_direct_convolution,
    search_if=lambda w: is_direct_convolution(w) and is_promising(view_as_convolution(w)),
    supersedes=("implicit_gemm", "tiling"),
    device_kinds=("cuda",),
    min_arch=80,
)
def mma_sync(s: Schedule, w: InputGradient, k: Knobs) -> Schedule:
    """Transpose the weight, and emit the kernel of the convolution of dY."""
    conv = view_as_convolution(w)
    config, (dy, filters) = declare_knobs(conv, k), w.OPERANDS

    def emit(arguments: dict[str, Buffer]) -> None:
        roles = {dy: "X", filters: "K", w.RESULT: "Y"}
        arguments = {roles.get(name, name): each for name, each in arguments.items()}
        arguments["K"] = emit_transposed_filters(w.forward, arguments["K"])
        emit_kernels(conv, config, arguments, TransposedFilterGather)

    return build_channels_last_gradient(w, emit)
