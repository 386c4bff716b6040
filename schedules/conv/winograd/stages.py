"""A convolution by minimal filtering in tensor expressions: the stages of `winograd`.

With m × m outputs from α × α inputs, the tiles of the whole batch numbered by p and all sums in float32:

- `padded`, `weight`: views of the operands, as in every declaration; `padded` has more zeros, for whole tiles.
- `g` (C, O, R, S): the filters; `gG` the same, transformed along their rows, and `U` (α, α, C, O) along both: G g Gᵀ.
- `d` (C, tiles, α, α): the inputs of each tile; `Bd` the same, transformed along its columns.
- `V` (α, α, C, tiles): transformed along both: Bᵀ d B.
- `M` (α, α, O, tiles): the products of `U` and `V`, summed over the input channels.
- `MA` (O, tiles, α, m) and `AMA` (O, tiles, m, m): the outputs of each tile: Aᵀ M A.
- `sum`, which picks each output from its tile, and `Y`, its epilogue.

Source: Lavin, Gray, "Fast Algorithms for Convolutional Neural Networks", 2015 (arXiv:1509.09308).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from fractions import Fraction

from tvm import te, tirx

from tvmconv.workloads import Conv2d
from tvmconv.workloads.declaration import declare as declare_around
from tvmconv.workloads.declaration import padded, weight
from tvmconv.workloads.dtypes import ACCUMULATOR

from .cook_toom import Matrix, transforms
from .plan import Grid


def declare(w: Conv2d, grid: Grid, channels: int, tiles: int) -> tuple[te.Tensor, ...]:
    """The convolution by tiles.

    Args:
        w: the workload.
        grid: of its tiles.
        channels: at least its output channels: those beyond have filters of zeros.
        tiles: at least so many as it has: those beyond have inputs of zeros.

    Returns:
        A tensor for each argument of the workload.
    """
    return declare_around(w, lambda X, K: _outputs(w, grid, channels, tiles, X, K))


def _outputs(w: Conv2d, grid: Grid, channels: int, tiles: int, X: te.Tensor, K: te.Tensor) -> te.Tensor:
    """The sums, by tiles."""
    m, (A, B, G) = grid.m, transforms(grid.m, w.R)
    U, V = _filters(w, grid, channels, transposed(G), K), _inputs(w, grid, tiles, B, X)
    c = te.reduce_axis((0, w.C), "c")
    M = te.compute(
        (grid.alpha, grid.alpha, channels, tiles),
        lambda u, v, o, p: te.sum(U(u, v, c, o) * V(u, v, c, p), axis=c),
        name="M",
    )
    MA = te.compute(
        (w.O, grid.count, grid.alpha, m), lambda o, p, i, v: times(lambda j: M(i, j, o, p), A, v), name="MA"
    )
    AMA = te.compute((w.O, grid.count, m, m), lambda o, p, u, v: times(lambda i: MA(o, p, i, v), A, u), name="AMA")

    def pick(n: tirx.Var, g: tirx.Var, o: tirx.Var, p: tirx.Var, q: tirx.Var) -> tirx.Expr:
        tile = (n * grid.rows + p // m) * grid.columns + q // m
        return AMA(o, tile, p % m, q % m)

    return te.compute((w.N, 1, w.O, *w.out), pick, name="sum", varargs_names=["n", "g", "o", "p", "q"])


def _filters(w: Conv2d, grid: Grid, channels: int, G: Matrix, K: te.Tensor) -> te.Tensor:
    """The transformed filters, `U`."""
    filters = weight(w, K)
    g = te.compute(
        (w.C, channels, w.R, w.S),
        lambda c, o, r, s: _or_zero(o, w.O, filters(0, o, c, r, s).astype(ACCUMULATOR)),
        name="g",
    )
    gG = te.compute(
        (w.C, channels, w.R, grid.alpha), lambda c, o, r, v: times(lambda s: g(c, o, r, s), G, v), name="gG"
    )
    shape = (grid.alpha, grid.alpha, w.C, channels)
    return te.compute(shape, lambda u, v, c, o: times(lambda r: gG(c, o, r, v), G, u), name="U")


def _inputs(w: Conv2d, grid: Grid, tiles: int, B: Matrix, X: te.Tensor) -> te.Tensor:
    """The transformed inputs, `V`."""
    m, alpha = grid.m, grid.alpha
    top, left, bottom, right = w.padding
    more = grid.rows * m - w.P, grid.columns * m - w.Q
    images = padded(dataclasses.replace(w, padding=(top, left, bottom + more[0], right + more[1])), X)

    def read(c: tirx.Var, p: tirx.Var, i: tirx.Var, j: tirx.Var) -> tirx.Expr:
        image, top, left = grid.place(p)
        return _or_zero(p, grid.count, images(image, 0, c, top + i, left + j).astype(ACCUMULATOR))

    shape = (w.C, tiles, alpha, alpha)
    d = te.compute(shape, read, name="d")
    Bd = te.compute(shape, lambda c, p, u, j: times(lambda i: d(c, p, i, j), B, u), name="Bd")
    return te.compute((alpha, alpha, w.C, tiles), lambda u, v, c, p: times(lambda j: Bd(c, p, u, j), B, v), name="V")


def _or_zero(index: tirx.Var, count: int, value: tirx.Expr) -> tirx.Expr:
    """Zero from an index on."""
    return te.if_then_else(index < count, value, tirx.const(0.0, ACCUMULATOR))


def times(vector: Callable[[int], tirx.Expr], matrix: Matrix, column: tirx.Expr) -> tirx.Expr:
    """An element of a vector times a matrix: the matrix is written out, as zeros and ones cost nothing then.

    Where the loop over `column` is unrolled, one of the sums is left.
    """
    sums = [weighted(vector, weights) for weights in transposed(matrix)]
    chosen = sums[-1]
    for i, each in enumerate(sums[:-1]):
        chosen = tirx.Select(column == i, each, chosen)
    return chosen


def weighted(vector: Callable[[int], tirx.Expr], weights: Sequence[Fraction]) -> tirx.Expr:
    """The sum of a vector's elements, weighted; one that has weight 1 comes first, if there is one."""
    first, *others = sorted((i for i, weight in enumerate(weights) if weight), key=lambda i: (weights[i] != 1, i))
    total = vector(first) if weights[first] == 1 else _constant(weights[first]) * vector(first)
    for i in others:
        if abs(weights[i]) == 1:
            total = total + vector(i) if weights[i] > 0 else total - vector(i)
        else:
            total = total + _constant(weights[i]) * vector(i)
    return total


def _constant(value: Fraction) -> tirx.Expr:
    return tirx.const(float(value), ACCUMULATOR)


def transposed(matrix: Matrix) -> Matrix:
    """Its columns as rows."""
    return tuple(zip(*matrix, strict=True))
