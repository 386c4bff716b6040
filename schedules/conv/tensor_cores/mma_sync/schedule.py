"""Convolution on tensor cores, each instruction written: mma.sync on tiles that cp.async brings, several steps ahead.

What `tensor_core` does by rewriting is written here as a program, for the things that rewriting cannot say:

- Copies of 16 bytes that are zeros where the filter hangs over the image's border, with no branch around them, and of
  8, 4 or 2 bytes where the channels of a group fill no more.
- A swizzle: the chunk of 16 bytes that is c-th in row r lies at c XOR r (modulo 8), so that the 8 rows that `ldmatrix`
  reads at a time, and the chunks that neighbouring threads store, are in distinct banks with nothing padded.
- Fragments for the next mma are read while the tensor cores compute this one, across steps too: one barrier a step.
- A bias that is on its way to shared memory while the block multiplies; and a residual that sums begin with, if it is
  not added at the end (`residual`).
- Sums of one output shared among warps (`warps_k`) and among blocks (`split_k`), for images of few pixels with many
  channels. Blocks meet in the shared memory of a cluster (sm_90 and later), or in scratch memory that a second step
  reads.
- Several tiles in turn for one block (`tiles_per_block`), where there are many: while it stores one, the operands of
  the next are on their way.

The operands are rows of the reduction, taps × channels with the channels last, as both lie in memory in NHWC: pixels ×
reduction of the input, which exists nowhere as such (implicit GEMM), and channels × reduction of the weight.
"""

from __future__ import annotations

from tvm.s_tir import Schedule

from tvmconv.registry import schedule
from tvmconv.requirements import CHANNELS_LAST_LAYOUT
from tvmconv.space import Knobs
from tvmconv.workloads import Conv
from tvmconv.workloads.layout import CHANNELS_LAST

from ....tir_builder import build_schedule
from ..implicit_gemm_shape import VECTOR_BYTES, ImplicitGemmShape
from ..space_to_depth import fold_filter_row_into_channels
from .kernel import emit_kernels
from .knobs import compute_usage, declare_knobs
from .tile_config import MMA_N

DTYPES = ("float16", "bfloat16", "tf32")


def is_promising(w: Conv) -> bool:
    """Whether a group's channels fill chunks, and its output channels half an mma, or there are no groups."""
    gemm = ImplicitGemmShape.from_workload(w)
    return w.layout == CHANNELS_LAST and (
        gemm.groups == 1 or (gemm.channels_per_group * gemm.itemsize % VECTOR_BYTES == 0 and gemm.n >= MMA_N)
    )


@schedule(
    *("conv1d", "conv2d", "conv3d"),
    dtypes=DTYPES,
    usage=lambda w, c: compute_usage(fold_filter_row_into_channels(w), c),
    condition=CHANNELS_LAST_LAYOUT,  # the reduction is contiguous in memory, for each tap
    search_if=is_promising,
    supersedes=("direct", "implicit_gemm", "tensor_core"),
    device_kinds=("cuda",),
    min_arch=80,
)
def mma_sync(s: Schedule, w: Conv, k: Knobs) -> Schedule:
    """Tiles of pixels × channels by block and warp; steps of the reduction, some of them in flight."""
    viewed_workload = fold_filter_row_into_channels(w)
    config = declare_knobs(viewed_workload, k)
    return build_schedule(w, lambda arguments: emit_kernels(viewed_workload, config, arguments))
