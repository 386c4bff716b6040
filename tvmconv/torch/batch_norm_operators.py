"""Operators of batch normalizations in training with the sum and the activation after them, for compiled graphs.

| operator | computes |
| --- | --- |
| `tvmconv::batch_norm_stats` | mean and biased variance of each channel, of shape (2, channels) |
| `tvmconv::batch_norm_act` | z = activation(normalized x + residual) from given statistics |
| `tvmconv::batch_norm_act_backward` | gradients of x, of weight and bias, and of the residual |
| `tvmconv::mean_pixels` | mean of each channel of each sample, whose gradient is one number for all pixels |

A compiler would write these reductions and sums in its own kernels; those of `batch_norm_source.py` read each tensor as
rarely as possible. On the CPU, PyTorch computes the operators.

In a residual network, z has two readers: a convolution, and the sum with a later result. Their gradients would be added
in a pass of its own. `batch_norm_act` therefore returns a stand-in of z as well, a tensor of its shape with one element
in memory. The later sum takes the stand-in for the gradient, and z itself, detached, for the values. Both gradients
then reach the backward operator, which adds them while it reads them. One of two convolutions that read z does the
same. In squeeze and excitation, z is read by a product and by a mean over all pixels. `mean_pixels` takes the stand-in
for the gradient, too, which stays one number for each channel of each sample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from tvmconv.torch import batch_norm_kernels
from tvmconv.torch.operator_library import define_operator
from tvmconv.torch.running_statistics import correct_variance
from tvmconv.torch.tensor_layout import allocate_like, lay_out
from tvmconv.torch.training_activations import ACTIVATION_GRADIENTS, ACTIVATIONS
from tvmconv.workloads.layout import CHANNELS_LAST

PARAMETERS = "Tensor stats, Tensor? weight, Tensor? bias, float eps, str activation"
NUM_PARAMETERS = 5  # stats, weight, bias, eps and activation


def compute_stats_in_graph(x: torch.Tensor) -> torch.Tensor:
    """Return mean and biased variance of each channel, of shape (2, channels), by the operator."""
    return batch_norm_stats(x.detach())


def normalize_in_graph(
    x: torch.Tensor,
    stats: torch.Tensor | None,
    running: tuple[torch.Tensor, torch.Tensor] | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    momentum: float,
    eps: float,
    activation: str = "",
    residual: torch.Tensor | None = None,
    residual_stand_in: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute a batch normalization in training, and the operations after it, by the operators.

    Args:
        x: Input, channels last.
        stats: Mean and biased variance of its channels, of shape (2, channels); None to compute them.
        running: Running mean and variance, which are updated; None if there are none.
        weight: Factor of each channel; None for 1.
        bias: Summand of each channel; None for 0.
        momentum: Weight of the new statistics in the running ones.
        eps: Summand of the variance.
        activation: Name of the activation; "" for none.
        residual: Summand of the normalized input before the activation.
        residual_stand_in: Stand-in of the residual that receives its gradient; None for the residual itself.

    Returns:
        The result, and its stand-in.
    """
    stats = compute_stats_in_graph(x) if stats is None else stats.detach()
    if running is not None:
        correction = correct_variance(x.numel() // x.shape[1])
        with torch.no_grad():
            for old, new in zip(running, (stats[0], stats[1] * correction), strict=True):
                old.lerp_(new.to(old.dtype), momentum)
    if residual is not None and residual_stand_in is not None:
        residual = residual.detach()
    z, stand_in, _ = batch_norm_act(x, residual, residual_stand_in, stats, weight, bias, eps, activation)
    return z, stand_in


def average_in_graph(z: torch.Tensor, stand_in: torch.Tensor) -> torch.Tensor:
    """Return the mean over all pixels by the operator; the gradient reaches the stand-in."""
    return mean_pixels(z.detach(), stand_in)


class _GradientOfStandIn(torch.autograd.Function):
    """A tensor whose gradient is that of its stand-in."""

    @staticmethod
    def forward(ctx: Any, z: torch.Tensor, stand_in: torch.Tensor) -> torch.Tensor:
        """Return the tensor."""
        return z.view_as(z)

    @staticmethod
    def backward(ctx: Any, dz: torch.Tensor) -> tuple[None, torch.Tensor]:
        """Return the gradient of the stand-in."""
        return None, dz


def read_in_graph(z: torch.Tensor, stand_in: torch.Tensor) -> torch.Tensor:
    """Return z for one of its readers, whose gradient reaches the stand-in."""
    result: torch.Tensor = _GradientOfStandIn.apply(z.detach(), stand_in)
    return result


def _allocate(tensor: torch.Tensor) -> torch.Tensor:
    return allocate_like(tensor, CHANNELS_LAST)


def _view_channels(values: torch.Tensor | None, x: torch.Tensor, default: float) -> torch.Tensor:
    """Return one number per channel in the axes of x."""
    if values is None:
        values = torch.full((x.shape[1],), default, device=x.device)
    return values.float().view(1, -1, *(1,) * (x.dim() - 2))


def _run_stats(x: torch.Tensor) -> torch.Tensor:
    if x.is_cuda:
        return batch_norm_kernels.compute_stats(lay_out(x, CHANNELS_LAST))
    variance, mean = torch.var_mean(x.float(), [0, *range(2, x.dim())], correction=0)
    return torch.stack([mean, variance])


def _run_act(
    x: torch.Tensor, residual: torch.Tensor | None, residual_stand_in: torch.Tensor | None, *parameters: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, mask = lay_out(x, CHANNELS_LAST), None
    if x.is_cuda:
        residual = None if residual is None else lay_out(residual, CHANNELS_LAST)
        z, mask = batch_norm_kernels.apply(x, residual, *parameters)
    else:
        z = _allocate(x).copy_(ACTIVATIONS[parameters[-1]](_compute_argument(x, residual, *parameters[:-1])))
    return z, x.new_empty(()).expand(z.shape), x.new_empty(0, dtype=torch.uint8) if mask is None else mask


def _compute_argument(
    x: torch.Tensor, residual: torch.Tensor | None, stats: torch.Tensor, weight: Any, bias: Any, eps: float
) -> torch.Tensor:
    """Return the argument of the activation in float32 by PyTorch."""
    mean, variance = (_view_channels(each, x, 0.0) for each in stats)
    u = (x.float() - mean) * torch.rsqrt(variance + eps)
    u = u * _view_channels(weight, x, 1.0) + _view_channels(bias, x, 0.0)
    return u if residual is None else u + residual.float()


def _run_backward(
    dz: torch.Tensor,
    second_dz: torch.Tensor | None,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    mask: torch.Tensor | None,
    *parameters: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    gradients = [lay_out(dz.to(x.dtype), CHANNELS_LAST)]
    if second_dz is not None:
        second_dz = second_dz.to(x.dtype) if second_dz.dtype is not x.dtype else second_dz
        gradients.append(_squeeze_expanded(second_dz) if x.is_cuda else second_dz)
    x, residual = lay_out(x, CHANNELS_LAST), None if residual is None else lay_out(residual, CHANNELS_LAST)
    if x.is_cuda:
        arguments: list[Any] = [gradients, x, residual, *parameters, mask]
        results = batch_norm_kernels.differentiate(*arguments)
    else:
        results = _differentiate_by_pytorch(gradients, x, residual, *parameters)
    dx, parameter_gradients, dresidual = results
    return dx, parameter_gradients, x.new_empty(0) if dresidual is None else dresidual


def _squeeze_expanded(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient channels last, or as a matrix (samples, channels) if all pixels have the same numbers."""
    if any(gradient.stride()[2:]) or gradient.dim() == 2:
        return lay_out(gradient, CHANNELS_LAST)
    return gradient.flatten(2).select(2, 0).contiguous()


def _differentiate_by_pytorch(
    gradients: Sequence[torch.Tensor],
    x: torch.Tensor,
    residual: torch.Tensor | None,
    stats: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    activation: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    dz = gradients[0].float() if len(gradients) == 1 else gradients[0].float() + gradients[1].float()
    gradient = ACTIVATION_GRADIENTS[activation](dz, _compute_argument(x, residual, stats, weight, bias, eps))
    mean, variance = (_view_channels(each, x, 0.0) for each in stats)
    reciprocal = torch.rsqrt(variance + eps)
    normalized, axes = (x.float() - mean) * reciprocal, [0, *range(2, x.dim())]
    sums = [(gradient * normalized).sum(axes), gradient.sum(axes)]
    count = x.numel() // x.shape[1]
    slope, offset = (_view_channels(each / count, x, 0.0) for each in sums)
    dx = (gradient - offset - normalized * slope) * reciprocal * _view_channels(weight, x, 1.0)
    dresidual = None if residual is None else _allocate(x).copy_(gradient)
    return _allocate(x).copy_(dx), torch.stack(sums), dresidual


def _run_mean(z: torch.Tensor, stand_in: torch.Tensor) -> torch.Tensor:
    return z.mean([*range(2, z.dim())], keepdim=True).contiguous()


def _make_fake_mean(z: torch.Tensor, stand_in: torch.Tensor) -> torch.Tensor:
    return z.new_empty((*z.shape[:2], *(1,) * (z.dim() - 2)))


def _make_fake_stats(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty((2, x.shape[1]), dtype=torch.float32)


def _make_fake_result(
    x: torch.Tensor, residual: Any, residual_stand_in: Any, *parameters: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    has_mask = x.is_cuda and batch_norm_kernels.can_mask(x, residual, parameters[-1])
    num_bytes = x.numel() // batch_norm_kernels.get_mask_elements(x) if has_mask else 0
    return _allocate(x), x.new_empty(()).expand(x.shape), x.new_empty(num_bytes, dtype=torch.uint8)


def _make_fake_gradients(
    dz: torch.Tensor, second_dz: Any, x: torch.Tensor, residual: Any, mask: Any, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    has_residual = residual is not None or mask is not None
    return _allocate(x), _make_fake_stats(x), _allocate(x) if has_residual else x.new_empty(0)


def _set_up(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
    x, residual, residual_stand_in, *parameters = inputs
    stats, weight, bias, ctx.eps, ctx.activation = parameters
    ctx.has_stand_in, ctx.has_residual = residual_stand_in is not None, residual is not None
    mask = output[2] if output[2].numel() else None
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(x, residual if mask is None else None, mask, stats, weight, bias)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dz: torch.Tensor | None, dz_of_stand_in: torch.Tensor | None, _: Any) -> tuple[Any, ...]:
    x, residual, mask, stats, weight, bias = ctx.saved_tensors
    gradients = [each for each in (dz, dz_of_stand_in) if each is not None]
    if not gradients:
        return (None,) * (3 + NUM_PARAMETERS)
    first, second = gradients if len(gradients) > 1 else (*gradients, None)
    dx, parameter_gradients, dresidual = batch_norm_act_backward(
        first, second, x, residual, mask, stats, weight, bias, ctx.eps, ctx.activation
    )
    of_residual = (None, dresidual) if ctx.has_stand_in else (dresidual if ctx.has_residual else None, None)
    dweight, dbias = (
        None if parameter is None else gradient.to(parameter.dtype)
        for parameter, gradient in zip((weight, bias), parameter_gradients.unbind(), strict=True)
    )
    return dx, *of_residual, None, dweight, dbias, None, None


def _set_up_mean(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
    ctx.shape = inputs[0].shape


def _differentiate_mean(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
    return None, (gradient / math.prod(ctx.shape[2:])).expand(ctx.shape)


batch_norm_stats = define_operator("batch_norm_stats(Tensor x) -> Tensor", cpu=_run_stats, fake=_make_fake_stats)
batch_norm_act = define_operator(
    f"batch_norm_act(Tensor x, Tensor? residual, Tensor? residual_stand_in, {PARAMETERS}) -> (Tensor, Tensor, Tensor)",
    cpu=_run_act,
    fake=_make_fake_result,
    backward=_differentiate,
    setup_context=_set_up,
)
batch_norm_act_backward = define_operator(
    f"batch_norm_act_backward(Tensor dz, Tensor? second_dz, Tensor x, Tensor? residual, Tensor? mask, {PARAMETERS})"
    " -> (Tensor, Tensor, Tensor)",
    cpu=_run_backward,
    fake=_make_fake_gradients,
)
mean_pixels = define_operator(
    "mean_pixels(Tensor z, Tensor stand_in) -> Tensor",
    cpu=_run_mean,
    fake=_make_fake_mean,
    backward=_differentiate_mean,
    setup_context=_set_up_mean,
)
