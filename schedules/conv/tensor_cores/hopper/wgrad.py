"""Gradients of weights on Hopper's tensor cores: the kernel of `hopper` on parts of the reduction, and a sum of parts.

The product has the filters as rows and (tap, channel) as columns, and its reduction runs over all pixels of the batch.
Both operands are MN-major: channels are contiguous in dY and in X. TMA copies boxes of channels × pixels, for X in
im2col mode at the tap of the box, and `wgmma` transposes them.

Output tiles are few and the reduction is long, so the knob `parts` divides the pixels among CTAs. To the kernel the
parts are groups: each is a product of its own, whose float32 sums TMA stores to a workspace. The parts of each group of
the convolution follow one another. A second kernel adds the parts in order and rounds once, so that results are the
same bits in every run. A single part needs neither: the kernel stores dK itself. CTAs of a cluster either split the
reduction of a part (`split_k`), and add up their sums in shared memory, or share operands.
"""

from __future__ import annotations

import functools
import math

from tvm.s_tir import Schedule

from tvmconv.registry import schedule
from tvmconv.space import Columns, Knobs
from tvmconv.space.search_space import ResourceUsage
from tvmconv.workloads.conv_gradient import WeightGradient
from tvmconv.workloads.dtypes import ACCUMULATOR

from ....tir_builder import Buffer, Expr, allocate
from ...gradient_conversion import build_channels_last_gradient, view_channels_last
from ...gradient_operators import WGRAD
from ..gemm.epilogue_ops import EpilogueOps
from ..gemm.problem import make_wgrad
from ..gemm.workspace_reduction import OutputVector, WorkspaceReduction
from ..implicit_gemm_shape import VECTOR_BYTES, ImplicitGemmShape
from .kernel import emit_kernel
from .tma_requirements import can_load_by_tma, has_narrow_rows, is_promising
from .wgrad_knobs import declare_knobs, list_best_configs
from .wgrad_product import choose_columns_per_tap, make_family, stores_result

DTYPES = ("float16", "bfloat16")  # wgmma transposes operands of 16 bits only
REDUCTION_THREADS, REDUCTION_CHANNELS = 64, 4  # threads per CTA, and channels per thread, of the sum of parts


def can_load_wgrad_by_tma(w: WeightGradient) -> bool:
    """Whether TMA can copy both operands: channels of X and of dY fill 16-byte chunks in each group."""
    forward = view_channels_last(w).forward
    itemsize = ImplicitGemmShape.from_workload(forward).itemsize
    return can_load_by_tma(forward) and forward.O // forward.groups * itemsize % VECTOR_BYTES == 0


def is_wgrad_promising(w: WeightGradient) -> bool:
    """Return whether there is one group, or each group has enough channels for wgmma, and rows are not narrow."""
    forward = view_channels_last(w).forward
    has_channels = w.groups == 1 or is_promising(forward)
    return can_load_wgrad_by_tma(w) and has_channels and not has_narrow_rows(forward)


def compute_wgrad_usage(w: WeightGradient, columns: Columns) -> ResourceUsage:
    """Return the resources that configs use."""
    return make_family(view_channels_last(w)).compute_usage(columns)


SUPERSEDED = ("mma_sync", "implicit_gemm", "tiling")
wgrad_schedule = functools.partial(
    schedule,
    dtypes=DTYPES,
    usage=compute_wgrad_usage,
    condition=can_load_wgrad_by_tma,
    search_if=is_wgrad_promising,
    starting_configs=lambda w: [config for config, _ in list_best_configs(view_channels_last(w))[1:]],
    device_kinds=("cuda",),
    exact_arch=90,
)


# In volumes, X is copied for each of some 27 taps, where `halo_mma_sync` copies it for three.
@wgrad_schedule(*WGRAD[:2], supersedes=("halo_mma_sync", *SUPERSEDED))
@wgrad_schedule(*WGRAD[2:], supersedes=SUPERSEDED)
def hopper(s: Schedule, w: WeightGradient, k: Knobs) -> Schedule:
    """Emit the kernel of the partial products, and the sum of the parts."""
    viewed = view_channels_last(w)
    config, parts = declare_knobs(viewed, k)
    product, columns_per_tap = make_family(viewed).products[parts], choose_columns_per_tap(viewed.forward)
    shape = ImplicitGemmShape.from_workload(product)
    is_whole = stores_result(viewed, parts)

    def emit(arguments: dict[str, Buffer]) -> None:
        num_sums = shape.m * shape.groups * shape.n
        sums = arguments[w.RESULT] if is_whole else allocate("partial_sums", num_sums, ACCUMULATOR, "global")
        problem = make_wgrad(viewed.forward, shape, columns_per_tap)
        emit_kernel(product, config, {**arguments, "Y": sums}, make_problem=lambda *_: problem)
        if not is_whole:
            reduction = make_reduction(w, shape, columns_per_tap)
            reduction.emit(sums, EpilogueOps.from_workload(w), arguments, w.RESULT)

    return build_channels_last_gradient(w, emit)


def make_reduction(w: WeightGradient, shape: ImplicitGemmShape, columns_per_tap: int) -> WorkspaceReduction:
    """Return the sum of the parts of the workspace (filters of a group, groups, parts, taps, channels of a group)."""
    channels, taps, num_parts = w.C // w.groups, math.prod(w.kernel), shape.groups // w.groups
    vector = math.gcd(channels, REDUCTION_CHANNELS)

    def locate(item: Expr) -> OutputVector:
        index = item * vector
        channel, tap, row = index % channels, index // channels % taps, index // (channels * taps)
        column, first = tap * columns_per_tap + channel, row * shape.groups
        if w.groups > 1:
            first = row % shape.m * shape.groups + row // shape.m * num_parts
        return OutputVector(channel, index, lambda part: (first + part) * shape.n + column)

    num_vectors = w.O * taps * channels // vector
    return WorkspaceReduction(num_vectors, vector, num_parts, locate, REDUCTION_THREADS)
