"""The products of a strided dgrad: one for each residue class of the pixels of dX, all of the same extents."""

from __future__ import annotations

import dataclasses
import functools

from tvmconv.workloads import Conv
from tvmconv.workloads.conv_gradient import InputGradient
from tvmconv.workloads.dtypes import get_itemsize

from .gemm.residue_classes import ResidueClasses
from .implicit_gemm_shape import ImplicitGemmShape, MatrixProduct


@dataclasses.dataclass(frozen=True)
class ResidueProduct(MatrixProduct):
    """The products of the residue classes, with the attributes of a convolution that kernels read."""

    forward: Conv  # the forward convolution
    epilogue: tuple[str, ...]  # operations on dX
    argument_dtypes: tuple[str, ...]  # dtypes of the operator's arguments
    min_bytes: int  # minimum number of bytes moved from and to memory
    kernel: tuple[int, ...] = (1,)  # no taps share a copy
    stride: tuple[int, ...] = (1,)
    dilation: tuple[int, ...] = (1,)
    output_size: tuple[int, ...] = (1,)

    @classmethod
    def from_workload(cls, w: InputGradient) -> ResidueProduct:
        """Return the products of a gradient or a transposed convolution."""
        return cls(w.forward, w.epilogue, w.argument_dtypes, w.min_bytes)

    @property
    def dtype(self) -> str:
        """Dtype in which operands are multiplied."""
        return self.forward.dtype

    @property
    def storage(self) -> str:
        """Storage dtype of the operands."""
        return self.forward.storage

    @functools.cached_property
    def residues(self) -> ResidueClasses:
        """The residue classes of the pixels of dX."""
        return ResidueClasses.from_workload(self.forward)

    @functools.cached_property
    def shape(self) -> ImplicitGemmShape:
        """The extents of the class that has most taps."""
        w, residues = self.forward, self.residues
        channels = w.O // w.groups
        return ImplicitGemmShape(
            residues.rows,
            w.C // w.groups,
            channels * residues.max_taps,
            channels,
            w.groups,
            get_itemsize(w.storage),
            self.min_bytes,
            w.spatial_ndim,
            residues.count,
        )
