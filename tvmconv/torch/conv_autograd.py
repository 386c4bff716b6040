"""The convolution of the kernel table as an autograd function, for calls outside of compiled graphs.

It computes what the operators of `conv_operators.py` compute. An autograd function and direct calls cost the host a
fraction of the time of an operator with registered gradients, which matters where a step is not a CUDA graph.
"""

from __future__ import annotations

from typing import Any

import torch

from tvmconv.torch.conv_call import ConvCall
from tvmconv.torch.conv_operators import (
    convolution,
    convolution_dgrad,
    convolution_stats,
    convolution_wgrad,
    run_dgrad,
    run_forward,
    run_forward_with_stats,
    run_wgrad,
)
from tvmconv.torch.kernel_table import TableEntry
from tvmconv.torch.normalization import attach_stats


class ConvFunction(torch.autograd.Function):
    """A convolution whose gradients are computed by the kernel table, or by operators where they need gradients.

    PyTorch binds the arguments of functions with `setup_context` at each call, which takes 25 µs. This class lacks it,
    so that transforms of `torch.func` need another function. The operators do not support them with gradients either.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, call: ConvCall
    ) -> torch.Tensor:
        """Compute the output from tensors in the dtype of the call, and keep what the needed gradients read."""
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        ctx.call, ctx.bias_dtype = call, None if bias is None else bias.dtype
        return run_forward(call, x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        """Compute the needed gradients."""
        call, (x, weight) = ctx.call, ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        needs_bias = ctx.bias_dtype is not None and ctx.needs_input_grad[2]
        dx = dk = None
        # Gradients of the gradients may be needed, or a transform such as `vmap` wraps a gradient, which has no memory.
        if torch.is_grad_enabled() or not torch._C._has_storage(dy):
            options = list_options(call)
            dx = convolution_dgrad(dy, weight, call.x_shape, *options) if needs_x else None
            dk = convolution_wgrad(dy, x, call.weight_shape, *options) if needs_weight else None
        else:
            dx = run_dgrad(call, dy, weight) if needs_x else None
            dk = run_wgrad(call, dy, x) if needs_weight else None
        bias_gradient = dy.sum([0, *range(2, dy.dim())], dtype=ctx.bias_dtype) if needs_bias else None
        return dx, dk, bias_gradient, None


class ConvStatsFunction(torch.autograd.Function):
    """A convolution by a kernel that also returns the statistics of its output, which have no gradients."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, call: ConvCall, entry: TableEntry
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the output and its statistics, and keep what the needed gradients read."""
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        ctx.call, ctx.bias_dtype = call, None
        y, stats = run_forward_with_stats(call, entry, x, weight)
        ctx.mark_non_differentiable(stats)
        return y, stats

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor, _: Any) -> tuple[Any, ...]:
        """Compute the needed gradients."""
        return *ConvFunction.backward(ctx, dy)[:2], None, None


def list_options(call: ConvCall) -> tuple[Any, ...]:
    """Return the options of an operator."""
    return (
        *(call.stride, call.padding, call.dilation, call.groups),
        *(call.transposed, call.output_padding, call.channels_last),
    )


def run_operator(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, call: ConvCall) -> torch.Tensor:
    """Compute a call by the operator of `torch.library`, in the dtype of the call."""
    return convolution(x.to(call.dtype), weight.to(call.dtype), bias, *list_options(call))


def run_operator_with_stats(x: torch.Tensor, weight: torch.Tensor, call: ConvCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute a call and the statistics of its output by the operator of `torch.library`."""
    y, stats = convolution_stats(x.to(call.dtype), weight.to(call.dtype), *list_options(call))
    return y, stats


def run_call(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, call: ConvCall) -> torch.Tensor:
    """Compute a call outside of compiled graphs, in its dtype and with gradients."""
    x, weight = x.to(call.dtype), weight.to(call.dtype)
    if torch.is_grad_enabled():
        return ConvFunction.apply(x, weight, bias, call)
    return run_forward(call, x, weight, bias)


def run_call_with_stats(x: torch.Tensor, weight: torch.Tensor, call: ConvCall, entry: TableEntry) -> torch.Tensor:
    """Compute a call by a kernel that returns statistics, which are attached to the output."""
    x, weight = x.to(call.dtype), weight.to(call.dtype)
    if torch.is_grad_enabled():
        return attach_stats(*ConvStatsFunction.apply(x, weight, call, entry))
    return attach_stats(*run_forward_with_stats(call, entry, x, weight))
