"""Operations of Relax that compute the same channels first and channels last, and their channels-last form.

They stand between convolutions: activations, gates and residuals, reductions over the spatial axes, poolings, resized
images, paddings, slices, concatenations and splits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from tvm import relax, tirx
from tvm.ir import Call, GenericConst, Op

from tvmconv.relax.graph import BINARY_OPS, SPATIAL_AXES, UNARY_OPS, list_sizes, read_number
from tvmconv.relax.importers import PAD_OP

CAST_OP, MEAN_OP = "relax.astype", "relax.mean"
OTHER_POINTWISE_OPS = {
    *(f"relax.nn.{name}" for name in ("leakyrelu", "softplus", "selu")),
    *(f"relax.{name}" for name in ("clip", "abs", "sqrt", "rsqrt", "square", "log", "sin", "cos", "floor", "power")),
    *(f"relax.{name}" for name in ("where", "greater", "greater_equal", "less", "less_equal")),
}
POINTWISE_OPS = {*BINARY_OPS, *UNARY_OPS, *OTHER_POINTWISE_OPS, CAST_OP}
REDUCTION_OPS = {MEAN_OP, "relax.sum", "relax.max", "relax.min"}
POOL_OPS = {f"relax.nn.{kind}_pool{ndim}d": ndim for kind in ("max", "avg", "adaptive_avg") for ndim in (1, 2, 3)}
CONCAT_OP, SPLIT_OP, SLICE_OP = "relax.concat", "relax.split", "relax.strided_slice"
RESIZE_OP, TAKE_OP = "relax.image.resize2d", "relax.take"
PERMUTE_OP, RESHAPE_OP = "relax.permute_dims", "relax.reshape"

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
    if name in (SPLIT_OP, SLICE_OP, PAD_OP):
        return args[:1] if len(list_sizes(args[0]) or ()) >= 3 else []
    if name == TAKE_OP:  # TVM's importer pads with reflected pixels so
        return args[:1] if len(list_sizes(value) or ()) >= 3 and len(list_sizes(args[1]) or ()) == 1 else []
    if name == RESIZE_OP:
        return args[:1] if str(value.attrs.layout) == _channels_first(2) else []
    if name not in POINTWISE_OPS or (sizes := list_sizes(value)) is None or len(sizes) < 3:
        return []
    tensors = [arg for arg in args if isinstance(arg.ty, relax.TensorType) and list_sizes(arg) != ()]
    return tensors if all(_has_rank(tensor, len(sizes)) for tensor in tensors) else []


def _has_rank(tensor: relax.Expr, ndim: int) -> bool:
    """Return whether a tensor has a number of dimensions, or is a constant, which can get leading ones of size 1."""
    sizes = list_sizes(tensor)
    return sizes is not None and (len(sizes) == ndim or isinstance(tensor, GenericConst))


def make_channels_last(call: Call, read_tensor: ReadTensor) -> relax.Expr:
    """Return an operation that `list_layout_operands` accepts, for channels-last operands and a channels-last result.

    Args:
        call: Operation with channels-first operands.
        read_tensor: Function that returns the channels-last tensor of an operand.
    """
    name, operands = str(call.op.name), list_layout_operands(call)
    ndim = max(len(list_sizes(operand) or ()) for operand in operands)
    tensors = [read_tensor(_add_dimensions(operand, ndim)) for operand in operands]
    if name == CONCAT_OP:
        return relax.op.concat(tensors, axis=ndim - 1)
    if name == SPLIT_OP:
        sections = call.attrs.indices_or_sections
        sections = int(sections) if isinstance(sections, (int, tirx.IntImm)) else _list_numbers(sections)
        return relax.op.split(tensors[0], sections, _move_axis(call.attrs.axis, ndim))
    if name == SLICE_OP:
        axes = relax.Tuple([relax.prim_value(_move_axis(read_number(axis), ndim)) for axis in call.args[1]])
        return Call(call.op, [tensors[0], axes, *call.args[2:]], call.attrs)
    if name == TAKE_OP:
        return relax.op.take(tensors[0], call.args[1], _move_axis(call.attrs.axis, ndim), str(call.attrs.mode))
    if name == PAD_OP:
        return _make_pad(call, tensors[0])
    if name == RESIZE_OP:
        return _make_resize(call, tensors[0])
    if name in POOL_OPS:
        return _make_pool(call, tensors[0], POOL_OPS[name])
    if name in REDUCTION_OPS:
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


def find_shuffled(value: Any, bindings: Mapping[relax.Expr, Any]) -> tuple[relax.Expr, int] | None:
    """Return the tensor whose channels an expression shuffles, and the number of groups that become the inner axis of
    the channels; None for another expression.

    Args:
        value: Expression, a reshape of a permutation of a reshape.
        bindings: Values by their variables.
    """
    steps = [value]
    for name in (RESHAPE_OP, PERMUTE_OP):
        if getattr(getattr(steps[-1], "op", None), "name", "") != name:
            return None
        steps.append(bindings.get(steps[-1].args[0]))
    if getattr(getattr(steps[2], "op", None), "name", "") != RESHAPE_OP:
        return None
    x, axes = steps[2].args[0], steps[1].attrs.axes
    sizes, grouped, result = list_sizes(x) or (), list_sizes(steps[2]) or (), list_sizes(value)
    is_grouped = len(grouped) == len(sizes) + 1 >= 4 and grouped == (sizes[0], *grouped[1:3], *sizes[2:])
    if not is_grouped or result != sizes or axes is None:
        return None
    return (x, grouped[1]) if _list_numbers(axes) == [0, 2, 1, *range(3, len(grouped))] else None


def shuffle_channels_last(x: relax.Expr, groups: int, emit: Callable[[relax.Expr], relax.Expr]) -> relax.Expr:
    """Return a channels-last tensor with the channels shuffled as `find_shuffled` says."""
    sizes = list_sizes(x) or ()
    ndim = len(sizes)
    grouped = emit(relax.op.reshape(x, (*sizes[:-1], groups, sizes[-1] // groups)))
    return relax.op.reshape(emit(relax.op.permute_dims(grouped, [*range(ndim - 1), ndim, ndim - 1])), sizes)


def is_permutation(value: Any, *, to_last: bool) -> bool:
    """Return whether an expression moves the channels of a tensor from the second to the last axis, or back."""
    if getattr(getattr(value, "op", None), "name", "") != PERMUTE_OP or value.attrs.axes is None:
        return False
    axes = _list_numbers(value.attrs.axes)
    ndim = len(axes)
    expected = [0, *range(2, ndim), 1] if to_last else [0, ndim - 1, *range(1, ndim - 1)]
    return ndim >= 3 and [axis % ndim for axis in axes] == expected


def _add_dimensions(expr: relax.Expr, ndim: int) -> relax.Expr:
    """Return a constant with leading dimensions of size 1, such that it has `ndim`; other tensors as they are."""
    sizes = list_sizes(expr) or ()
    if not isinstance(expr, GenericConst) or len(sizes) == ndim:
        return expr
    return relax.const(expr.value.numpy().reshape((1,) * (ndim - len(sizes)) + sizes), str(expr.ty.dtype))


def _move_axis(axis: float, ndim: int) -> int:
    """Return the axis of a channels-last tensor that stands for an axis of a channels-first one."""
    axis = int(axis) % ndim
    return axis if axis == 0 else (axis - 2) % (ndim - 1) + 1


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


def _make_pad(call: Call, x: relax.Expr) -> relax.Expr:
    numbers, attrs = _list_numbers(call.attrs.pad_width), call.attrs
    pairs = [numbers[index : index + 2] for index in range(0, len(numbers), 2)]
    moved = [number for pair in (pairs[0], *pairs[2:], pairs[1]) for number in pair]
    return relax.op.nn.pad(x, moved, str(attrs.pad_mode), float(attrs.pad_value))


def _make_resize(call: Call, x: relax.Expr) -> relax.Expr:
    attrs = call.attrs
    return relax.op.image.resize2d(
        x,
        call.args[1],
        [float(number) for number in attrs.roi],
        "NHWC",
        str(attrs.method),
        str(attrs.coordinate_transformation_mode),
        str(attrs.rounding_method),
        float(attrs.cubic_alpha),
        int(attrs.cubic_exclude),
        float(attrs.extrapolation_value),
        str(call.ty.dtype),
    )


def _list_numbers(numbers: Sequence[Any]) -> list[int]:
    return [int(number) for number in numbers]
