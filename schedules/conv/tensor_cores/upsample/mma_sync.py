"""Upsampled convolutions by mma.sync: strided transposed convolutions with merged filters.

It is `upsample_hopper` for all tensor cores since sm_80. A small launch, which runs once for constant filters, adds up
the taps that read the same element; the kernel is that of `..mma_sync.strided_dgrad`.
"""

from __future__ import annotations

from tvm.s_tir import Schedule

from tvmconv.registry import schedule
from tvmconv.space import Knobs
from tvmconv.workloads import Conv
from tvmconv.workloads.features import UPSAMPLING

from ....primitives import disable_buffer_reuse, keep_allocated_sizes, mark_constant_args
from ....tir_builder import Buffer, build_schedule
from ..mma_sync import strided_dgrad
from ..mma_sync.schedule import DTYPES
from .merged_filters import emit_merged_filters, is_merging_useful, make_transposed


@schedule(
    *("conv1d", "conv2d", "conv3d"),
    dtypes=DTYPES,
    usage=lambda w, columns: strided_dgrad.compute_strided_usage(make_transposed(w), columns),
    condition=is_merging_useful,
    search_if=lambda w: strided_dgrad.is_promising(make_transposed(w)),
    supersedes=("direct", "implicit_gemm", "tensor_core"),
    device_kinds=("cuda",),
    min_arch=80,
    features=(UPSAMPLING,),
)
def upsample_mma_sync(s: Schedule, w: Conv, k: Knobs) -> Schedule:
    """Emit the sums of taps, and the kernel of the transposed convolution."""
    transposed = make_transposed(w)
    config = strided_dgrad.declare_strided_knobs(transposed, k)

    def emit(arguments: dict[str, Buffer]) -> None:
        filters = emit_merged_filters(w, arguments["K"], channels_last=True)
        strided_dgrad.emit_strided_dgrad(transposed, config, {**arguments, "K": filters})

    built = build_schedule(w, emit)
    mark_constant_args(built, "K")
    disable_buffer_reuse(built)  # prepacked filters are read again by later launches
    keep_allocated_sizes(built)
    return built
