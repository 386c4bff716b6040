"""Winograd convolution in tensor expressions: the stages of `winograd`.

With m × m outputs from α × α inputs, tiles of the whole batch indexed by p, and all sums in float32:

- `padded` and `weight` are views of the operands, as for other convolutions; `padded` has more zeros, for whole tiles.
- `g` (C, O, R, S) is the filters; `gG` is transformed along their rows, and `U` (α, α, C, O) along both axes: G g Gᵀ.
- `d` (C, tiles, α, α) is the inputs of each tile; `Bd` is transformed along its columns.
- `V` (α, α, C, tiles) is transformed along both axes: Bᵀ d B.
- `M` (α, α, O, tiles) is the products of `U` and `V`, summed over the input channels.
- `MA` (O, tiles, α, m) and `AMA` (O, tiles, m, m) are the outputs of each tile: Aᵀ M A.
- `sum` selects each output from its tile, and `Y` applies the epilogue.

Source: Lavin, Gray, "Fast Algorithms for Convolutional Neural Networks", 2015 (arXiv:1509.09308).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from fractions import Fraction

from tvm import te, tirx

from tvmconv.workloads import Conv2d
from tvmconv.workloads.conv_te import declare as declare_around
from tvmconv.workloads.conv_te import declare_padded, declare_weight
from tvmconv.workloads.dtypes import ACCUMULATOR

from .cook_toom import FractionMatrix, make_winograd_matrices
from .knobs import WinogradTileGrid


def declare_winograd(w: Conv2d, grid: WinogradTileGrid, num_channels: int, num_tiles: int) -> tuple[te.Tensor, ...]:
    """Declare the convolution by tiles.

    Channels and tiles may be padded; the additional ones have zero filters and inputs.
    """
    return declare_around(w, lambda X, K: declare_outputs(w, grid, num_channels, num_tiles, X, K))


def declare_outputs(
    w: Conv2d, grid: WinogradTileGrid, channels: int, tiles: int, X: te.Tensor, K: te.Tensor
) -> te.Tensor:
    """Declare the sums by tiles, from an input and filters in the layout of the convolution."""
    m, (A, B, G) = grid.m, make_winograd_matrices(grid.m, w.R)
    U, V = _declare_filters(w, grid, channels, transpose(G), K), _declare_inputs(w, grid, tiles, B, X)
    c = te.reduce_axis((0, w.C), "c")
    M = te.compute(
        (grid.alpha, grid.alpha, channels, tiles),
        lambda u, v, o, p: te.sum(U(u, v, c, o) * V(u, v, c, p), axis=c),
        name="M",
    )
    MA = te.compute(
        (w.O, grid.count, grid.alpha, m),
        lambda o, p, i, v: multiply_row_by_matrix(lambda j: M(i, j, o, p), A, v),
        name="MA",
    )
    AMA = te.compute(
        (w.O, grid.count, m, m), lambda o, p, u, v: multiply_row_by_matrix(lambda i: MA(o, p, i, v), A, u), name="AMA"
    )

    def pick_output(n: tirx.Var, g: tirx.Var, o: tirx.Var, p: tirx.Var, q: tirx.Var) -> tirx.Expr:
        tile = (n * grid.rows + p // m) * grid.columns + q // m
        return AMA(o, tile, p % m, q % m)

    return te.compute((w.N, 1, w.O, *w.output_size), pick_output, name="sum", varargs_names=["n", "g", "o", "p", "q"])


def _declare_filters(w: Conv2d, grid: WinogradTileGrid, channels: int, G: FractionMatrix, K: te.Tensor) -> te.Tensor:
    """Declare the transformed filters, `U`."""
    filters = declare_weight(w, K)
    g = te.compute(
        (w.C, channels, w.R, w.S),
        lambda c, o, r, s: _zero_beyond(o, w.O, filters(0, o, c, r, s).astype(ACCUMULATOR)),
        name="g",
    )
    gG = te.compute(
        (w.C, channels, w.R, grid.alpha),
        lambda c, o, r, v: multiply_row_by_matrix(lambda s: g(c, o, r, s), G, v),
        name="gG",
    )
    shape = (grid.alpha, grid.alpha, w.C, channels)
    return te.compute(shape, lambda u, v, c, o: multiply_row_by_matrix(lambda r: gG(c, o, r, v), G, u), name="U")


def _declare_inputs(w: Conv2d, grid: WinogradTileGrid, tiles: int, B: FractionMatrix, X: te.Tensor) -> te.Tensor:
    """Declare the transformed inputs, `V`."""
    m, alpha = grid.m, grid.alpha
    top, left, bottom, right = w.padding
    extra_sizes = grid.rows * m - w.P, grid.columns * m - w.Q
    images = declare_padded(
        dataclasses.replace(w, padding=(top, left, bottom + extra_sizes[0], right + extra_sizes[1])), X
    )

    def read_input(c: tirx.Var, p: tirx.Var, i: tirx.Var, j: tirx.Var) -> tirx.Expr:
        image, top, left = grid.tile_origin(p)
        return _zero_beyond(p, grid.count, images(image, 0, c, top + i, left + j).astype(ACCUMULATOR))

    shape = (w.C, tiles, alpha, alpha)
    d = te.compute(shape, read_input, name="d")
    Bd = te.compute(shape, lambda c, p, u, j: multiply_row_by_matrix(lambda i: d(c, p, i, j), B, u), name="Bd")
    return te.compute(
        (alpha, alpha, w.C, tiles), lambda u, v, c, p: multiply_row_by_matrix(lambda j: Bd(c, p, u, j), B, v), name="V"
    )


def _zero_beyond(index: tirx.Var, num_valid: int, value: tirx.Expr) -> tirx.Expr:
    """Return the value, or zero if the index is not below `num_valid`."""
    return te.if_then_else(index < num_valid, value, tirx.const(0.0, ACCUMULATOR))


def multiply_row_by_matrix(
    get_element: Callable[[int], tirx.Expr], matrix: FractionMatrix, column: tirx.Expr
) -> tirx.Expr:
    """Return an element of a vector times a constant matrix, written out so that zeros and ones cost nothing.

    If the loop over `column` is unrolled, only one of the sums remains.
    """
    column_sums = [weighted_sum(get_element, weights) for weights in transpose(matrix)]
    selected = column_sums[-1]
    for i, candidate in enumerate(column_sums[:-1]):
        selected = tirx.Select(column == i, candidate, selected)
    return selected


def weighted_sum(get_element: Callable[[int], tirx.Expr], weights: Sequence[Fraction]) -> tirx.Expr:
    """Return the weighted sum of a vector's elements; an element of weight 1, if any, comes first."""
    first_index, *other_indices = sorted(
        (i for i, weight in enumerate(weights) if weight), key=lambda i: (weights[i] != 1, i)
    )
    total = (
        get_element(first_index)
        if weights[first_index] == 1
        else _make_constant(weights[first_index]) * get_element(first_index)
    )
    for i in other_indices:
        if abs(weights[i]) == 1:
            total = total + get_element(i) if weights[i] > 0 else total - get_element(i)
        else:
            total = total + _make_constant(weights[i]) * get_element(i)
    return total


def _make_constant(value: Fraction) -> tirx.Expr:
    return tirx.const(float(value), ACCUMULATOR)


def transpose(matrix: FractionMatrix) -> FractionMatrix:
    """Return the transposed matrix."""
    return tuple(zip(*matrix, strict=True))
