"""How much alike workloads are: what is fast on one is likely to be fast on those near to it."""

from __future__ import annotations

import functools
import math

from tvmconv.workloads import Conv, Workload
from tvmconv.workloads.dtypes import FLOAT32
from tvmconv.workloads.layout import CHANNELS_FIRST, CHANNELS_LAST
from tvmconv.workloads.suites import Variant

HALVES = ("float16", "bfloat16")
PLAIN = Variant(batch=1, dtype=FLOAT32.name, layout=CHANNELS_FIRST, epilogue=())


def layer_of(w: Workload) -> str:
    """A text that a convolution has in common with itself in any batch, dtype, layout and epilogue; a filter's own."""
    return (PLAIN.of(w) if isinstance(w, Conv) else w).text


def distance(w: Workload, other: Workload, *, any_rank: bool = False) -> float:
    """How unlike two convolutions are: by how many powers of two their products differ; infinite for other kinds.

    Args:
        w: one of them.
        other: the other.
        any_rank: whether one may have more axes than the other: the sizes are products over the axes.
    """
    if not isinstance(w, Conv) or not isinstance(other, Conv) or not (any_rank or w.operator == other.operator):
        return math.inf
    same_type = w.dtype == other.dtype or {w.dtype, other.dtype} <= set(HALVES)
    if not same_type or (w.layout == CHANNELS_LAST) != (other.layout == CHANNELS_LAST):
        return math.inf
    if (w.groups > 1) != (other.groups > 1):
        return math.inf
    return sum(weight * abs(math.log2(a / b)) for (weight, a), (_, b) in zip(_sizes(w), _sizes(other), strict=True))


@functools.lru_cache(maxsize=4096)
def _sizes(w: Conv) -> tuple[tuple[float, float], ...]:
    """What makes convolutions alike, each with its weight."""
    return (
        (1.0, w.N * math.prod(w.out)),
        (0.5, w.out[-1]),
        (1.0, w.O / w.groups),
        (1.0, w.C / w.groups),
        (0.5, w.groups),
        (2.0, math.prod(w.kernel)),
        (1.0, math.prod(w.stride)),
        (0.5, math.prod(w.dilation)),
        (0.25, w.N),
    )
