"""Tensor-expression declarations of filters, kept apart so that parsing a workload does not import TVM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import te, tirx

from tvmconv.workloads import epilogue


def declare(w: Any) -> tuple[te.Tensor, te.Tensor, te.Tensor]:
    """Declare X, K and Y; `Filter.declare` describes the stages."""
    X = te.placeholder(w.signal_shape, w.storage, name="X")
    K = te.placeholder(w.mask_shape, w.storage, name="K")
    num_mask_axes = len(w.mask_shape)  # the mask slides along these axes; the axes after them are channels
    radius = w.radius[-num_mask_axes:]
    padded = te.compute(w.padded_shape, lambda *indices: _read_padded(X, radius, indices), name="padded")

    def read_tap(indices: tuple[tirx.Var, ...], tap_indices: tuple[tirx.Var, ...]) -> tirx.Expr:
        shifted = (*(i + j for i, j in zip(indices, tap_indices, strict=False)), *indices[num_mask_axes:])
        return padded[shifted]

    return X, K, declare_correlation(w, K, read_tap)


def declare_correlation(
    w: Any, K: te.Tensor, read: Callable[[tuple[tirx.Var, ...], tuple[tirx.Var, ...]], tirx.Expr]
) -> te.Tensor:
    """Declare `sum` and Y, and return Y; `read` maps an index of Y and one of K to the input element of that tap."""
    names = ("r", "s")[-len(w.mask_shape) :]
    axes = tuple(te.reduce_axis((0, size), name) for size, name in zip(w.mask_shape, names, strict=True))
    taps = tuple(axis.var for axis in axes)
    sum_tensor = te.compute(
        w.signal_shape, lambda *indices: te.sum(read(indices, taps) * K[taps], axis=list(axes)), name="sum"
    )
    return te.compute(w.signal_shape, lambda *indices: apply_epilogue(w, sum_tensor[indices]), name="Y")


def apply_epilogue(w: Any, value: tirx.Expr) -> tirx.Expr:
    """Return a sum with the filter's epilogue, whose operations read no arguments."""
    for op in epilogue.get_ops(w.epilogue):
        value = op.compute(value)
    return value


def _read_padded(X: te.Tensor, radius: tuple[int, ...], indices: tuple[tirx.Var, ...]) -> tirx.Expr:
    """Return X at a position of its halo; only axes that have a halo are tested."""
    shifted = (*(i - r for i, r in zip(indices, radius, strict=False)), *indices[len(radius) :])
    tests = [te.all(i >= r, i < r + n) for i, r, n in zip(indices, radius, X.shape, strict=False) if r]
    return te.if_then_else(te.all(*tests), X[shifted], tirx.const(0.0, X.dtype)) if tests else X[shifted]
