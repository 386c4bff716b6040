"""Gradients of inputs, and transposed convolutions, by mma.sync: the kernel of `mma_sync` on dY.

The gradient of stride 1 is a convolution of dY with other filters: its input channels are the weight's filters, its
output channels are the weight's channels, and taps are flipped. The rows of the weight in shared memory are the
reduction, as in a wgrad. All else is that of `mma_sync`. If the weight's channels are too narrow for cp.async, a small
launch transposes the weight first.

The gradients of other strides are several such convolutions of a transposed weight, which `strided_dgrad` computes in
one launch.
"""

from __future__ import annotations

from tvm.s_tir import Schedule

from tvmconv.registry import schedule
from tvmconv.space import Columns, Knobs
from tvmconv.space.search_space import ResourceUsage
from tvmconv.workloads import Conv
from tvmconv.workloads.conv_gradient import InputGradient
from tvmconv.workloads.dtypes import ACCUMULATOR

from ....primitives import keep_allocated_sizes
from ....tir_builder import Buffer
from ...gradient_conversion import build_channels_last_gradient, view_channels_last
from ...gradient_operators import DGRAD, TRANSPOSE
from ..filter_transposition import emit_transposed_filters
from ..gemm.cp_async import MIN_COPY_BYTES, TransposedFilterGather
from ..gemm.mn_major_operands import FilterRows
from ..implicit_gemm_shape import ImplicitGemmShape
from . import strided_dgrad
from .kernel import emit_kernels
from .knobs import compute_usage, declare_knobs
from .schedule import DTYPES, is_promising
from .tile_config import MmaSyncTileConfig


def compute_gradient_usage(w: InputGradient, columns: Columns) -> ResourceUsage:
    """Return the resources that configs use."""
    w = view_channels_last(w)
    conv = w.direct_convolution
    return compute_usage(conv, columns) if conv else strided_dgrad.compute_strided_usage(w, columns)


def is_gradient_promising(w: InputGradient) -> bool:
    """Return whether there is one group, or each group fills 16-byte chunks and half an mma."""
    w = view_channels_last(w)
    conv = w.direct_convolution
    return is_promising(conv) if conv else strided_dgrad.is_promising(w)


def has_copies_along_channels(conv: Conv) -> bool:
    """Return whether cp.async can copy neighbouring channels of dX from the weight."""
    shape = ImplicitGemmShape.from_workload(conv)
    return shape.n * shape.itemsize % MIN_COPY_BYTES == 0


def copies_whole_swizzle_periods(config: MmaSyncTileConfig) -> bool:
    """Return whether the threads copy the rows that a swizzle permutes, 8 of 16 bits or 4 of 32 bits, at a time."""
    return int(config.block_n).bit_count() == 1 and bool(config.num_threads >= config.block_n)


@schedule(
    *(*DGRAD, *TRANSPOSE),
    dtypes=DTYPES,
    usage=compute_gradient_usage,
    search_if=is_gradient_promising,
    supersedes=("implicit_gemm", "tiling"),
    device_kinds=("cuda",),
    min_arch=80,
)
def mma_sync(s: Schedule, w: InputGradient, k: Knobs) -> Schedule:
    """Emit the kernel of the convolution of dY, or of one for each residue class, which reads a transposed weight.

    Without a stride, the kernel reads the weight as it is, unless its channels are too narrow for cp.async, or a tile's
    do not suit the number of threads.
    """
    return build_gradient(w, k)


def build_gradient(w: InputGradient, k: Knobs) -> Schedule:
    """Declare the knobs, and return the schedule of the kernel and of the launches before it.

    float32 is multiplied on the FMA units, by a mainloop that reads a transposed weight.
    """
    (dy, filters), viewed = w.OPERANDS, view_channels_last(w)
    conv = viewed.direct_convolution
    config = declare_knobs(conv, k) if conv else strided_dgrad.declare_strided_knobs(viewed, k)
    reads_weight = conv is not None and w.dtype != ACCUMULATOR and has_copies_along_channels(conv)

    def emit(arguments: dict[str, Buffer]) -> None:
        roles = {dy: "X", filters: "K", w.RESULT: "Y"}
        arguments = {roles.get(name, name): each for name, each in arguments.items()}
        if conv and reads_weight and copies_whole_swizzle_periods(config):
            emit_kernels(conv, config, arguments, FilterRows)
            return
        arguments["K"] = emit_transposed_filters(w.forward, arguments["K"])
        if conv:
            emit_kernels(conv, config, arguments, TransposedFilterGather)
        else:
            strided_dgrad.emit_strided_dgrad(viewed, config, arguments)

    built = build_channels_last_gradient(w, emit)
    if conv is None:
        keep_allocated_sizes(built)
    return built
