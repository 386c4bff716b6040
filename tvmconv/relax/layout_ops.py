"""Operations of Relax that compute the same channels first and channels last, and their channels-last form.

They stand between convolutions: activations, gates and residuals, reductions over the space, poolings, concatenations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tvm import relax
from tvm.ir import Call, GenericConst, Op

from tvmconv.relax.graph import BINARY_OPS, SPATIAL_AXES, UNARY_OPS, list_sizes

CAST_OP, MEAN_OP = "relax.astype", "relax.mean"
POINTWISE_OPS = {*BINARY_OPS, *UNARY_OPS, "relax.nn.leakyrelu", "relax.clip", CAST_OP}
REDUCTION_OPS = {MEAN_OP, "relax.sum", "relax.max", "relax.min"}
POOL_OPS = {f"relax.nn.{kind}_pool{ndim}d": ndim for kind in ("max", "avg", "adaptive_avg") for ndim in (1, 2, 3)}
CONCAT_OP = "relax.concat"

ReadTensor = Callable[[relax.Expr], relax.Expr]


def list_layout_operands(value: Any) -> list[relax.Expr]:
    """Return the operands whose layout is that of the result; none for an operation that depends on the layout."""
    if not isinstance(value, Call) or not isinstance(value.op, Op):
        return []
    name, args = str(value.op.name), list(value.args)
    if name == CONCAT_OP:
        items = list(args[0].fields) if isinstance(args[0], relax.Tuple) else []
        return items if value.attrs.axis is not None and int(value.attrs.axis) == 1 else []
    if name in POOL_OPS:
        return args[:1] if str(value.attrs.layout) == _channels_first(POOL_OPS[name]) else []
    if name in REDUCTION_OPS:
        return args[:1] if bool(value.attrs.keepdims) and _reduces_space(value) else []
    if name not in POINTWISE_OPS or (sizes := list_sizes(value)) is None or len(sizes) < 3:
        return []
    tensors = [arg for arg in args if list_sizes(arg) not in (None, ())]
    return tensors if all(len(list_sizes(tensor) or ()) == len(sizes) for tensor in tensors) else []


def make_channels_last(call: Call, read_tensor: ReadTensor) -> relax.Expr:
    """Return an operation that `list_layout_operands` accepts, for channels-last operands and a channels-last result.

    Args:
        call: Operation with channels-first operands.
        read_tensor: Function that returns the channels-last tensor of an operand.
    """
    name, operands = str(call.op.name), list_layout_operands(call)
    tensors = [read_tensor(operand) for operand in operands]
    if name == CONCAT_OP:
        return relax.op.concat(tensors, axis=len(list_sizes(call) or ()) - 1)
    if name in POOL_OPS:
        return _make_pool(call, tensors[0], POOL_OPS[name])
    if name in REDUCTION_OPS:
        ndim = len(list_sizes(call) or ())
        return getattr(relax.op, name.removeprefix("relax."))(tensors[0], axis=list(range(1, ndim - 1)), keepdims=True)
    replaced = dict(zip(operands, tensors, strict=True))
    return Call(call.op, [replaced.get(arg, arg) for arg in call.args], call.attrs)


def permute(expr: relax.Expr, *, to_last: bool) -> relax.Expr:
    """Return a tensor channels last, or back; a tensor without space is reshaped, which moves nothing."""
    sizes = list_sizes(expr)
    ndim = len(sizes) if sizes is not None else int(expr.ty.ndim)
    axes = [0, *range(2, ndim), 1] if to_last else [0, ndim - 1, *range(1, ndim - 1)]
    if isinstance(expr, GenericConst):
        return relax.const(np.ascontiguousarray(expr.value.numpy().transpose(axes)), str(expr.ty.dtype))
    if sizes is not None and sum(size != 1 for size in sizes[1:]) <= 1:
        return relax.op.reshape(expr, [sizes[axis] for axis in axes])
    return relax.op.permute_dims(expr, axes)


def _channels_first(spatial_ndim: int) -> str:
    return f"NC{SPATIAL_AXES[spatial_ndim]}"


def _reduces_space(call: Call) -> bool:
    sizes = list_sizes(call)
    if sizes is None or len(sizes) < 3 or call.attrs.axis is None:
        return False
    return {int(axis) % len(sizes) for axis in call.attrs.axis} == set(range(2, len(sizes)))


def _make_pool(call: Call, x: relax.Expr, spatial_ndim: int) -> relax.Expr:
    name, attrs, layout = str(call.op.name).rpartition(".")[2], call.attrs, f"N{SPATIAL_AXES[spatial_ndim]}C"
    make = getattr(relax.op.nn, name)
    if name.startswith("adaptive"):
        output_size = None if attrs.output_size is None else _list_numbers(attrs.output_size)
        return make(x, output_size, layout=layout, out_layout=layout)
    numbers = map(_list_numbers, (attrs.pool_size, attrs.strides, attrs.padding, attrs.dilation))
    return make(x, *numbers, bool(attrs.ceil_mode), bool(attrs.count_include_pad), layout=layout, out_layout=layout)


def _list_numbers(numbers: Sequence[Any]) -> list[int]:
    return [int(number) for number in numbers]
