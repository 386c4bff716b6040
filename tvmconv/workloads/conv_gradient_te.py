"""Tensor-expression declarations of gradients and transposed convolutions, with the stages of convolutions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm import te, tirx

from tvmconv.workloads import epilogue
from tvmconv.workloads.conv_te import INPUT_AXES, OUTPUT_AXES, TAP_AXES, IndexExprs, declare_products
from tvmconv.workloads.dtypes import ACCUMULATOR
from tvmconv.workloads.layout import to_storage_order

if TYPE_CHECKING:
    from collections.abc import Callable

    from tvmconv.workloads.conv import Conv
    from tvmconv.workloads.conv_operator import ConvOperator
    from tvmconv.workloads.conv_te import SumDeclaration


def declare_input_gradient(
    w: ConvOperator, forward: Conv, conv: Conv, borders: tuple[int, ...]
) -> tuple[te.Tensor, ...]:
    """Declare dX, or the output of a transposed convolution, from its arguments.

    Args:
        w: The operator.
        forward: The forward convolution.
        conv: The convolution whose stages the declaration has.
        borders: Zeros before dY along each axis.
    """
    arguments = _declare_arguments(w)
    dY, K = (arguments[name] for name in w.OPERANDS)
    in_channels, out_channels = forward.O // forward.groups, forward.C // forward.groups
    taps = forward.kernel

    def read_gradient(n: tirx.Var, g: tirx.Var, c: tirx.Var, *position: tirx.Var) -> tirx.Expr:
        indices, tests = [], []
        for axis, i in enumerate(position):
            border, stride, size = borders[axis], forward.stride[axis], forward.output_size[axis]
            offset = i - border
            last = (size - 1) * stride
            tests += [offset >= 0] * (border > 0) + [offset <= last] * (conv.input_size[axis] - 1 - border > last)
            if stride > 1:
                tests.append(tirx.floormod(offset, stride) == 0)
            indices.append(tirx.floordiv(offset, stride) if stride > 1 else offset)
        value = dY(*to_storage_order(w.layout, (n, g * in_channels + c, *indices)))
        return te.if_then_else(te.all(*tests), value, tirx.const(0, w.storage)) if tests else value

    def read_weight(g: tirx.Var, o: tirx.Var, c: tirx.Var, *tap: tirx.Var) -> tirx.Expr:
        flipped = [size - 1 - r for size, r in zip(taps, tap, strict=True)]
        return K(*to_storage_order(w.layout, (g * in_channels + c, o, *flipped)))

    total = _declare_sum(conv, read_gradient, read_weight)

    def to_sum_index(n: tirx.Expr, channel: tirx.Expr, *position: tirx.Expr) -> IndexExprs:
        return n, channel // out_channels, channel % out_channels, *position

    return _declare_result(w, arguments, total, to_sum_index, ("n", "o", *OUTPUT_AXES[w.spatial_ndim]))


def declare_direct_convolution(w: ConvOperator, conv: Conv, convolve: SumDeclaration) -> tuple[te.Tensor, ...]:
    """Declare dX of stride 1 from its arguments as a convolution of dY, with other stages than `padded` and `weight`.

    Args:
        w: The operator, of one group.
        conv: The convolution of dY.
        convolve: Function from dY and the filters, K with flipped taps and exchanged channels, to the sums.
    """
    arguments = _declare_arguments(w)
    dY, K = (arguments[name] for name in w.OPERANDS)
    order = to_storage_order(w.layout, [*range(2 + w.spatial_ndim)])

    def read_weight(*indices: tirx.Var) -> tirx.Expr:
        channel_out, channel_in, *tap = (indices[order.index(axis)] for axis in range(len(order)))
        flipped = [size - 1 - r for size, r in zip(conv.kernel, tap, strict=True)]
        return K(*to_storage_order(w.layout, (channel_in, channel_out, *flipped)))

    total = convolve(dY, te.compute(conv.argument_shapes[1], read_weight, name="filters"))

    def to_sum_index(n: tirx.Expr, channel: tirx.Expr, *position: tirx.Expr) -> IndexExprs:
        return n, 0, channel, *position

    return _declare_result(w, arguments, total, to_sum_index, ("n", "o", *OUTPUT_AXES[w.spatial_ndim]))


def declare_weight_gradient(w: ConvOperator, forward: Conv, conv: Conv) -> tuple[te.Tensor, ...]:
    """Declare dK from its arguments; `forward` and `conv` are those of `declare_input_gradient`."""
    arguments = _declare_arguments(w)
    dY, X = (arguments[name] for name in w.OPERANDS)
    in_channels, filters = forward.C // forward.groups, forward.O // forward.groups

    def read_input(c: tirx.Var, g: tirx.Var, n: tirx.Var, *position: tirx.Var) -> tirx.Expr:
        tests, axes = [], zip(position, forward.pad_low, forward.input_size, conv.input_size, strict=True)
        for i, low, size, padded in axes:
            tests += [i >= low] * (low > 0) + [i < low + size] * (padded > low + size)
        unpadded = (i - low for i, low in zip(position, forward.pad_low, strict=True))
        value = X(*to_storage_order(w.layout, (n, g * in_channels + c, *unpadded)))
        return te.if_then_else(te.all(*tests), value, tirx.const(0, w.storage)) if tests else value

    def read_gradient(g: tirx.Var, o: tirx.Var, n: tirx.Var, *position: tirx.Var) -> tirx.Expr:
        return dY(*to_storage_order(w.layout, (n, g * filters + o, *position)))

    total = _declare_sum(conv, read_input, read_gradient)

    def to_sum_index(o: tirx.Expr, c: tirx.Expr, *tap: tirx.Expr) -> IndexExprs:
        return c, o // filters, o % filters, *tap

    return _declare_result(w, arguments, total, to_sum_index, ("o", "c", *OUTPUT_AXES[w.spatial_ndim]))


def declare_weight_gradient_by_tiles(
    w: ConvOperator, declare_sums: Callable[[te.Tensor, te.Tensor], te.Tensor]
) -> tuple[te.Tensor, ...]:
    """Declare dK of one group from its arguments; `declare_sums` returns its sums (O, C, taps) from dY and X."""
    arguments = _declare_arguments(w)
    total = declare_sums(*(arguments[name] for name in w.OPERANDS))
    return _declare_result(w, arguments, total, lambda *index: index, ("o", "c", *OUTPUT_AXES[w.spatial_ndim]))


def _declare_arguments(w: ConvOperator) -> dict[str, te.Tensor]:
    arguments = zip(w.argument_names[:-1], w.argument_shapes, w.argument_dtypes, strict=False)
    return {name: te.placeholder(shape, dtype, name=name) for name, shape, dtype in arguments}


def _declare_sum(conv: Conv, read_padded: Callable[..., tirx.Expr], read_weight: Callable[..., tirx.Expr]) -> te.Tensor:
    """Declare `padded`, `weight` and `sum` of the convolution that an operator is declared as."""
    axes = conv.spatial_ndim
    padded = te.compute(
        (conv.N, conv.groups, conv.C // conv.groups, *conv.input_size),
        lambda *indices: read_padded(*indices),
        name="padded",
        varargs_names=["n", "g", "c", *INPUT_AXES[axes]],
    )
    weight = te.compute(
        (conv.groups, conv.O // conv.groups, *conv.weight_shape[1:]),
        lambda *indices: read_weight(*indices),
        name="weight",
        varargs_names=["g", "o", "rc", *TAP_AXES[axes]],
    )
    return declare_products(conv, padded, weight)


def _declare_result(
    w: ConvOperator,
    arguments: dict[str, te.Tensor],
    total: te.Tensor,
    to_sum_index: Callable[..., IndexExprs],
    axes: tuple[str, ...],
) -> tuple[te.Tensor, ...]:
    """Declare the result from the sums; `axes` are its axes as (first, channel, space)."""
    dtype = w.argument_dtypes[-1]
    order = to_storage_order(w.layout, [*range(len(axes))])

    def compute_result(*indices: tirx.Var) -> tirx.Expr:
        first, channel, *space = (indices[order.index(axis)] for axis in range(len(axes)))

        def read_argument(name: str) -> tirx.Expr:
            tensor = arguments[name]
            return tensor(*indices if len(tensor.shape) > 1 else (channel,)).astype(ACCUMULATOR)

        value = total(*to_sum_index(first, channel, *space))
        return epilogue.apply_to_expression(w.epilogue, value, read_argument).astype(dtype)

    result = te.compute(
        w.argument_shapes[-1],
        compute_result,
        name=w.RESULT,
        varargs_names=list(to_storage_order(w.layout, axes)),
    )
    return (*arguments.values(), result)
