"""The tensor-expression declaration of `Conv2d`, apart from it so that parsing a workload does not import TVM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm import te, tirx

if TYPE_CHECKING:
    from tvmconv.workloads.conv2d import Conv2d


def declare(w: Conv2d) -> tuple[te.Tensor, te.Tensor, te.Tensor]:
    """Declare X, K and Y; `Conv2d.declare` tells the stages."""
    X = te.placeholder(w.input_shape, w.dtype, name="X")
    K = te.placeholder(w.weight_shape, w.dtype, name="K")
    return X, K, _dense(w, X, K) if w.groups == 1 else _grouped(w, X, K)


def _dense(w: Conv2d, X: te.Tensor, K: te.Tensor) -> te.Tensor:
    padded = te.compute(w.padded_shape, lambda n, c, i, j: _read_padded(w, X, n, c, i, j), name="padded")
    (sh, sw), (dh, dw) = w.stride, w.dilation
    rc, rh, rw = _reduce_axes(w)

    def convolve(n, o, p, q):
        return _sum_of_products(padded[n, rc, p * sh + rh * dh, q * sw + rw * dw], K[o, rc, rh, rw], (rc, rh, rw))

    if w.dtype == "float32":
        return te.compute(w.output_shape, convolve, name="Y")
    conv = te.compute(w.output_shape, convolve, name="conv")
    return te.compute(w.output_shape, lambda n, o, p, q: conv[n, o, p, q].astype(w.dtype), name="Y")


def _grouped(w: Conv2d, X: te.Tensor, K: te.Tensor) -> te.Tensor:
    N, C, height, width = w.padded_shape
    inputs, outputs = C // w.groups, w.O // w.groups  # channels of one group
    padded = te.compute(
        (N, w.groups, inputs, height, width),
        lambda n, g, c, i, j: _read_padded(w, X, n, g * inputs + c, i, j),
        name="padded",
    )
    weight = te.compute(
        (w.groups, outputs, inputs, w.R, w.S),
        lambda g, o, rc, rh, rw: K[g * outputs + o, rc, rh, rw],
        name="weight",
    )
    (sh, sw), (dh, dw) = w.stride, w.dilation
    rc, rh, rw = _reduce_axes(w)

    def convolve(n, g, o, p, q):
        x = padded[n, g, rc, p * sh + rh * dh, q * sw + rw * dw]
        return _sum_of_products(x, weight[g, o, rc, rh, rw], (rc, rh, rw))

    conv = te.compute((N, w.groups, outputs, w.P, w.Q), convolve, name="conv")
    return te.compute(
        w.output_shape,
        lambda n, o, p, q: conv[n, o // outputs, o % outputs, p, q].astype(w.dtype),
        name="Y",
    )


def _reduce_axes(w: Conv2d) -> tuple[te.IterVar, ...]:
    extents = w.weight_shape[1:]
    return tuple(te.reduce_axis((0, extent), name) for extent, name in zip(extents, ("rc", "rh", "rw"), strict=True))


def _read_padded(w: Conv2d, X: te.Tensor, n: tirx.Var, c: tirx.Expr, i: tirx.Var, j: tirx.Var) -> tirx.Expr:
    """X at row i and column j of the padded image, tested on those sides only that have padding."""
    top, left, bottom, right = w.padding
    sides = ((top, i >= top), (bottom, i < top + w.H), (left, j >= left), (right, j < left + w.W))
    tests = [test for padding, test in sides if padding]
    value = X[n, c, i - top, j - left]
    return te.if_then_else(te.all(*tests), value, tirx.const(0, w.dtype)) if tests else value


def _sum_of_products(x: tirx.Expr, k: tirx.Expr, axes: tuple[te.IterVar, ...]) -> tirx.Expr:
    """Sum x·k over the axes in float32: a float16 sum would lose digits with every tap."""
    return te.sum(x.astype("float32") * k.astype("float32"), axis=list(axes))
