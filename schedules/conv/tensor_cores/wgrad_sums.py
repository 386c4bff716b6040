"""The sums of a wgrad: filters × (tap, channel) for each group, in parts that a second kernel adds in order.

If the workload permits atomics, the knob `atomics` has parts add their sums to one array in place, in any order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from tvmconv.space import Knobs
from tvmconv.workloads.conv_gradient import WeightGradient
from tvmconv.workloads.dtypes import ACCUMULATOR, get_itemsize

from ...tir_builder import Buffer, Expr, allocate, fill_zeros, if_
from .gemm.cta import Cta
from .gemm.epilogue_ops import EpilogueOps
from .gemm.mma_sync_mainloop import MmaSyncMainloop
from .gemm.tile_scheduler import TileScheduler
from .gemm.workspace_reduction import OutputVector, WorkspaceReduction, emit_zeros, store_partial_sums
from .implicit_gemm_shape import ACCUMULATOR_BYTES, VECTOR_BYTES, ImplicitGemmShape

REDUCTION_THREADS = 64  # threads per CTA of the sum of parts


def make_wgrad_shape(w: WeightGradient) -> ImplicitGemmShape:
    """Return the product of a wgrad: filters × (tap, channel), summed over the pixels of the batch."""
    forward, channels = w.forward, w.C // w.groups
    pixels = forward.N * math.prod(forward.output_size)
    return ImplicitGemmShape(
        m=w.O // w.groups,
        n=channels * math.prod(w.kernel),
        k=pixels,
        channels_per_group=pixels,
        groups=w.groups,
        itemsize=get_itemsize(w.storage),
        min_bytes=w.min_bytes,
        spatial_ndim=w.spatial_ndim,
    )


def declare_atomics(w: WeightGradient, k: Knobs) -> bool:
    """Declare the knob `atomics` if the workload permits them, and return whether parts add their sums atomically."""
    return bool(k.choice("atomics", (0, 1), 0)) if w.atomics else False


def emit_tile_sums(
    mainloop: MmaSyncMainloop,
    tiles: TileScheduler,
    position: Cta,
    workspace: Buffer,
    shape: ImplicitGemmShape,
    *,
    is_atomic: bool,
) -> None:
    """Multiply the work tile of a CTA over its part of the pixels, and store the sums or add them to the workspace."""
    tiling = mainloop.tiling
    accumulators = allocate("accumulators", tiling.num_accumulators, ACCUMULATOR)
    tile = tiles.tile_at(position.index)
    mainloop.locate(tile)
    mainloop.fill()
    fill_zeros(accumulators, tiling.num_accumulators)
    mainloop.start()
    mainloop.compute(accumulators)
    with if_(tiling.holds_sums):
        store_partial_sums(workspace, accumulators, tiling, tile, position.split, shape, is_atomic=is_atomic)


def emit_wgrad(
    w: WeightGradient,
    num_parts: int,
    arguments: Mapping[str, Buffer],
    emit_product: Callable[[Buffer], None],
    *,
    is_atomic: bool,
) -> None:
    """Emit the kernel that multiplies, and those that its sums need before and after it.

    `emit_product` emits the former for an array of sums (parts, filters of a group, groups, columns). If `is_atomic`,
    the array has one part, to which the kernel adds the sums of all parts.
    """
    shape, result = make_wgrad_shape(w), arguments[w.RESULT]
    num_sums = shape.groups * shape.m * shape.n
    if not is_atomic:
        sums = allocate("partial_sums", num_parts * num_sums, ACCUMULATOR, "global")
        emit_product(sums)
        make_wgrad_reduction(shape, num_parts).emit(sums, EpilogueOps.from_workload(w), arguments, w.RESULT)
        return
    is_result = str(result.dtype) == ACCUMULATOR and shape.groups == 1 and not w.epilogue
    sums = result if is_result else allocate("sums", num_sums, ACCUMULATOR, "global")
    emit_zeros(sums, num_sums, REDUCTION_THREADS)
    emit_product(sums)
    if not is_result:
        make_wgrad_reduction(shape, 1).emit(sums, EpilogueOps.from_workload(w), arguments, w.RESULT)


def make_wgrad_reduction(shape: ImplicitGemmShape, num_parts: int) -> WorkspaceReduction:
    """Return the sum of the parts, whose filters are ordered by groups in dK."""
    vector = math.gcd(shape.n, VECTOR_BYTES // ACCUMULATOR_BYTES)

    def locate(item: Expr) -> OutputVector:
        index, column = item * vector, item % (shape.n // vector) * vector
        output = item // (shape.n // vector)
        row, group = output % shape.m, output // shape.m
        first = row * (shape.groups * shape.n) + group * shape.n + column
        return OutputVector(column, index, lambda part: part * (shape.groups * shape.m * shape.n) + first)

    num_vectors = shape.groups * shape.m * shape.n // vector
    return WorkspaceReduction(num_vectors, vector, num_parts, locate, REDUCTION_THREADS)
