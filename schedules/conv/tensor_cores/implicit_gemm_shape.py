"""Shape of a convolution as a matrix product: pixels × output channels, summed over taps and input channels."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from typing import NamedTuple

from tvmconv.workloads import Conv
from tvmconv.workloads.dtypes import get_itemsize

VECTOR_BYTES = 16  # maximum number of bytes of one cp.async; also the bytes of an `ldmatrix` row
MAX_VECTOR_ELEMENTS = 8  # elements of the output that a thread stores at a time, whose sums are in registers
ACCUMULATOR_BYTES = 4  # bytes of a float32 accumulator


class ImplicitGemmShape(NamedTuple):
    """Shape of the matrix product that computes a convolution, once for each group."""

    m: int  # number of pixels in the whole batch
    n: int  # output channels per group
    k: int  # input channels per group × taps
    channels_per_group: int  # input channels per group
    groups: int  # number of groups, each with its own product
    itemsize: int  # bytes of an operand element
    min_bytes: int  # minimum number of bytes moved from and to memory
    spatial_ndim: int  # number of spatial axes
    residues: int = 1  # number of residue classes of the pixels, each with a product of its own
    frames: int = 1  # number of frames of the output, each with a product of its own, if tiles do not cross frames
    result_itemsize: int = 0  # bytes of an element of the output; 0 if it has those of an operand element

    @property
    def output_itemsize(self) -> int:
        """Bytes of an element of the output."""
        return self.result_itemsize or self.itemsize

    @property
    def output_vector(self) -> int:
        """Elements of the output that a thread stores at a time, in 16 bytes at most."""
        return min(MAX_VECTOR_ELEMENTS, VECTOR_BYTES // self.output_itemsize)

    @property
    def num_products(self) -> int:
        """Number of products of these extents."""
        return self.groups * self.residues * self.frames

    @classmethod
    @functools.lru_cache(maxsize=1024)  # schedules compute it for each config of a workload
    def from_workload(cls, w: Conv | MatrixProduct) -> ImplicitGemmShape:
        """Return the matrix product of a convolution."""
        if isinstance(w, MatrixProduct):
            return w.shape
        channels_per_group = w.C // w.groups
        k = channels_per_group * math.prod(w.kernel)
        return cls(
            w.N * math.prod(w.output_size),
            w.O // w.groups,
            k,
            channels_per_group,
            w.groups,
            get_itemsize(w.storage),
            w.min_bytes,
            w.spatial_ndim,
            result_itemsize=get_itemsize(w.argument_dtypes[-1]),
        )


class MatrixProduct(ABC):
    """What a kernel of convolutions computes, where it is no convolution: a product of other extents."""

    @property
    @abstractmethod
    def shape(self) -> ImplicitGemmShape:
        """The extents."""
