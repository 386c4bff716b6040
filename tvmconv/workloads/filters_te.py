"""The tensor-expression declaration of filters, apart from them so that parsing a workload does not import TVM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm import te, tirx

if TYPE_CHECKING:
    from tvmconv.workloads.filters import Filter


def declare(w: Filter) -> tuple[te.Tensor, te.Tensor, te.Tensor]:
    """Declare X, K and Y; `Filter.declare` tells the stages."""
    X = te.placeholder(w.signal_shape, w.dtype, name="X")
    K = te.placeholder(w.mask_shape, w.dtype, name="K")
    taps = len(w.mask_shape)  # the axes that the mask slides along; what is behind them are channels
    radius = [size // 2 for size in w.mask_shape]
    padded_shape = [n + 2 * r for n, r in zip(w.signal_shape, radius, strict=False)] + [*w.signal_shape[taps:]]
    padded = te.compute(padded_shape, lambda *at: _read_padded(X, radius, at), name="padded")
    axes = [te.reduce_axis((0, size), name) for size, name in zip(w.mask_shape, ("r", "s")[-taps:], strict=True)]

    def correlate(*at: tirx.Var) -> tirx.PrimExpr:
        moved = (*(i + axis for i, axis in zip(at, axes, strict=False)), *at[taps:])
        return te.sum(padded[moved] * K[tuple(axes)], axis=axes)

    if not w.clamp:
        return X, K, te.compute(w.signal_shape, correlate, name="Y")
    filtered = te.compute(w.signal_shape, correlate, name="filtered")
    return X, K, te.compute(w.signal_shape, lambda *at: clamped(filtered[at]), name="Y")


def clamped(value: tirx.PrimExpr) -> tirx.PrimExpr:
    """The value limited to 0 to 1."""
    return te.min(te.max(value, tirx.const(0.0, "float32")), tirx.const(1.0, "float32"))


def _read_padded(X: te.Tensor, radius: list[int], at: tuple[tirx.Var, ...]) -> tirx.PrimExpr:
    """X at a place among its ghost cells, tested along those axes only that have any."""
    moved = (*(i - r for i, r in zip(at, radius, strict=False)), *at[len(radius) :])
    tests = [te.all(i >= r, i < r + n) for i, r, n in zip(at, radius, X.shape, strict=False) if r]
    return te.if_then_else(te.all(*tests), X[moved], tirx.const(0.0, X.dtype)) if tests else X[moved]
