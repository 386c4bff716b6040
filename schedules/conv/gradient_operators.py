"""Names of the gradients and of transposed convolutions, and of their arguments."""

from __future__ import annotations

from collections.abc import Mapping

from tvmconv.workloads.conv_gradient import InputGradient

from ..tir_builder import Buffer

DGRAD = ("conv1d_dgrad", "conv2d_dgrad", "conv3d_dgrad")
WGRAD = ("conv1d_wgrad", "conv2d_wgrad", "conv3d_wgrad")
TRANSPOSE = ("conv1d_transpose", "conv2d_transpose", "conv3d_transpose")
ALL = (*DGRAD, *WGRAD, *TRANSPOSE)


def assign_roles(w: InputGradient, arguments: Mapping[str, Buffer]) -> dict[str, Buffer]:
    """Return the arguments of the convolution that a gradient is: X is dY, K has the filters, and Y is the result."""
    image, filters = w.OPERANDS
    roles = {image: "X", filters: "K", w.RESULT: "Y"}
    return {roles.get(name, name): array for name, array in arguments.items()}
