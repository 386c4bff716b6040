"""One-dimensional convolution of signals with C channels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tvmconv.workloads.conv import Conv
from tvmconv.workloads.registry import operator


@operator
@dataclass(frozen=True)
class Conv1d(Conv):
    """A convolution Y of signals X with kernels K.

    Y[n, o, q] is the sum over c, s of X[n, c, q·stride + s·dilation - left] · K[o, c, s], with zeros outside X,
    followed by the epilogue. `ConvGeometry` documents the other fields.

    Attributes:
        W: Number of input samples.
        S: Number of kernel taps.

    Raises:
        WorkloadError: A number is not an integer or out of range, or the numbers contradict each other.

    Example:
        >>> from tvmconv import Conv1d
        >>> Conv1d(N=1, C=64, W=16000, O=64, S=9, padding=4).text
        'conv1d:1x64x16000,64x64x9,s1,p4'
    """

    operator: ClassVar[str] = "conv1d"
    EXAMPLE: ClassVar[str] = "conv1d:1x64x16000,64x64x9,s1,p4"
    SPACE: ClassVar[tuple[str, ...]] = ("W",)
    KERNEL: ClassVar[tuple[str, ...]] = ("S",)

    N: int
    C: int
    W: int
    O: int  # noqa: E741  the field's own letter
    S: int
    stride: tuple[int, ...] = (1,)
    padding: tuple[int, ...] = (0,)
    dilation: tuple[int, ...] = (1,)
    groups: int = 1
    dtype: str = "float32"
    layout: str = "nchw"
    epilogue: tuple[str, ...] = ()

    @property
    def Q(self) -> int:  # noqa: N802  the field's own letter
        """Number of output samples."""
        return self.output_size[0]
