"""The convolutions of a training step: forward layers, and the gradients of their inputs and weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from typing import Any

from tvmconv.errors import WorkloadError
from tvmconv.workloads.base import Workload
from tvmconv.workloads.conv import Conv
from tvmconv.workloads.conv_gradient import DerivedConv, TransposedConv
from tvmconv.workloads.conv_operator import ConvOperator
from tvmconv.workloads.layer import Layer
from tvmconv.workloads.registry import operators

DGRAD, WGRAD = "dgrad", "wgrad"


def input_gradient(w: Workload) -> ConvOperator:
    """Return the workload that computes the gradient of a layer's input, without an epilogue.

    The input's gradient of a convolution is a dgrad. That of a transposed convolution Y of X with K is the convolution
    of dY with K, whose weight has the same elements in the same order.

    Args:
        w: A convolution or a transposed convolution.

    Returns:
        The gradient, with the sizes, the dtype and the layout of the layer.

    Raises:
        WorkloadError: The workload is neither of both.

    Examples:
        >>> import tvmconv as tc
        >>> from tvmconv.workloads.training import input_gradient
        >>> input_gradient(tc.parse("conv2d:1x64x56x56,32x64x3x3,s1,p1,relu")).text
        'conv2d_dgrad:1x64x56x56,32x64x3x3,s1,p1'
        >>> input_gradient(tc.parse("conv2d_transpose:1x64x28x28,64x32x4x4,s2,p1")).text
        'conv2d:1x32x56x56,64x32x4x4,s2,p1'
    """
    return w.forward if isinstance(w, TransposedConv) else _make_gradient(_require_forward_layer(w), DGRAD)


def weight_gradient(w: Workload) -> ConvOperator:
    """Return the workload that computes the gradient of a layer's weight, without an epilogue.

    The weight's gradient of a transposed convolution Y of X with K is a wgrad with exchanged operands: its dY is X, and
    its X is the gradient of Y.

    Args:
        w: A convolution or a transposed convolution.

    Returns:
        The gradient, with the sizes, the dtype and the layout of the layer.

    Raises:
        WorkloadError: The workload is neither of both.

    Examples:
        >>> import tvmconv as tc
        >>> from tvmconv.workloads.training import weight_gradient
        >>> weight_gradient(tc.parse("conv2d_transpose:1x64x28x28,64x32x4x4,s2,p1")).text
        'conv2d_wgrad:1x32x56x56,64x32x4x4,s2,p1'
    """
    return _make_gradient(w.forward if isinstance(w, TransposedConv) else _require_forward_layer(w), WGRAD)


def is_gradient(w: Workload) -> bool:
    """Return whether a workload is the gradient of a convolution's input or weight.

    Example:
        >>> import tvmconv as tc
        >>> from tvmconv.workloads.training import is_gradient
        >>> [is_gradient(tc.parse(f"conv1d_{kind}:1x8x16,8x8x3,s1,p1")) for kind in ("wgrad", "transpose")]
        [True, False]
    """
    return isinstance(w, DerivedConv) and not isinstance(w, TransposedConv)


def list_training_layers(layers: Iterable[Layer]) -> list[Layer]:
    """Return the layers of a training step: each layer, followed by its dgrad and its wgrad.

    The first of the layers reads the network's input, so it has no dgrad. Raises WorkloadError for a workload that is
    no convolution.
    """
    training_layers: list[Layer] = []
    for index, layer in enumerate(layers):
        training_layers += derive_layer_gradients(layer, num_dgrads=layer.count - (index == 0))
    return training_layers


def derive_layer_gradients(layer: Layer, num_dgrads: int, *, has_wgrad: bool = True) -> Iterator[Layer]:
    """Yield a layer, its dgrad with a count unless this is zero, and its wgrad if it has one."""
    yield layer
    if num_dgrads:
        yield replace(layer, name=f"{layer.name} {DGRAD}", workload=input_gradient(layer.workload), count=num_dgrads)
    if has_wgrad:
        yield replace(layer, name=f"{layer.name} {WGRAD}", workload=weight_gradient(layer.workload))


def _require_forward_layer(w: Workload) -> Conv:
    if not isinstance(w, Conv):
        raise WorkloadError(f"{w.operator} has no gradients here: expected a convolution or a transposed convolution")
    return w


def _make_gradient(forward: Conv, kind: str) -> ConvOperator:
    if not forward.reads_x_only:
        raise WorkloadError(f"{forward} has no gradients here: expected a convolution without options c and up")
    gradient: Any = operators()[f"{forward.operator}_{kind}"]
    names = {field.name for field in fields(gradient)} & vars(forward).keys()
    return gradient(**{name: getattr(forward, name) for name in names} | {"epilogue": ()})
