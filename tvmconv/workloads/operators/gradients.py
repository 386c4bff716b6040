"""Gradients of convolutions and transposed convolutions along one, two and three spatial axes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tvmconv.workloads.conv import Conv
from tvmconv.workloads.conv_gradient import InputGradient, TransposedConv, WeightGradient
from tvmconv.workloads.operators.convolutions import Conv1d, Conv2d, Conv3d, Sizes1d, Sizes2d, Sizes3d
from tvmconv.workloads.registry import operator


@operator
@dataclass(frozen=True, repr=False)
class Conv1dDgrad(Sizes1d, InputGradient):
    """The gradient dX of the signals of a `Conv1d`, from dY and K; sizes and options are those of the convolution.

    Example:
        >>> from tvmconv import parse
        >>> parse("conv1d_dgrad:1x64x16000,64x64x9,s1,p4").argument_names
        ('dY', 'K', 'dX')
    """

    FORWARD: ClassVar[type[Conv]] = Conv1d
    operator: ClassVar[str] = "conv1d_dgrad"
    EXAMPLE: ClassVar[str] = "conv1d_dgrad:1x64x16000,64x64x9,s1,p4"


@operator
@dataclass(frozen=True, repr=False)
class Conv1dWgrad(Sizes1d, WeightGradient):
    """The gradient dK of the weight of a `Conv1d`, from dY and X; sizes and options are those of the convolution.

    Attributes:
        out_float32: Whether dK, and a gradient that is added to it, are in float32, also where dY and X have 16 bits.
        atomics: Whether partial sums may be added in any order, so that the last bits differ between runs.

    Example:
        >>> from tvmconv import parse
        >>> parse("conv1d_wgrad:1x64x16000,64x64x9,s1,p4").argument_names
        ('dY', 'X', 'dK')
    """

    FORWARD: ClassVar[type[Conv]] = Conv1d
    operator: ClassVar[str] = "conv1d_wgrad"
    EXAMPLE: ClassVar[str] = "conv1d_wgrad:1x64x16000,64x64x9,s1,p4"

    out_float32: bool = False
    atomics: bool = False


@operator
@dataclass(frozen=True, repr=False)
class Conv1dTranspose(Sizes1d, TransposedConv):
    """A transposed convolution Y of signals X with K, whose weight is (C, O / groups, kernel) as in PyTorch.

    Attributes:
        output_padding: Positions that are added at the end of each axis of Y, where they choose among the sizes that
            a stride maps to the same input.

    Example:
        >>> from tvmconv import parse
        >>> parse("conv1d_transpose:1x64x4000,64x32x8,s4,p2").output_shape
        (1, 32, 16000)
    """

    FORWARD: ClassVar[type[Conv]] = Conv1d
    operator: ClassVar[str] = "conv1d_transpose"
    EXAMPLE: ClassVar[str] = "conv1d_transpose:1x64x4000,64x32x8,s4,p2"

    output_padding: tuple[int, ...] = (0,)


@operator
@dataclass(frozen=True, repr=False)
class Conv2dDgrad(Sizes2d, InputGradient):
    """The gradient dX of the images of a `Conv2d`, from dY and K; sizes and options are those of the convolution.

    Example:
        >>> from tvmconv import parse
        >>> parse("conv2d_dgrad:1x64x56x56,64x64x3x3,s1,p1").argument_names
        ('dY', 'K', 'dX')
    """

    FORWARD: ClassVar[type[Conv]] = Conv2d
    operator: ClassVar[str] = "conv2d_dgrad"
    EXAMPLE: ClassVar[str] = "conv2d_dgrad:1x64x56x56,64x64x3x3,s1,p1"


@operator
@dataclass(frozen=True, repr=False)
class Conv2dWgrad(Sizes2d, WeightGradient):
    """The gradient dK of the weight of a `Conv2d`, from dY and X; sizes and options are those of the convolution.

    Attributes:
        out_float32: Whether dK, and a gradient that is added to it, are in float32, also where dY and X have 16 bits.
        atomics: Whether partial sums may be added in any order, so that the last bits differ between runs.

    Example:
        >>> from tvmconv import parse
        >>> parse("conv2d_wgrad:1x64x56x56,64x64x3x3,s1,p1").argument_names
        ('dY', 'X', 'dK')
    """

    FORWARD: ClassVar[type[Conv]] = Conv2d
    operator: ClassVar[str] = "conv2d_wgrad"
    EXAMPLE: ClassVar[str] = "conv2d_wgrad:1x64x56x56,64x64x3x3,s1,p1"

    out_float32: bool = False
    atomics: bool = False


@operator
@dataclass(frozen=True, repr=False)
class Conv2dTranspose(Sizes2d, TransposedConv):
    """A transposed convolution Y of images X with K, whose weight is (C, O / groups, kernel) as in PyTorch.

    Attributes:
        output_padding: Positions that are added at the end of each axis of Y, where they choose among the sizes that
            a stride maps to the same input.

    Example:
        >>> from tvmconv import parse
        >>> parse("conv2d_transpose:1x64x28x28,64x32x4x4,s2,p1").output_shape
        (1, 32, 56, 56)
    """

    FORWARD: ClassVar[type[Conv]] = Conv2d
    operator: ClassVar[str] = "conv2d_transpose"
    EXAMPLE: ClassVar[str] = "conv2d_transpose:1x64x28x28,64x32x4x4,s2,p1"

    output_padding: tuple[int, ...] = (0,)


@operator
@dataclass(frozen=True, repr=False)
class Conv3dDgrad(Sizes3d, InputGradient):
    """The gradient dX of the volumes of a `Conv3d`, from dY and K; sizes and options are those of the convolution.

    Example:
        >>> from tvmconv import parse
        >>> parse("conv3d_dgrad:1x64x8x56x56,64x64x3x3x3,s1,p1").argument_names
        ('dY', 'K', 'dX')
    """

    FORWARD: ClassVar[type[Conv]] = Conv3d
    operator: ClassVar[str] = "conv3d_dgrad"
    EXAMPLE: ClassVar[str] = "conv3d_dgrad:1x64x8x56x56,64x64x3x3x3,s1,p1"


@operator
@dataclass(frozen=True, repr=False)
class Conv3dWgrad(Sizes3d, WeightGradient):
    """The gradient dK of the weight of a `Conv3d`, from dY and X; sizes and options are those of the convolution.

    Attributes:
        out_float32: Whether dK, and a gradient that is added to it, are in float32, also where dY and X have 16 bits.
        atomics: Whether partial sums may be added in any order, so that the last bits differ between runs.

    Example:
        >>> from tvmconv import parse
        >>> parse("conv3d_wgrad:1x64x8x56x56,64x64x3x3x3,s1,p1").argument_names
        ('dY', 'X', 'dK')
    """

    FORWARD: ClassVar[type[Conv]] = Conv3d
    operator: ClassVar[str] = "conv3d_wgrad"
    EXAMPLE: ClassVar[str] = "conv3d_wgrad:1x64x8x56x56,64x64x3x3x3,s1,p1"

    out_float32: bool = False
    atomics: bool = False


@operator
@dataclass(frozen=True, repr=False)
class Conv3dTranspose(Sizes3d, TransposedConv):
    """A transposed convolution Y of volumes X with K, whose weight is (C, O / groups, kernel) as in PyTorch.

    Attributes:
        output_padding: Positions that are added at the end of each axis of Y, where they choose among the sizes that
            a stride maps to the same input.

    Example:
        >>> from tvmconv import parse
        >>> parse("conv3d_transpose:1x64x4x28x28,64x32x2x2x2,s2,p0").output_shape
        (1, 32, 8, 56, 56)
    """

    FORWARD: ClassVar[type[Conv]] = Conv3d
    operator: ClassVar[str] = "conv3d_transpose"
    EXAMPLE: ClassVar[str] = "conv3d_transpose:1x64x4x28x28,64x32x2x2x2,s2,p0"

    output_padding: tuple[int, ...] = (0,)
