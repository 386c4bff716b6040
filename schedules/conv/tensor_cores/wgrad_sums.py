"""The sums of a wgrad: filters × (tap, channel) for each group, in parts that a second kernel adds in order."""

from __future__ import annotations

import math

from tvmconv.workloads.conv_gradient import WeightGradient
from tvmconv.workloads.dtypes import get_itemsize

from ...tir_builder import Expr
from .gemm.workspace_reduction import OutputVector, WorkspaceReduction
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
    return WorkspaceReduction(num_vectors, vector, num_parts, locate, REDUCTION_THREADS, uses_pdl=False)
