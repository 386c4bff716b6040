"""The product of a convolution with filters as rows and pixels as columns."""

from __future__ import annotations

from dataclasses import dataclass

from tvmconv.workloads import Conv

from .implicit_gemm_shape import ImplicitGemmShape, MatrixProduct


@dataclass(frozen=True)
class FilterRowsProduct(MatrixProduct):
    """The product, with the attributes of a convolution that kernels read."""

    dtype: str  # dtype in which operands are multiplied
    storage: str  # storage dtype of the operands
    epilogue: tuple[str, ...]  # operations on each sum
    argument_dtypes: tuple[str, ...]  # dtypes of the arguments
    extents: ImplicitGemmShape  # filters, pixels, and products of each
    dilation: tuple[int, ...]
    halo_width: int  # distance in pixels from the first to the last tap of a filter row
    output_size: tuple[int, ...] = (1,)
    kernel: tuple[int, ...] = (1,)
    stride: tuple[int, ...] = (1,)

    @classmethod
    def from_workload(cls, w: Conv) -> FilterRowsProduct:
        """Return the product of a convolution."""
        shape = ImplicitGemmShape.from_workload(w)
        shape = shape._replace(m=shape.n, n=shape.m)
        halo_width = w.dilation[-1] * (w.kernel[-1] - 1)
        return cls(w.dtype, w.storage, w.epilogue, w.argument_dtypes, shape, w.dilation, halo_width)

    @property
    def shape(self) -> ImplicitGemmShape:
        """The extents of the product."""
        return self.extents
