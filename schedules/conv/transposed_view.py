"""Gradients of inputs, and transposed convolutions, as direct convolutions of dY that skip the zeros of a stride.

The gradient is a convolution of dY with flipped filters, whose input and output channels are exchanged. If the forward
convolution has a stride, it reads dY with zeros between its elements. `upsampling` is the distance of the elements, so
that a schedule can tell which taps of which outputs read an element.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from tvmconv.workloads.conv_gradient import InputGradient


@dataclass(frozen=True)
class TransposedView:
    """A gradient with the attributes of a convolution that direct schedules read."""

    gradient: InputGradient
    N: int  # images
    C: int  # channels of dY
    # Channels of dX.
    O: int  # noqa: E741  the field's own letter
    groups: int  # groups of channels
    kernel: tuple[int, ...]  # sizes of the filter
    stride: tuple[int, ...]  # distances of outputs, which are 1
    # Distances of the elements of dY on the grid of dX: the stride of the forward convolution.
    upsampling: tuple[int, ...]
    dilation: tuple[int, ...]  # distances of taps
    input_size: tuple[int, ...]  # sizes of dY
    output_size: tuple[int, ...]  # sizes of dX
    pad_low: tuple[int, ...]  # zeros before dY on the grid of dX; negative where padding hides elements of dY
    storage: str  # storage dtype of all arrays
    epilogue: tuple[str, ...]  # operations on the sums

    @classmethod
    @functools.lru_cache(maxsize=256)
    def from_workload(cls, gradient: InputGradient) -> TransposedView:
        """Return the view of a gradient or of a transposed convolution."""
        forward = gradient.forward
        return cls(
            gradient,
            N=forward.N,
            C=forward.O,
            O=forward.C,
            groups=forward.groups,
            kernel=forward.kernel,
            stride=(1,) * forward.spatial_ndim,
            upsampling=forward.stride,
            dilation=forward.dilation,
            input_size=forward.output_size,
            output_size=forward.input_size,
            pad_low=gradient.border,
            storage=forward.storage,
            epilogue=gradient.epilogue,
        )

    @property
    def spatial_ndim(self) -> int:
        """Number of spatial axes."""
        return len(self.kernel)

    @property
    def layout(self) -> str:
        """Order of the axes of all arrays in memory."""
        return self.gradient.layout

    @property
    def argument_roles(self) -> dict[str, str]:
        """Names of the arguments in a direct convolution: X and K are its operands, and Y is its result."""
        image, filters = self.gradient.OPERANDS
        return {image: "X", filters: "K", self.gradient.RESULT: "Y"}
