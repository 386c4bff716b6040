"""Three-dimensional convolution: videos, or volumes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tvmconv.workloads.conv import Conv
from tvmconv.workloads.registry import operator


@operator
@dataclass(frozen=True)
class Conv3d(Conv):
    """A convolution Y of volumes X with kernels K.

    Y[n, o, z, p, q] is the sum over c, t, r, s of X[n, c, z·stride + t·dilation - front, p·stride + r·dilation - top,
    q·stride + s·dilation - left] · K[o, c, t, r, s], with zeros outside X; then the epilogue. `Conv` tells the rest.

    Attributes:
        D: input depth.
        H: input height.
        W: input width.
        T: kernel depth.
        R: kernel height.
        S: kernel width.
    """

    operator: ClassVar[str] = "conv3d"
    EXAMPLE: ClassVar[str] = "conv3d:1x64x8x56x56,64x64x3x3x3,s1,p1"
    SPACE: ClassVar[tuple[str, ...]] = ("D", "H", "W")
    KERNEL: ClassVar[tuple[str, ...]] = ("T", "R", "S")

    N: int
    C: int
    D: int
    H: int
    W: int
    O: int  # noqa: E741  the field's own letter
    T: int
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
    def Z(self) -> int:  # noqa: N802  the field's own letter
        """Output depth."""
        return self.output_size[0]

    @property
    def P(self) -> int:  # noqa: N802  the field's own letter
        """Output height."""
        return self.output_size[1]

    @property
    def Q(self) -> int:  # noqa: N802  the field's own letter
        """Output width."""
        return self.output_size[2]
