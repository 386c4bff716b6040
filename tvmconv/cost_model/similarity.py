"""The similarity of workloads: configs that are fast on one workload are likely to be fast on similar ones."""

from __future__ import annotations

import functools
import math

from tvmconv.workloads import Workload
from tvmconv.workloads.conv_operator import ConvOperator
from tvmconv.workloads.dtypes import FLOAT32
from tvmconv.workloads.layout import CHANNELS_FIRST
from tvmconv.workloads.suites import SuiteVariant

HALF_DTYPES = ("float16", "bfloat16")
CANONICAL_VARIANT = SuiteVariant(batch=1, dtype=FLOAT32.name, layout=CHANNELS_FIRST, epilogue=())


def layer_key(workload: Workload) -> str:
    """Return a text that identifies a layer, independently of its batch size, dtype, layout and epilogue."""
    return (CANONICAL_VARIANT.apply_to(workload) if isinstance(workload, ConvOperator) else workload).text


def workload_distance(workload: Workload, other_workload: Workload, *, any_spatial_ndim: bool = False) -> float:
    """Return the distance of two convolutions: the weighted sum of the base-2 logarithms of the ratios of their sizes.
    It is infinite for other workloads, and for convolutions that differ in the kind of operator, dtype, layout or
    groups; a mixed layout is of the kind of channels last. With `any_spatial_ndim`, the numbers of spatial dimensions
    may differ.
    """
    if not isinstance(workload, ConvOperator) or not isinstance(other_workload, ConvOperator):
        return math.inf
    if workload.kind != other_workload.kind:
        return math.inf
    if not any_spatial_ndim and workload.spatial_ndim != other_workload.spatial_ndim:
        return math.inf
    dtypes = {workload.dtype, other_workload.dtype}
    if len(dtypes) > 1 and not dtypes <= {*HALF_DTYPES}:
        return math.inf
    if (workload.layout == CHANNELS_FIRST) != (other_workload.layout == CHANNELS_FIRST):
        return math.inf
    if (workload.groups > 1) != (other_workload.groups > 1):
        return math.inf
    pairs = zip(_list_weighted_sizes(workload), _list_weighted_sizes(other_workload), strict=True)
    return sum(weight * abs(math.log2(a / b)) for (weight, a), (_, b) in pairs)


@functools.lru_cache(maxsize=4096)
def _list_weighted_sizes(workload: ConvOperator) -> tuple[tuple[float, float], ...]:
    """Return the sizes that define the distance of convolutions, each with its weight."""
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
