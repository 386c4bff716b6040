"""Two-dimensional convolution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tvmconv.workloads.conv import Conv
from tvmconv.workloads.registry import operator


@operator
@dataclass(frozen=True)
class Conv2d(Conv):
    """A convolution Y of images X with kernels K.

    Y[n, o, p, q] is the sum over c, r, s of X[n, c, p·stride + r·dilation - top, q·stride + s·dilation - left] ·
    K[o, c, r, s], with zeros outside X; then the epilogue. `Conv` tells the rest.

    Attributes:
        H: input height.
        W: input width.
        R: kernel height.
        S: kernel width.
        padding: zeros above, left, below and right of the input.
    """

    operator: ClassVar[str] = "conv2d"
    EXAMPLE: ClassVar[str] = "conv2d:1x64x56x56,64x64x3x3,s1,p1"
    SPACE: ClassVar[tuple[str, ...]] = ("H", "W")
    KERNEL: ClassVar[tuple[str, ...]] = ("R", "S")

    N: int
    C: int
    H: int
    W: int
    O: int  # noqa: E741  the field's own letter
    R: int
    S: int
    stride: tuple[int, ...] = (1,)
    padding: tuple[int, ...] = (0,)
    dilation: tuple[int, ...] = (1,)
    groups: int = 1
    dtype: str = "float32"
    layout: str = "nchw"
    epilogue: tuple[str, ...] = ()

    @property
    def P(self) -> int:  # noqa: N802  the field's own letter
        """Output height."""
        return self.output_size[0]

    @property
    def Q(self) -> int:  # noqa: N802  the field's own letter
        """Output width."""
        return self.output_size[1]
