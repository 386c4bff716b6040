"""Calls of a convolution as keys of the kernel table, and the workloads of their three products.

A training step computes three products for each convolution: the forward pass, the gradient of the input (dgrad) and
the gradient of the weight (wgrad). One `ConvCall` describes all three.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from tvmconv.models.model_graph import make_convolution
from tvmconv.torch.tensor_layout import name_layout
from tvmconv.workloads.conv_operator import ConvOperator
from tvmconv.workloads.epilogue import STATS
from tvmconv.workloads.training import input_gradient, weight_gradient

FORWARD, FORWARD_BIAS, DGRAD, WGRAD = "forward", "forward with bias", "dgrad", "wgrad"
FORWARD_STATS = "forward with statistics"  # without a bias; also returns the statistics of the output's channels
STATS_IN_GRAPHS = "forward with statistics, in compiled graphs"  # the same product, decided by other times
KERNEL_DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
TF32_NAME = "tf32"

Sizes = tuple[int, ...]


class ConvCall(NamedTuple):
    """Shapes, options, dtype, layout and device of a convolution or a transposed convolution.

    The bias is not part of it, because the gradients do not depend on it.
    """

    x_shape: Sizes  # N, C, space
    weight_shape: Sizes  # O, C / groups, kernel; of a transposed convolution C, O / groups, kernel
    stride: Sizes
    padding: Sizes  # zeros before the input along each axis, then zeros after it along each axis
    dilation: Sizes
    groups: int
    transposed: bool
    output_padding: Sizes
    dtype: torch.dtype
    uses_tf32: bool  # whether float32 operands may be rounded to TF32
    channels_last: bool  # layout of all tensors
    device: torch.device

    @property
    def layout(self) -> str:
        """Layout of all tensors in the words of workloads."""
        return name_layout(self.channels_last)

    @property
    def output_shape(self) -> Sizes:
        """Shape of the output: (N, O, space)."""
        return compute_output_shape(
            *(self.x_shape, self.weight_shape, self.stride, self.padding, self.dilation, self.groups),
            *(self.transposed, self.output_padding),
        )


def compute_output_shape(
    x_shape: Sequence[int],
    weight_shape: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    transposed: bool,
    output_padding: Sequence[int],
) -> Sizes:
    """Return the shape of a convolution's output; sizes may be symbolic."""
    ndim = len(x_shape) - 2
    windows = [step * (taps - 1) + 1 for step, taps in zip(dilation, weight_shape[2:], strict=True)]
    margins = [low + high for low, high in zip(padding[:ndim], padding[ndim:], strict=True)]
    axes = zip(x_shape[2:], windows, margins, stride, output_padding, strict=True)
    if transposed:
        size = tuple((n - 1) * step - margin + window + more for n, window, margin, step, more in axes)
        return x_shape[0], weight_shape[1] * groups, *size
    size = tuple((n + margin - window) // step + 1 for n, window, margin, step, _ in axes)
    return x_shape[0], weight_shape[0], *size


def make_workload(product: str, call: ConvCall) -> ConvOperator:
    """Return the workload of a product of a call; raise WorkloadError if there is none."""
    workload = make_convolution(
        call.x_shape,
        call.weight_shape,
        stride=call.stride,
        padding=call.padding,
        dilation=call.dilation,
        groups=call.groups,
        dtype=TF32_NAME if call.uses_tf32 else KERNEL_DTYPES[call.dtype],
        bias=product == FORWARD_BIAS,
        output_padding=call.output_padding if call.transposed else None,
    )
    if call.channels_last:
        workload = workload.to_channels_last()
    if product == FORWARD_STATS:
        return workload.with_fields(epilogue=(STATS,))
    if product == DGRAD:
        return input_gradient(workload)
    return weight_gradient(workload) if product == WGRAD else workload
