"""Upsampled convolutions on Hopper's tensor cores: strided transposed convolutions with merged filters.

The upsampled input is not in memory, and taps that read the same element are one product. A small launch, which runs
once for constant filters, adds up the taps (`merged_filters`); the kernel is that of transposed convolutions with a
stride (`..hopper.strided_dgrad`). A filter of 3×3 on an input that is upsampled by 2 takes 4 of 9 products.
"""

from __future__ import annotations

from tvm.s_tir import Schedule

from tvmconv.registry import schedule
from tvmconv.requirements import all_of
from tvmconv.space import Knobs
from tvmconv.workloads import Conv
from tvmconv.workloads.dtypes import get_itemsize
from tvmconv.workloads.features import LARGE_TENSORS, UPSAMPLING

from ....primitives import disable_buffer_reuse, keep_allocated_sizes, mark_constant_args
from ....tir_builder import Buffer, build_schedule
from ..hopper import strided_dgrad
from ..hopper.schedule import WIDE_DTYPES
from ..implicit_gemm_shape import ACCUMULATOR_BYTES
from .merged_filters import emit_merged_filters, is_merging_useful, make_transposed


def can_load_by_tma(w: Conv) -> bool:
    """Whether TMA can copy the operands: channels of a group fill 16-byte chunks, and offsets are in its range."""
    return strided_dgrad.can_load_by_tma(make_transposed(w))


@schedule(
    *("conv1d", "conv2d", "conv3d"),
    dtypes=WIDE_DTYPES,
    usage=lambda w, columns: strided_dgrad.compute_strided_usage(make_transposed(w), columns),
    condition=all_of(is_merging_useful, can_load_by_tma),
    search_if=lambda w: strided_dgrad.is_promising(make_transposed(w)),
    starting_configs=lambda w: strided_dgrad.list_strided_starting_configs(make_transposed(w)),
    supersedes=("upsample_mma_sync", "direct", "implicit_gemm", "tensor_core"),
    device_kinds=("cuda",),
    exact_arch=90,
    features=(UPSAMPLING, LARGE_TENSORS),
)
def upsample_hopper(s: Schedule, w: Conv, k: Knobs) -> Schedule:
    """Emit the sums of taps, and the kernel of the transposed convolution."""
    transposed = make_transposed(w)
    config = strided_dgrad.declare_strided_knobs(transposed, k)

    def emit(arguments: dict[str, Buffer]) -> None:
        filters = emit_merged_filters(w, arguments["K"], channels_last=get_itemsize(w.storage) == ACCUMULATOR_BYTES)
        strided_dgrad.emit_strided_dgrad(transposed, config, {**arguments, "K": filters})

    built = build_schedule(w, emit)
    mark_constant_args(built, "K")
    disable_buffer_reuse(built)  # TVM does not see the accesses of TMA
    keep_allocated_sizes(built)
    return built
