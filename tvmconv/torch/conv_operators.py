"""Operators for training: `tvmconv::convolution`, `tvmconv::convolution_dgrad` and `tvmconv::convolution_wgrad`.

Each operator looks its call up in the kernel table and runs the kernel there, or else PyTorch's. The gradients of the
three operators are the three operators themselves, as each of them is linear in both of its operands:

| operator | gradient of the first operand | gradient of the second operand |
| --- | --- | --- |
| convolution of x and weight | dgrad of dy and weight | wgrad of dy and x |
| dgrad of dy and weight | convolution of g and weight | wgrad of dy and g |
| wgrad of dy and x | convolution of x and g | dgrad of dy and g |

These are PyTorch's own formulas of the second derivative (`_convolution_double_backward` in its
ATen/native/Convolution.cpp).

Padding has the zeros before all axes and then those after all axes, as in workloads. All results have the layout that
`channels_last` names, whatever computes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional

from tvmconv.torch.conv_call import (
    DGRAD,
    FORWARD,
    FORWARD_BIAS,
    FORWARD_STATS,
    STATS_IN_GRAPHS,
    WGRAD,
    ConvCall,
    compute_output_shape,
)
from tvmconv.torch.kernel_table import TableEntry, table
from tvmconv.torch.layer import is_tf32_allowed
from tvmconv.torch.operator_library import define_operator
from tvmconv.torch.tensor_layout import allocate_like, is_in_layout, name_layout

OPTIONS = (
    "int[] stride, int[] padding, int[] dilation, int groups, bool transposed, int[] output_padding, bool channels_last"
)
NUM_OPTIONS = 7  # stride, padding, dilation, groups, transposed, output_padding and channels_last


def make_call(
    x_shape: Sequence[int],
    weight_shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    transposed: bool,
    output_padding: Sequence[int],
    channels_last: bool,
) -> ConvCall:
    """Return the call with these properties, in the present setting of TF32."""
    uses_tf32 = dtype is torch.float32 and device.type == "cuda" and is_tf32_allowed()
    options = tuple(stride), tuple(padding), tuple(dilation), groups, transposed, tuple(output_padding)
    return ConvCall(tuple(x_shape), tuple(weight_shape), *options, dtype, uses_tf32, channels_last, device)


def convolve_by_pytorch(
    call: ConvCall, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Compute a convolution by PyTorch."""
    padding, sides = _split_padding(call.padding)
    if sides is not None:
        x = functional.pad(x, sides)
    if bias is not None and bias.dtype is not x.dtype:
        bias = bias.to(x.dtype)
    options = call.stride, padding, call.dilation, call.transposed, call.output_padding, call.groups
    return torch.convolution(x, weight, bias, *options)


def compute_dgrad_by_pytorch(call: ConvCall, dy: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute the gradient of a convolution's input by PyTorch, which reads only the shape and strides of an input."""
    padding, sides = _split_padding(call.padding)
    x_shape, interior = list(call.x_shape), [slice(None), slice(None)]
    if sides is not None:
        ndim = len(padding)
        x_shape[2:] = map(sum, zip(x_shape[2:], call.padding[:ndim], call.padding[ndim:], strict=True))
        interior += [slice(low, low + n) for low, n in zip(call.padding, call.x_shape[2:], strict=False)]
    x = allocate_like(dy, call.layout, x_shape)
    gradient = _call_backward(call, dy, x, weight, padding, [True, False, False])[0]
    return gradient if sides is None else gradient[tuple(interior)]


def compute_wgrad_by_pytorch(call: ConvCall, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Compute the gradient of a convolution's weight by PyTorch, which reads only the shape and strides of a weight."""
    padding, sides = _split_padding(call.padding)
    if sides is not None:
        x = functional.pad(x, sides)
    weight = allocate_like(dy, call.layout, call.weight_shape)
    return _call_backward(call, dy, x, weight, padding, [False, True, False])[1]


def _call_backward(
    call: ConvCall, dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, padding: Sequence[int], mask: list[bool]
) -> Any:
    options = call.stride, padding, call.dilation, call.transposed, call.output_padding, call.groups
    return torch.ops.aten.convolution_backward(dy, x, weight, None, *options, mask)


def _split_padding(padding: Sequence[int]) -> tuple[tuple[int, ...], list[int] | None]:
    """Return the padding that PyTorch's convolutions take, and the sides to pad by `functional.pad`.

    There are no such sides if both sides of each axis have the same padding.
    """
    ndim = len(padding) // 2
    low, high = tuple(padding[:ndim]), tuple(padding[ndim:])
    if low == high:
        return low, None
    return (0,) * ndim, [side for pair in zip(reversed(low), reversed(high), strict=True) for side in pair]


def _finish(result: torch.Tensor, call: ConvCall) -> torch.Tensor:
    """Return a result in the layout of the call, as a copy if necessary.

    It must not be a view, because modules such as an activation in place may write to it.
    """
    if is_in_layout(result.shape, result.stride(), call.layout) and result._base is None:
        return result
    return allocate_like(result, call.layout).copy_(result)


def run_forward(call: ConvCall, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Compute a convolution by the kernel in the table, or by PyTorch."""
    entry = table.find(FORWARD if bias is None else FORWARD_BIAS, call)
    if entry is None:
        return _finish(convolve_by_pytorch(call, x, weight, bias), call)
    return run_entry(FORWARD, call, entry, x, weight, bias)


def run_forward_with_stats(
    call: ConvCall, entry: TableEntry, x: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute a convolution by a kernel that also returns mean and variance of each output channel (2, channels)."""
    stats = torch.empty(2, call.weight_shape[0], dtype=torch.float32, device=x.device)
    return entry.run(FORWARD_STATS, x, weight, None, stats), stats


def run_stats(call: ConvCall, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute a convolution and the statistics of its output by the kernel for compiled graphs, or by PyTorch."""
    entry = table.find(STATS_IN_GRAPHS, call)
    if entry is not None:
        return run_forward_with_stats(call, entry, x, weight)
    y = run_forward(call, x, weight, None)
    variance, mean = torch.var_mean(y.float(), [0, *range(2, y.dim())], correction=0)
    return y, torch.stack([mean, variance])


def run_with_stats(
    product: str,
    call: ConvCall,
    entry: TableEntry,
    first: torch.Tensor,
    second: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute a product as `run_entry` does, and return statistics of the output, if it is a product with them."""
    if product == FORWARD_STATS:
        return run_forward_with_stats(call, entry, first, second)
    return run_entry(product, call, entry, first, second, bias), None


def run_dgrad(call: ConvCall, dy: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute the gradient of a convolution's input by the kernel in the table, or by PyTorch."""
    entry = table.find(DGRAD, call)
    if entry is None:
        return _finish(compute_dgrad_by_pytorch(call, dy, weight), call)
    return run_entry(DGRAD, call, entry, dy, weight)


def run_wgrad(call: ConvCall, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Compute the gradient of a convolution's weight by the kernel in the table, or by PyTorch."""
    entry = table.find(WGRAD, call)
    if entry is None:
        return _finish(compute_wgrad_by_pytorch(call, dy, x), call)
    return run_entry(WGRAD, call, entry, dy, x)


def run_entry(
    product: str,
    call: ConvCall,
    entry: TableEntry,
    first: torch.Tensor,
    second: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute a product by a kernel of tvmconv, from operands in the order of PyTorch's operator."""
    if product == WGRAD and call.transposed:
        # The workload is the wgrad of the convolution from O to C channels, whose dY is x and whose X is dy.
        first, second = second, first
    if bias is not None:
        bias = bias.to(torch.float32).contiguous()
    return entry.run(product, first, second, bias)


def _run_convolution(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *options: Any) -> torch.Tensor:
    return run_forward(make_call(x.shape, weight.shape, x.dtype, x.device, *options), x, weight, bias)


def _run_stats(x: torch.Tensor, weight: torch.Tensor, *options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return run_stats(make_call(x.shape, weight.shape, x.dtype, x.device, *options), x, weight)


def _run_dgrad(dy: torch.Tensor, weight: torch.Tensor, x_size: Sequence[int], *options: Any) -> torch.Tensor:
    return run_dgrad(make_call(x_size, weight.shape, dy.dtype, dy.device, *options), dy, weight)


def _run_wgrad(dy: torch.Tensor, x: torch.Tensor, weight_size: Sequence[int], *options: Any) -> torch.Tensor:
    return run_wgrad(make_call(x.shape, weight_size, dy.dtype, dy.device, *options), dy, x)


def _make_fake_output(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *options: Any) -> torch.Tensor:
    stride, padding, dilation, groups, transposed, output_padding, channels_last = options
    shape = compute_output_shape(x.shape, weight.shape, stride, padding, dilation, groups, transposed, output_padding)
    return allocate_like(x, name_layout(channels_last), shape)


def _make_fake_stats(x: torch.Tensor, weight: torch.Tensor, *options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    y = _make_fake_output(x, weight, None, *options)
    return y, x.new_empty(2, y.shape[1], dtype=torch.float32)


def _make_fake_gradient(dy: torch.Tensor, operand: torch.Tensor, size: Sequence[int], *options: Any) -> torch.Tensor:
    return allocate_like(dy, name_layout(options[-1]), size)


def _set_up_convolution(ctx: Any, inputs: Sequence[Any], output: torch.Tensor) -> None:
    x, weight, bias, *ctx.options = inputs
    needs_x, needs_weight = ctx.needs_input_grad[:2]
    ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
    ctx.x_size, ctx.weight_size = x.shape, weight.shape
    ctx.bias_dtype = None if bias is None else bias.dtype


def _differentiate_convolution(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    dx = convolution_dgrad(dy, weight, ctx.x_size, *ctx.options) if needs_x else None
    dk = convolution_wgrad(dy, x, ctx.weight_size, *ctx.options) if needs_weight else None
    bias_gradient = dy.sum([0, *range(2, dy.dim())], dtype=ctx.bias_dtype) if needs_bias else None
    return dx, dk, bias_gradient, *(None,) * NUM_OPTIONS


def _set_up_stats(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
    x, weight, *options = inputs
    _set_up_convolution(ctx, (x, weight, None, *options), output)
    ctx.set_materialize_grads(False)  # that of the statistics would be zeros, made by a kernel


def _differentiate_stats(ctx: Any, dy: torch.Tensor | None, _: Any) -> tuple[Any, ...]:
    """Compute the gradients; a batch normalization's own gradient has the derivatives of the statistics."""
    if dy is None:
        return (None,) * (2 + NUM_OPTIONS)
    x, weight = ctx.saved_tensors
    needs_x, needs_weight = ctx.needs_input_grad[:2]
    dx = convolution_dgrad(dy, weight, ctx.x_size, *ctx.options) if needs_x else None
    dk = convolution_wgrad(dy, x, ctx.weight_size, *ctx.options) if needs_weight else None
    return dx, dk, *(None,) * NUM_OPTIONS


def _set_up_gradient(ctx: Any, inputs: Sequence[Any], output: torch.Tensor) -> None:
    dy, operand, ctx.size, *ctx.options = inputs
    needs_dy, needs_operand = ctx.needs_input_grad[:2]
    ctx.save_for_backward(dy if needs_operand else None, operand if needs_dy else None)
    ctx.operand_size = operand.shape


def _differentiate_dgrad(ctx: Any, g: torch.Tensor) -> tuple[Any, ...]:
    dy, weight = ctx.saved_tensors
    needs_dy, needs_weight = ctx.needs_input_grad[:2]
    gradient_of_dy = convolution(g, weight, None, *ctx.options) if needs_dy else None
    gradient_of_weight = convolution_wgrad(dy, g, ctx.operand_size, *ctx.options) if needs_weight else None
    return gradient_of_dy, gradient_of_weight, *(None,) * (1 + NUM_OPTIONS)


def _differentiate_wgrad(ctx: Any, g: torch.Tensor) -> tuple[Any, ...]:
    dy, x = ctx.saved_tensors
    needs_dy, needs_x = ctx.needs_input_grad[:2]
    gradient_of_dy = convolution(x, g, None, *ctx.options) if needs_dy else None
    gradient_of_x = convolution_dgrad(dy, g, ctx.operand_size, *ctx.options) if needs_x else None
    return gradient_of_dy, gradient_of_x, *(None,) * (1 + NUM_OPTIONS)


def _map_convolution(info: Any, in_dims: Sequence[Any], *arguments: Any) -> tuple[torch.Tensor, int]:
    """Compute a convolution of several inputs with one weight as one convolution of a larger batch."""
    x, weight, bias, *options = arguments
    if in_dims[0] is None or in_dims[1] is not None or in_dims[2] is not None:
        return _map_by_loop(convolution, info.batch_size, in_dims, arguments)
    x = x.movedim(in_dims[0], 0)
    y = convolution(x.flatten(0, 1), weight, bias, *options)
    return y.unflatten(0, x.shape[:2]), 0


def _map_dgrad(info: Any, in_dims: Sequence[Any], *arguments: Any) -> tuple[torch.Tensor, int]:
    """Compute the dgrad of several outputs with one weight as one dgrad of a larger batch."""
    dy, weight, x_size, *options = arguments
    if in_dims[0] is None or in_dims[1] is not None:
        return _map_by_loop(convolution_dgrad, info.batch_size, in_dims, arguments)
    dy = dy.movedim(in_dims[0], 0)
    size = (dy.shape[0] * x_size[0], *x_size[1:])
    dx = convolution_dgrad(dy.flatten(0, 1), weight, size, *options)
    return dx.unflatten(0, (dy.shape[0], x_size[0])), 0


def _map_wgrad(info: Any, in_dims: Sequence[Any], *arguments: Any) -> tuple[torch.Tensor, int]:
    """Compute the wgrad of each pair of tensors on its own, as its results are not summed."""
    return _map_by_loop(convolution_wgrad, info.batch_size, in_dims, arguments)


def _map_stats(info: Any, in_dims: Sequence[Any], *arguments: Any) -> tuple[tuple[torch.Tensor, ...], tuple[int, int]]:
    """Compute each convolution on its own, as the statistics are those of one output."""
    arguments_of_each = _select_each(info.batch_size, in_dims, arguments)
    results = [convolution_stats(*arguments_of_one) for arguments_of_one in arguments_of_each]
    return tuple(torch.stack(tensors) for tensors in zip(*results, strict=True)), (0, 0)


def _map_by_loop(
    function: Any, batch_size: int, in_dims: Sequence[Any], arguments: Sequence[Any]
) -> tuple[torch.Tensor, int]:
    results = [function(*arguments_of_one) for arguments_of_one in _select_each(batch_size, in_dims, arguments)]
    return torch.stack(results), 0


def _select_each(batch_size: int, in_dims: Sequence[Any], arguments: Sequence[Any]) -> Iterator[list[Any]]:
    """Yield the arguments of each element of a batch."""
    for index in range(batch_size):
        yield [
            argument.select(dim, index) if isinstance(dim, int) else argument
            for argument, dim in zip(arguments, in_dims, strict=True)
        ]


convolution = define_operator(
    f"convolution(Tensor x, Tensor weight, Tensor? bias, {OPTIONS}) -> Tensor",
    cpu=_run_convolution,
    fake=_make_fake_output,
    backward=_differentiate_convolution,
    setup_context=_set_up_convolution,
    vmap=_map_convolution,
)
convolution_stats = define_operator(
    f"convolution_stats(Tensor x, Tensor weight, {OPTIONS}) -> (Tensor, Tensor)",
    cpu=_run_stats,
    fake=_make_fake_stats,
    backward=_differentiate_stats,
    setup_context=_set_up_stats,
    vmap=_map_stats,
)
convolution_dgrad = define_operator(
    f"convolution_dgrad(Tensor dy, Tensor weight, SymInt[] x_size, {OPTIONS}) -> Tensor",
    cpu=_run_dgrad,
    fake=_make_fake_gradient,
    backward=_differentiate_dgrad,
    setup_context=_set_up_gradient,
    vmap=_map_dgrad,
)
convolution_wgrad = define_operator(
    f"convolution_wgrad(Tensor dy, Tensor x, SymInt[] weight_size, {OPTIONS}) -> Tensor",
    cpu=_run_wgrad,
    fake=_make_fake_gradient,
    backward=_differentiate_wgrad,
    setup_context=_set_up_gradient,
    vmap=_map_wgrad,
)
