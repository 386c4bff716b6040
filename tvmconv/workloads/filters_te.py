"""The tensor-expression declaration of filters, apart from them so that parsing a workload does not import TVM."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tvm import te, tirx

from tvmconv.workloads import epilogue

if TYPE_CHECKING:
    from tvmconv.workloads.filter_geometry import FilterGeometry


def declare(w: FilterGeometry) -> tuple[te.Tensor, te.Tensor, te.Tensor]:
    """Declare X, K and Y; `Filter.declare` tells the stages."""
    X = te.placeholder(w.signal_shape, w.storage, name="X")
    K = te.placeholder(w.mask_shape, w.storage, name="K")
    taps = len(w.mask_shape)  # the axes that the mask slides along; what is behind them are channels
    radius = w.radius[-taps:]
    padded = te.compute(w.padded_shape, lambda *at: _read_padded(X, radius, at), name="padded")

    def read(at: tuple[tirx.Var, ...], tap: tuple[tirx.Var, ...]) -> tirx.Expr:
        moved = (*(i + j for i, j in zip(at, tap, strict=False)), *at[taps:])
        return padded[moved]

    return X, K, correlation(w, K, read)


def correlation(
    w: FilterGeometry, K: te.Tensor, read: Callable[[tuple[tirx.Var, ...], tuple[tirx.Var, ...]], tirx.Expr]
) -> te.Tensor:
    """Y, and `sum` before it.

    Args:
        w: the workload.
        K: the mask.
        read: `f(at, tap)`, what the tap with an index of K is multiplied by for the output with an index of Y.
    """
    names = ("r", "s")[-len(w.mask_shape) :]
    axes = tuple(te.reduce_axis((0, size), name) for size, name in zip(w.mask_shape, names, strict=True))
    taps = tuple(axis.var for axis in axes)
    total = te.compute(w.signal_shape, lambda *at: te.sum(read(at, taps) * K[taps], axis=list(axes)), name="sum")
    return te.compute(w.signal_shape, lambda *at: finished(w, total[at]), name="Y")


def finished(w: FilterGeometry, value: tirx.Expr) -> tirx.Expr:
    """A sum with the filter's epilogue, whose operations have no arguments."""

    def read(name: str) -> tirx.Expr:
        raise ValueError(f"{name} is no argument of {w.operator}")

    return epilogue.compute(w.epilogue, value, read)


def _read_padded(X: te.Tensor, radius: tuple[int, ...], at: tuple[tirx.Var, ...]) -> tirx.Expr:
    """X at a place among its ghost cells, tested along those axes only that have any."""
    moved = (*(i - r for i, r in zip(at, radius, strict=False)), *at[len(radius) :])
    tests = [te.all(i >= r, i < r + n) for i, r, n in zip(at, radius, X.shape, strict=False) if r]
    return te.if_then_else(te.all(*tests), X[moved], tirx.const(0.0, X.dtype)) if tests else X[moved]
