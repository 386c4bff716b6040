"""Convolutions along one, two and three spatial axes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tvmconv.workloads.conv import Conv
from tvmconv.workloads.registry import operator


@dataclass(frozen=True, repr=False)
class Sizes1d:
    """The fields of convolutions along one axis."""

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


@dataclass(frozen=True, repr=False)
class Sizes2d:
    """The fields of convolutions along two axes."""

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


@dataclass(frozen=True, repr=False)
class Sizes3d:
    """The fields of convolutions along three axes."""

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


@operator
@dataclass(frozen=True, repr=False)
class Conv1d(Sizes1d, Conv):
    """A convolution Y of signals X with kernels K.

    Y[n, o, q] is the sum over c, s of X[n, c, q·stride + s·dilation - left] · K[o, c, s], with zeros outside X,
    followed by the epilogue.

    Attributes:
        N: Batch size.
        C: Number of input channels.
        W: Number of input samples.
        O: Number of output channels.
        S: Number of kernel taps.
        stride: Stride along each spatial axis, or one int for all axes; the default is 1.
        padding: Zeros before the input along each axis, then after it; or one int for all sides; the default is 0.
        dilation: Distance between kernel taps along each axis, or one int for all axes; the default is 1.
        groups: Number of groups; it divides C and O. The default is 1.
        dtype: Type of stored and multiplied elements: "float32" (default), "tf32", "float16", "bfloat16",
            "float8_e4m3fn", "float8_e5m2" or "int8".
        layout: Memory order of X, K and Y: "nchw" (default) or "nhwc"; or that of X and K, then of Y: "nchw-nhwc" or
            "nhwc-nchw".
        epilogue: Names of the operations on each sum before it is stored, in order; the default is none.
        upsample: Factor of a nearest-neighbor upsampling of the input along each spatial axis, or one int for all axes;
            the upsampled input is not in memory. The default is 1.
        out_dtype: Type of Y if X and K have 8 bits; `tvmconv.workloads.quantization` has the defaults.
        weight_dtype: Type of K if X and K are 8-bit floats of different types; the default is `dtype`.

    Raises:
        WorkloadError: A number is not an integer or out of range, or the numbers contradict each other.

    Examples:
        >>> from tvmconv import Conv1d
        >>> Conv1d(N=1, C=64, W=16000, O=64, S=9, padding=4).text
        'conv1d:1x64x16000,64x64x9,s1,p4'
    """

    operator: ClassVar[str] = "conv1d"
    EXAMPLE: ClassVar[str] = "conv1d:1x64x16000,64x64x9,s1,p4"

    upsample: tuple[int, ...] = (1,)
    out_dtype: str = ""
    weight_dtype: str = ""


@operator
@dataclass(frozen=True, repr=False)
class Conv2d(Sizes2d, Conv):
    """A convolution Y of images X with kernels K.

    Y[n, o, p, q] is the sum over c, r, s of X[n, c, p·stride + r·dilation - top, q·stride + s·dilation - left] · K[o,
    c, r, s], with zeros outside X, followed by the epilogue.

    Attributes:
        N: Batch size.
        C: Number of input channels.
        H: Input height.
        W: Input width.
        O: Number of output channels.
        R: Kernel height.
        S: Kernel width.
        stride: Stride along each spatial axis, or one int for all axes; the default is 1.
        padding: Zeros above, left of, below and right of the input; or one int for all sides. The default is 0.
        dilation: Distance between kernel taps along each axis, or one int for all axes; the default is 1.
        groups: Number of groups; it divides C and O. The default is 1.
        dtype: Type of stored and multiplied elements: "float32" (default), "tf32", "float16", "bfloat16",
            "float8_e4m3fn", "float8_e5m2" or "int8".
        layout: Memory order of X, K and Y: "nchw" (default) or "nhwc"; or that of X and K, then of Y: "nchw-nhwc" or
            "nhwc-nchw".
        epilogue: Names of the operations on each sum before it is stored, in order; the default is none.
        upsample: Factor of a nearest-neighbor upsampling of the input along each spatial axis, or one int for all axes;
            the upsampled input is not in memory. The default is 1.
        out_dtype: Type of Y if X and K have 8 bits; `tvmconv.workloads.quantization` has the defaults.
        weight_dtype: Type of K if X and K are 8-bit floats of different types; the default is `dtype`.

    Raises:
        WorkloadError: A number is not an integer or out of range, or the numbers contradict each other.

    Examples:
        >>> from tvmconv import Conv2d
        >>> Conv2d(N=1, C=64, H=56, W=56, O=64, R=3, S=3, padding=1, dtype="float16", epilogue=("relu",)).text
        'conv2d:1x64x56x56,64x64x3x3,s1,p1,f16,relu'
    """

    operator: ClassVar[str] = "conv2d"
    EXAMPLE: ClassVar[str] = "conv2d:1x64x56x56,64x64x3x3,s1,p1"

    upsample: tuple[int, ...] = (1,)
    out_dtype: str = ""
    weight_dtype: str = ""


@operator
@dataclass(frozen=True, repr=False)
class Conv3d(Sizes3d, Conv):
    """A convolution Y of volumes X with kernels K.

    Y[n, o, z, p, q] is the sum over c, t, r, s of X[n, c, z·stride + t·dilation - front, p·stride + r·dilation - top,
    q·stride + s·dilation - left] · K[o, c, t, r, s], with zeros outside X, followed by the epilogue. `ConvGeometry`
    documents the other fields.

    Attributes:
        N: Batch size.
        C: Number of input channels.
        D: Input depth.
        H: Input height.
        W: Input width.
        O: Number of output channels.
        T: Kernel depth.
        R: Kernel height.
        S: Kernel width.
        stride: Stride along each spatial axis, or one int for all axes; the default is 1.
        padding: Zeros before the input along each axis, then after it; or one int for all sides; the default is 0.
        dilation: Distance between kernel taps along each axis, or one int for all axes; the default is 1.
        groups: Number of groups; it divides C and O. The default is 1.
        dtype: Type of stored and multiplied elements: "float32" (default), "tf32", "float16", "bfloat16",
            "float8_e4m3fn", "float8_e5m2" or "int8".
        layout: Memory order of X, K and Y: "nchw" (default) or "nhwc"; or that of X and K, then of Y: "nchw-nhwc" or
            "nhwc-nchw".
        epilogue: Names of the operations on each sum before it is stored, in order; the default is none.
        cached_frames: Frames before those of X, which are in the argument `cache`; the default is 0, without it.
        upsample: Factor of a nearest-neighbor upsampling of the input along each spatial axis, or one int for all axes;
            the upsampled input is not in memory. The default is 1.
        out_dtype: Type of Y if X and K have 8 bits; `tvmconv.workloads.quantization` has the defaults.
        weight_dtype: Type of K if X and K are 8-bit floats of different types; the default is `dtype`.

    Raises:
        WorkloadError: A number is not an integer or out of range, or the numbers contradict each other.

    Examples:
        >>> from tvmconv import Conv3d
        >>> Conv3d(N=1, C=64, D=8, H=56, W=56, O=64, T=3, R=3, S=3, padding=1).output_size
        (8, 56, 56)
    """

    operator: ClassVar[str] = "conv3d"
    EXAMPLE: ClassVar[str] = "conv3d:1x64x8x56x56,64x64x3x3x3,s1,p1"
    OPTION_NAMES: ClassVar[tuple[str, ...]] = (*Conv.OPTION_NAMES, "cached_frames")

    cached_frames: int = 0
    upsample: tuple[int, ...] = (1,)
    out_dtype: str = ""
    weight_dtype: str = ""

    @property
    def Z(self) -> int:  # noqa: N802  the field's own letter
        """Output depth."""
        return self.output_size[0]
