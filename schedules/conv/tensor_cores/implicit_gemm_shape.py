"""A convolution as a product of matrices: pixels × channels, summed over the channels of the input and the taps."""

from __future__ import annotations

import math
from typing import NamedTuple

from tvmconv.workloads import Conv
from tvmconv.workloads.dtypes import get_numpy_dtype

VECTOR_BYTES = 16  # bytes that an asynchronous copy and a row of `ldmatrix` have at most
ACCUMULATOR_BYTES = 4  # of a float32


class ImplicitGemmShape(NamedTuple):
    """The product of matrices that a convolution is, once for each group.

    Attributes:
        m: pixels of the whole batch.
        n: output channels of a group.
        k: input channels of a group × taps.
        channels_per_group: input channels of a group.
        groups: how many products there are.
        itemsize: bytes of an element of the operands.
        min_bytes: that are moved from and to memory at least.
        spatial_ndim: axes of space, of which each has a coordinate.
    """

    m: int
    n: int
    k: int
    channels_per_group: int
    groups: int
    itemsize: int
    min_bytes: int
    spatial_ndim: int

    @classmethod
    def from_workload(cls, w: Conv) -> ImplicitGemmShape:
        """The product of a convolution."""
        channels_per_group = w.C // w.groups
        k = channels_per_group * math.prod(w.kernel)
        return cls(
            w.N * math.prod(w.output_size),
            w.O // w.groups,
            k,
            channels_per_group,
            w.groups,
            get_numpy_dtype(w.storage).itemsize,
            w.min_bytes,
            w.spatial_ndim,
        )
