"""A convolution as a product of matrices: pixels × channels, summed over the channels of the input and the taps."""

from __future__ import annotations

import math
from typing import NamedTuple

from tvmconv.workloads import Conv
from tvmconv.workloads.dtypes import numpy_dtype

CHUNK = 16  # bytes that an asynchronous copy and a row of `ldmatrix` have at most
SUM_BYTES = 4  # of a float32


class Product(NamedTuple):
    """The product of matrices that a convolution is, once for each group.

    Attributes:
        m: pixels of the whole batch.
        n: output channels of a group.
        k: input channels of a group × taps.
        depth: input channels of a group.
        groups: how many products there are.
        itemsize: bytes of an element of the operands.
        least_bytes: that are moved from and to memory at least.
        rank: axes of space, of which each has a coordinate.
    """

    m: int
    n: int
    k: int
    depth: int
    groups: int
    itemsize: int
    least_bytes: int
    rank: int

    @classmethod
    def of(cls, w: Conv) -> Product:
        """The product of a convolution."""
        depth = w.C // w.groups
        k = depth * math.prod(w.kernel)
        return cls(
            w.N * math.prod(w.out),
            w.O // w.groups,
            k,
            depth,
            w.groups,
            numpy_dtype(w.storage).itemsize,
            w.min_bytes,
            w.rank,
        )
