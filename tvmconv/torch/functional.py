"""Convolutions with the signatures of `torch.nn.functional`, whose forward and backward passes run the fastest kernels.

    >>> import tvmconv.torch
    >>> import tvmconv.torch.functional as F
    >>> with F.record_calls() as calls:  # doctest: +SKIP
    ...     loss(F.conv2d(x, weight, padding=1)).backward()
    >>> print(tvmconv.torch.tune(calls, seconds=60, log="train.jsonl"))  # doctest: +SKIP

Each of the three products of a convolution, the forward pass and the gradients of input and weight, runs on the kernel
that the kernel table names for its shapes, options, dtype and layout. PyTorch computes all others, and everything for
tensors without kernels: on the CPU, in float64, complex or integer dtypes, without elements or without a batch axis,
for subclasses of tensors, with forward-mode derivatives, and inside of transforms of `torch.func`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch.nn import functional

from tvmconv.torch.conv_dispatch import IntOrSizes, convolve
from tvmconv.torch.kernel_table import RecordedCall, table


def conv1d(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: IntOrSizes = 1,
    padding: IntOrSizes | str = 0,
    dilation: IntOrSizes = 1,
    groups: int = 1,
) -> torch.Tensor:
    """Compute a 1-D convolution, as `torch.nn.functional.conv1d`.

    Args:
        input: Signals of shape (N, C, W), or (C, W) without a batch axis.
        weight: Filters of shape (O, C / groups, S).
        bias: One summand per output channel, of shape (O).
        stride: Distance between the windows in samples.
        padding: Zeros on both sides, "same" or "valid".
        dilation: Distance between the taps of a filter in samples.
        groups: Number of groups of channels.

    Returns:
        Signals of shape (N, O, Q), in the dtype of the input, or of autocast.

    Raises:
        RuntimeError: The tensors do not fit; the message is PyTorch's.

    Examples:
        >>> import torch, tvmconv.torch.functional as F
        >>> F.conv1d(torch.randn(2, 4, 16), torch.randn(8, 4, 3), padding="same").shape
        torch.Size([2, 8, 16])
    """
    return convolve(functional.conv1d, input, weight, bias, stride, padding, dilation, groups)


def conv2d(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: IntOrSizes = 1,
    padding: IntOrSizes | str = 0,
    dilation: IntOrSizes = 1,
    groups: int = 1,
) -> torch.Tensor:
    """Compute a 2-D convolution, as `torch.nn.functional.conv2d`.

    Args:
        input: Images of shape (N, C, H, W), or (C, H, W) without a batch axis.
        weight: Filters of shape (O, C / groups, R, S).
        bias: One summand per output channel, of shape (O).
        stride: Distance between the windows in pixels, one number or one for each axis.
        padding: Zeros on both sides of each axis, "same" or "valid".
        dilation: Distance between the taps of a filter in pixels.
        groups: Number of groups of channels.

    Returns:
        Images of shape (N, O, P, Q), in the dtype of the input, or of autocast.

    Raises:
        RuntimeError: The tensors do not fit; the message is PyTorch's.

    Examples:
        >>> import torch, tvmconv.torch.functional as F
        >>> F.conv2d(torch.randn(2, 4, 8, 8), torch.randn(8, 4, 3, 3), stride=2, padding=1).shape
        torch.Size([2, 8, 4, 4])
    """
    return convolve(functional.conv2d, input, weight, bias, stride, padding, dilation, groups)


def conv3d(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: IntOrSizes = 1,
    padding: IntOrSizes | str = 0,
    dilation: IntOrSizes = 1,
    groups: int = 1,
) -> torch.Tensor:
    """Compute a 3-D convolution, as `torch.nn.functional.conv3d`.

    Args:
        input: Volumes of shape (N, C, D, H, W), or (C, D, H, W) without a batch axis.
        weight: Filters of shape (O, C / groups, T, R, S).
        bias: One summand per output channel, of shape (O).
        stride: Distance between the windows in voxels, one number or one for each axis.
        padding: Zeros on both sides of each axis, "same" or "valid".
        dilation: Distance between the taps of a filter in voxels.
        groups: Number of groups of channels.

    Returns:
        Volumes of shape (N, O, out), in the dtype of the input, or of autocast.

    Raises:
        RuntimeError: The tensors do not fit; the message is PyTorch's.

    Examples:
        >>> import torch, tvmconv.torch.functional as F
        >>> F.conv3d(torch.randn(2, 4, 4, 8, 8), torch.randn(8, 4, 1, 3, 3), padding=(0, 1, 1)).shape
        torch.Size([2, 8, 4, 8, 8])
    """
    return convolve(functional.conv3d, input, weight, bias, stride, padding, dilation, groups)


def conv_transpose1d(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: IntOrSizes = 1,
    padding: IntOrSizes = 0,
    output_padding: IntOrSizes = 0,
    groups: int = 1,
    dilation: IntOrSizes = 1,
) -> torch.Tensor:
    """Compute a 1-D transposed convolution, as `torch.nn.functional.conv_transpose1d`.

    Args:
        input: Signals of shape (N, C, W), or (C, W) without a batch axis.
        weight: Filters of shape (C, O / groups, S).
        bias: One summand per output channel, of shape (O).
        stride: Distance between the windows in samples of the output.
        padding: Samples that are cut off on both sides of the output.
        output_padding: Samples that are added at the end of the output.
        groups: Number of groups of channels.
        dilation: Distance between the taps of a filter in samples.

    Returns:
        Signals of shape (N, O, out), in the dtype of the input, or of autocast.

    Raises:
        RuntimeError: The tensors do not fit; the message is PyTorch's.

    Examples:
        >>> import torch, tvmconv.torch.functional as F
        >>> F.conv_transpose1d(torch.randn(2, 4, 16), torch.randn(4, 8, 4), stride=2, padding=1).shape
        torch.Size([2, 8, 32])
    """
    function = functional.conv_transpose1d
    return convolve(function, input, weight, bias, stride, padding, dilation, groups, output_padding)


def conv_transpose2d(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: IntOrSizes = 1,
    padding: IntOrSizes = 0,
    output_padding: IntOrSizes = 0,
    groups: int = 1,
    dilation: IntOrSizes = 1,
) -> torch.Tensor:
    """Compute a 2-D transposed convolution, as `torch.nn.functional.conv_transpose2d`.

    Args:
        input: Images of shape (N, C, H, W), or (C, H, W) without a batch axis.
        weight: Filters of shape (C, O / groups, R, S).
        bias: One summand per output channel, of shape (O).
        stride: Distance between the windows in pixels of the output, one number or one for each axis.
        padding: Pixels that are cut off on both sides of each axis of the output.
        output_padding: Pixels that are added at the end of each axis of the output.
        groups: Number of groups of channels.
        dilation: Distance between the taps of a filter in pixels.

    Returns:
        Images of shape (N, O, out), in the dtype of the input, or of autocast.

    Raises:
        RuntimeError: The tensors do not fit; the message is PyTorch's.

    Examples:
        >>> import torch, tvmconv.torch.functional as F
        >>> F.conv_transpose2d(torch.randn(2, 4, 8, 8), torch.randn(4, 8, 4, 4), stride=2, padding=1).shape
        torch.Size([2, 8, 16, 16])
    """
    function = functional.conv_transpose2d
    return convolve(function, input, weight, bias, stride, padding, dilation, groups, output_padding)


def conv_transpose3d(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: IntOrSizes = 1,
    padding: IntOrSizes = 0,
    output_padding: IntOrSizes = 0,
    groups: int = 1,
    dilation: IntOrSizes = 1,
) -> torch.Tensor:
    """Compute a 3-D transposed convolution, as `torch.nn.functional.conv_transpose3d`.

    Args:
        input: Volumes of shape (N, C, D, H, W), or (C, D, H, W) without a batch axis.
        weight: Filters of shape (C, O / groups, T, R, S).
        bias: One summand per output channel, of shape (O).
        stride: Distance between the windows in voxels of the output, one number or one for each axis.
        padding: Voxels that are cut off on both sides of each axis of the output.
        output_padding: Voxels that are added at the end of each axis of the output.
        groups: Number of groups of channels.
        dilation: Distance between the taps of a filter in voxels.

    Returns:
        Volumes of shape (N, O, out), in the dtype of the input, or of autocast.

    Raises:
        RuntimeError: The tensors do not fit; the message is PyTorch's.

    Examples:
        >>> import torch, tvmconv.torch.functional as F
        >>> F.conv_transpose3d(torch.randn(2, 4, 2, 4, 4), torch.randn(4, 8, 2, 2, 2), stride=2).shape
        torch.Size([2, 8, 4, 8, 8])
    """
    function = functional.conv_transpose3d
    return convolve(function, input, weight, bias, stride, padding, dilation, groups, output_padding)


def record_calls() -> AbstractContextManager[list[RecordedCall]]:
    """Record the calls of this module's convolutions inside of a `with` block, for `tune`.

    Returns:
        A context manager, which returns the list of the calls.

    Examples:
        >>> import torch, tvmconv.torch.functional as F
        >>> with F.record_calls() as calls:
        ...     y = F.conv2d(torch.randn(2, 4, 8, 8), torch.randn(8, 4, 3, 3))
        >>> calls[0].call.output_shape
        (2, 8, 6, 6)
    """
    return table.record()
