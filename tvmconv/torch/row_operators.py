"""Operators of layer normalizations and element-wise operations in training, for graphs that no compiler fuses.

| operator | computes |
| --- | --- |
| `tvmconv::layer_norm` | the normalization of x + x_bias over the last axis |
| `tvmconv::activate` | activation(x + bias) |
| `tvmconv::scale_add` | (z + bias) * scale * noise + x: layer scale, stochastic depth and the sum of a residual block |
| `tvmconv::gate` | the product of images with a number for each channel of each sample |

The biases are those of the convolutions or linear layers before these operations, whose gradients are sums over rows of
gradients that the kernels have in registers. `layer_norm` and `scale_add` return their result in one or two data types,
and an empty tensor for a type that is not asked for: under autocast, a sum reads float32, and a convolution reads 16
bits. The gradients of both are added while they are read. Arithmetic is float32. On the CPU, PyTorch computes the
operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tvmconv.torch import row_kernels
from tvmconv.torch.operator_library import define_operator
from tvmconv.torch.tensor_layout import allocate_like, lay_out, name_layout
from tvmconv.torch.training_activations import ACTIVATION_GRADIENTS, ACTIVATIONS

TYPES = "ScalarType? dtype, ScalarType? low_dtype"


def _is_on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


def _lay_out(tensor: torch.Tensor | None, is_channels_last: bool) -> Any:
    """Return a tensor with neighbouring channels in memory, as a copy if necessary."""
    return None if tensor is None else lay_out(tensor, name_layout(is_channels_last))


def _allocate(like: torch.Tensor, dtype: torch.dtype | None, is_channels_last: bool) -> torch.Tensor:
    """Return memory for a tensor of a shape; an empty tensor without a data type."""
    if dtype is None:
        return like.new_empty(0)
    return allocate_like(like, name_layout(is_channels_last), dtype=dtype)


def _count_channels(tensor: torch.Tensor, is_channels_last: bool) -> Any:
    return tensor.shape[1 if is_channels_last else -1]


def _flatten(values: torch.Tensor | None) -> torch.Tensor | None:
    """Return numbers of channels or samples as a contiguous vector in float32."""
    return None if values is None else values.detach().reshape(-1).float()


def _spread(values: torch.Tensor | None, like: torch.Tensor, axis: int, default: float) -> Any:
    """Return numbers along one axis of a tensor in float32, such that they are broadcast over the others."""
    if values is None:
        return default
    shape = [1] * like.dim()
    shape[axis] = -1
    return values.detach().reshape(shape).float()


def _or_none(tensor: torch.Tensor) -> torch.Tensor | None:
    return tensor if tensor.numel() else None


def _run_layer_norm(
    x: torch.Tensor,
    x_bias: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    dtype: torch.dtype | None,
    low_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, (y, low, stats) = x.contiguous(), _make_fake_norm(x, x_bias, weight, bias, eps, dtype, low_dtype)
    if _is_on_gpu(x):
        vectors = _flatten(x_bias), _flatten(weight), _flatten(bias)
        row_kernels.normalize(x, *vectors, eps, _or_none(y), _or_none(low), stats)
        return y, low, stats
    u = x.float() + _spread(x_bias, x, -1, 0.0)
    variance, mean = torch.var_mean(u, -1, correction=0, keepdim=True)
    reciprocal = torch.rsqrt(variance + eps)
    result = (u - mean) * reciprocal * _spread(weight, x, -1, 1.0) + _spread(bias, x, -1, 0.0)
    stats.copy_(torch.stack([mean.flatten(), reciprocal.flatten()]))
    for each in (y, low):
        if each.numel():
            each.copy_(result)
    return y, low, stats


def _run_layer_norm_backward(
    dy: torch.Tensor | None,
    dlow: torch.Tensor | None,
    x: torch.Tensor,
    x_bias: torch.Tensor | None,
    weight: torch.Tensor | None,
    stats: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    x, dy, dlow = (_lay_out(each, False) for each in (x, dy, dlow))
    if _is_on_gpu(x):
        return row_kernels.differentiate_norm(dy, dlow, x, _flatten(x_bias), _flatten(weight), stats)
    gradient = _add_gradients(dy, dlow)
    mean, reciprocal = (each.view(*x.shape[:-1], 1) for each in stats)
    normalized, axes = (x.float() + _spread(x_bias, x, -1, 0.0) - mean) * reciprocal, [*range(x.dim() - 1)]
    sums = [(gradient * normalized).sum(axes), gradient.sum(axes)]
    gradient = gradient * _spread(weight, x, -1, 1.0)
    slope = (gradient * normalized).mean(-1, keepdim=True)
    dx = ((gradient - gradient.mean(-1, keepdim=True) - normalized * slope) * reciprocal).to(x.dtype)
    return dx, torch.stack(sums if x_bias is None else [*sums, dx.float().sum(axes)])


def _add_gradients(dy: torch.Tensor | None, dlow: torch.Tensor | None) -> torch.Tensor:
    """Return the sum of one or two gradients in float32."""
    first, *rest = (each.float() for each in (dy, dlow) if each is not None)
    return first + rest[0] if rest else first


def _run_activate(x: torch.Tensor, bias: torch.Tensor | None, activation: str, is_channels_last: bool) -> torch.Tensor:
    x = _lay_out(x, is_channels_last)
    channels = _count_channels(x, is_channels_last)
    if _is_on_gpu(x):
        return row_kernels.activate(x, _flatten(bias), activation, channels)
    u = x.float() + _spread(bias, x, 1 if is_channels_last else -1, 0.0)
    return _allocate(x, x.dtype, is_channels_last).copy_(ACTIVATIONS[activation](u))


def _run_activate_backward(
    dz: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None, activation: str, is_channels_last: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    dz, x = (_lay_out(each, is_channels_last) for each in (dz.to(x.dtype), x))
    channels = _count_channels(x, is_channels_last)
    if _is_on_gpu(x):
        return row_kernels.differentiate_activation(dz, x, _flatten(bias), activation, channels)
    axis = 1 if is_channels_last else x.dim() - 1
    u = x.float() + _spread(bias, x, axis, 0.0)
    dx = _allocate(x, x.dtype, is_channels_last).copy_(ACTIVATION_GRADIENTS[activation](dz.float(), u))
    return dx, _sum_rows(dx.float(), axis)


def _sum_rows(values: torch.Tensor, axis: int) -> torch.Tensor:
    """Return the sums over all axes but one."""
    return values.sum([each for each in range(values.dim()) if each != axis])


def _run_scale_add(
    z: torch.Tensor,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    noise: torch.Tensor | None,
    x: torch.Tensor,
    dtype: torch.dtype | None,
    low_dtype: torch.dtype | None,
    is_channels_last: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    z, x = (_lay_out(each, is_channels_last) for each in (z, x))
    y, low = (_allocate(x, each, is_channels_last) for each in (dtype, low_dtype))
    if _is_on_gpu(z):
        vectors = _flatten(bias), _flatten(scale), _flatten(noise)
        row_kernels.scale_and_add(z, *vectors, x, _or_none(y), _or_none(low), _count_channels(z, is_channels_last))
        return y, low
    axis = 1 if is_channels_last else -1
    result = (z.float() + _spread(bias, z, axis, 0.0)) * _spread(scale, z, axis, 1.0)
    result = result * _spread(noise, z, 0, 1.0) + x.float()
    for each in (y, low):
        if each.numel():
            each.copy_(result)
    return y, low


def _run_scale_add_backward(
    dy: torch.Tensor | None,
    dlow: torch.Tensor | None,
    z: torch.Tensor,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    noise: torch.Tensor | None,
    x_dtype: torch.dtype | None,
    is_channels_last: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dy, dlow, z = (_lay_out(each, is_channels_last) for each in (dy, dlow, z))
    dx = _allocate(z, x_dtype, is_channels_last)
    if _is_on_gpu(z):
        vectors = _flatten(bias), _flatten(scale), _flatten(noise)
        channels = _count_channels(z, is_channels_last)
        dz, sums = row_kernels.differentiate_scale_add(dy, dlow, z, *vectors, _or_none(dx), channels)
        return dx, dz, sums
    axis = 1 if is_channels_last else z.dim() - 1
    gradient = _add_gradients(dy, dlow)
    if dx.numel():
        dx.copy_(gradient)
    gradient = gradient * _spread(noise, z, 0, 1.0)
    dz = _allocate(z, z.dtype, is_channels_last).copy_(gradient * _spread(scale, z, axis, 1.0))
    if bias is None and scale is None:
        return dx, dz, gradient.new_empty(0)
    products = gradient * (z.float() + _spread(bias, z, axis, 0.0))
    return dx, dz, torch.stack([_sum_rows(dz.float(), axis), _sum_rows(products, axis)])


def _run_gate(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    x = _lay_out(x, True)
    if _is_on_gpu(x):
        return row_kernels.gate(x, s.contiguous())
    return _allocate(x, x.dtype, True).copy_(x.float() * s.float())


def _run_gate_backward(dy: torch.Tensor, x: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    dy, x = (_lay_out(each, True) for each in (dy.to(x.dtype), x))
    if _is_on_gpu(x):
        dx, dfactor = row_kernels.differentiate_gate(dy, x, s.contiguous())
    else:
        dx = _allocate(x, x.dtype, True).copy_(dy.float() * s.float())
        dfactor = (dy.float() * x.float()).flatten(2).sum(2)
    return dx, dfactor.to(s.dtype).view(s.shape)


def _make_fake_norm(
    x: torch.Tensor, x_bias: Any, weight: Any, bias: Any, eps: float, dtype: Any, low_dtype: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    y, low = (_allocate(x, each, False) for each in (dtype, low_dtype))
    return y, low, x.new_empty((2, x.numel() // x.shape[-1]), dtype=torch.float32)


def _make_fake_norm_gradients(dy: Any, dlow: Any, x: torch.Tensor, x_bias: Any, *_: Any) -> Any:
    return _allocate(x, x.dtype, False), x.new_empty((2 if x_bias is None else 3, x.shape[-1]), dtype=torch.float32)


def _make_fake_activate(x: torch.Tensor, bias: Any, activation: str, is_channels_last: bool) -> torch.Tensor:
    return _allocate(x, x.dtype, is_channels_last)


def _make_fake_activate_gradients(dz: Any, x: torch.Tensor, bias: Any, activation: str, is_channels_last: bool) -> Any:
    sums = x.new_empty((_count_channels(x, is_channels_last),), dtype=torch.float32)
    return _allocate(x, x.dtype, is_channels_last), sums


def _make_fake_sum(z: Any, bias: Any, scale: Any, noise: Any, x: torch.Tensor, *types: Any) -> Any:
    dtype, low_dtype, is_channels_last = types
    return tuple(_allocate(x, each, is_channels_last) for each in (dtype, low_dtype))


def _make_fake_sum_gradients(
    dy: Any, dlow: Any, z: torch.Tensor, bias: Any, scale: Any, noise: Any, x_dtype: Any, is_channels_last: bool
) -> Any:
    has_sums = bias is not None or scale is not None
    shape = (2, _count_channels(z, is_channels_last)) if has_sums else (0,)
    dx, dz = (_allocate(z, each, is_channels_last) for each in (x_dtype, z.dtype))
    return dx, dz, z.new_empty(shape, dtype=torch.float32)


def _make_fake_gate(x: torch.Tensor, s: Any) -> torch.Tensor:
    return _allocate(x, x.dtype, True)


def _make_fake_gate_gradients(dy: Any, x: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _allocate(x, x.dtype, True), s.new_empty(s.shape)


def _like(parameter: torch.Tensor | None, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Return the gradient of a parameter in its data type and shape; None without a parameter."""
    if parameter is None or gradient is None:
        return None
    return gradient.to(parameter.dtype).view(parameter.shape)


def _set_up_norm(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
    x, x_bias, weight, bias, *_ = inputs
    ctx.save_for_backward(x, x_bias, weight, bias, output[2])
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)


def _differentiate_norm(ctx: Any, dy: torch.Tensor | None, dlow: torch.Tensor | None, _: Any) -> tuple[Any, ...]:
    if dy is None and dlow is None:
        return (None,) * 7
    x, x_bias, weight, bias, stats = ctx.saved_tensors
    dx, sums = layer_norm_backward(dy, dlow, x, x_bias, weight, stats)
    of_weight, of_bias, *of_x_bias = sums.unbind()
    of_x_bias = of_x_bias[0] if of_x_bias else None
    return dx, _like(x_bias, of_x_bias), _like(weight, of_weight), _like(bias, of_bias), None, None, None


def _set_up_activate(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
    x, bias, *ctx.options = inputs
    ctx.save_for_backward(x, bias)


def _differentiate_activate(ctx: Any, dz: torch.Tensor) -> tuple[Any, ...]:
    x, bias = ctx.saved_tensors
    dx, dbias = activate_backward(dz, x, bias, *ctx.options)
    return dx, _like(bias, dbias), None, None


def _set_up_sum(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
    z, bias, scale, noise, x, _, _, ctx.is_channels_last = inputs
    ctx.x_dtype = x.dtype
    ctx.save_for_backward(z, bias, scale, noise)
    ctx.set_materialize_grads(False)


def _differentiate_sum(ctx: Any, dy: torch.Tensor | None, dlow: torch.Tensor | None) -> tuple[Any, ...]:
    if dy is None and dlow is None:
        return (None,) * 8
    z, bias, scale, noise = ctx.saved_tensors
    is_dx = dlow is None and dy is not None and dy.dtype is ctx.x_dtype  # the gradient of x is that of the result
    dx, dz, sums = scale_add_backward(
        *(dy, dlow, z, bias, scale, noise, None if is_dx else ctx.x_dtype, ctx.is_channels_last)
    )
    of_bias, of_scale = (None, None) if bias is None and scale is None else sums.unbind()
    return dz, _like(bias, of_bias), _like(scale, of_scale), None, dy if is_dx else dx, None, None, None


def _set_up_gate(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate_gate(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    dx, dfactor = gate_backward(dy, *ctx.saved_tensors)
    return dx, dfactor


layer_norm = define_operator(
    f"layer_norm(Tensor x, Tensor? x_bias, Tensor? weight, Tensor? bias, float eps, {TYPES})"
    " -> (Tensor, Tensor, Tensor)",
    cpu=_run_layer_norm,
    fake=_make_fake_norm,
    backward=_differentiate_norm,
    setup_context=_set_up_norm,
)
layer_norm_backward = define_operator(
    "layer_norm_backward(Tensor? dy, Tensor? dlow, Tensor x, Tensor? x_bias, Tensor? weight, Tensor stats)"
    " -> (Tensor, Tensor)",
    cpu=_run_layer_norm_backward,
    fake=_make_fake_norm_gradients,
)
activate = define_operator(
    "activate(Tensor x, Tensor? bias, str activation, bool is_channels_last) -> Tensor",
    cpu=_run_activate,
    fake=_make_fake_activate,
    backward=_differentiate_activate,
    setup_context=_set_up_activate,
)
activate_backward = define_operator(
    "activate_backward(Tensor dz, Tensor x, Tensor? bias, str activation, bool is_channels_last) -> (Tensor, Tensor)",
    cpu=_run_activate_backward,
    fake=_make_fake_activate_gradients,
)
scale_add = define_operator(
    f"scale_add(Tensor z, Tensor? bias, Tensor? scale, Tensor? noise, Tensor x, {TYPES}, bool is_channels_last)"
    " -> (Tensor, Tensor)",
    cpu=_run_scale_add,
    fake=_make_fake_sum,
    backward=_differentiate_sum,
    setup_context=_set_up_sum,
)
scale_add_backward = define_operator(
    "scale_add_backward(Tensor? dy, Tensor? dlow, Tensor z, Tensor? bias, Tensor? scale, Tensor? noise, "
    "ScalarType? x_dtype, bool is_channels_last) -> (Tensor, Tensor, Tensor)",
    cpu=_run_scale_add_backward,
    fake=_make_fake_sum_gradients,
)
gate = define_operator(
    "gate(Tensor x, Tensor s) -> Tensor",
    cpu=_run_gate,
    fake=_make_fake_gate,
    backward=_differentiate_gate,
    setup_context=_set_up_gate,
)
gate_backward = define_operator(
    "gate_backward(Tensor dy, Tensor x, Tensor s) -> (Tensor, Tensor)",
    cpu=_run_gate_backward,
    fake=_make_fake_gate_gradients,
)
