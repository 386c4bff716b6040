"""Three-dimensional convolution of videos or volumes."""

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
    q·stride + s·dilation - left] · K[o, c, t, r, s], with zeros outside X, followed by the epilogue. `ConvGeometry`
    documents the other fields.

    Attributes:
        D: Input depth.
        H: Input height.
        W: Input width.
        T: Kernel depth.
        R: Kernel height.
        S: Kernel width.

    Raises:
        WorkloadError: A number is not an integer or out of range, or the numbers contradict each other.

    Example:
        >>> from tvmconv import Conv3d
        >>> Conv3d(N=1, C=64, D=8, H=56, W=56, O=64, T=3, R=3, S=3, padding=1).output_size
        (8, 56, 56)
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
