"""How much alike workloads are: what is fast on one is likely to be fast on those near to it."""

from __future__ import annotations

import functools
import math

from tvmconv.workloads import Conv, Workload
from tvmconv.workloads.dtypes import FLOAT32
from tvmconv.workloads.layout import CHANNELS_FIRST, CHANNELS_LAST
from tvmconv.workloads.suites import SuiteVariant

HALF_DTYPES = ("float16", "bfloat16")
CANONICAL_VARIANT = SuiteVariant(batch=1, dtype=FLOAT32.name, layout=CHANNELS_FIRST, epilogue=())


def layer_key(workload: Workload) -> str:
    """A text that a convolution has in common with itself in any batch, dtype, layout and epilogue; a filter's own."""
    return (CANONICAL_VARIANT.apply_to(workload) if isinstance(workload, Conv) else workload).text


def workload_distance(workload: Workload, other_workload: Workload, *, any_spatial_ndim: bool = False) -> float:
    """How unlike two convolutions are: by how many powers of two their products differ; infinite for other kinds.

    Args:
        workload: one of them.
        other_workload: the other.
        any_spatial_ndim: whether one may have more axes than the other: the sizes are products over the axes.
    """
    if (
        not isinstance(workload, Conv)
        or not isinstance(other_workload, Conv)
        or not (any_spatial_ndim or workload.operator == other_workload.operator)
    ):
        return math.inf
    has_same_dtype = workload.dtype == other_workload.dtype or {workload.dtype, other_workload.dtype} <= set(
        HALF_DTYPES
    )
    if not has_same_dtype or (workload.layout == CHANNELS_LAST) != (other_workload.layout == CHANNELS_LAST):
        return math.inf
    if (workload.groups > 1) != (other_workload.groups > 1):
        return math.inf
    return sum(
        weight * abs(math.log2(a / b))
        for (weight, a), (_, b) in zip(
            _list_weighted_sizes(workload), _list_weighted_sizes(other_workload), strict=True
        )
    )


@functools.lru_cache(maxsize=4096)
def _list_weighted_sizes(workload: Conv) -> tuple[tuple[float, float], ...]:
    """What makes convolutions alike, each with its weight."""
    return (
        (1.0, workload.N * math.prod(workload.output_size)),
        (0.5, workload.output_size[-1]),
        (1.0, workload.O / workload.groups),
        (1.0, workload.C / workload.groups),
        (0.5, workload.groups),
        (2.0, math.prod(workload.kernel)),
        (1.0, math.prod(workload.stride)),
        (0.5, math.prod(workload.dilation)),
        (0.25, workload.N),
    )
