"""Matrices of minimal filtering F(m, r) by the Cook-Toom algorithm, in exact rationals.

m outputs of a filter of r taps depend on α = m + r - 1 inputs. The product of polynomials of degrees m - 1 and r - 1
follows from its values at α - 1 points and at infinity. The transposed algorithm computes the m outputs with α
multiplications instead of m·r; it is applied to rows and columns.

Sources: Winograd, *Arithmetic Complexity of Computations*, 1980; Lavin, Gray, "Fast Algorithms for Convolutional Neural
Networks", 2015 (arXiv:1509.09308), with the same A, B and G; for the points: Barabasz, Anderson, Soodhalter, Gregg,
"Error Analysis and Improving the Accuracy of Winograd Convolution for Deep Neural Networks", 2018 (arXiv:1803.10986).
"""

from __future__ import annotations

import functools
import math
from fractions import Fraction
from typing import NamedTuple

import numpy as np

FractionMatrix = tuple[tuple[Fraction, ...], ...]

_HALF, _QUARTER = Fraction(1, 2), Fraction(1, 4)
# The points of TVM's templates; F(m, r) uses the first α - 1 of them. With six and more points, pairs of negatives and
# reciprocals have the smallest errors.
INTERPOLATION_POINTS = {
    **dict.fromkeys(range(3, 7), (0, -1, 1, _HALF, -2, -_HALF)),
    **dict.fromkeys(range(7, 11), (0, -1, 1, _HALF, -_HALF, 2, -2, -_QUARTER, 4, Fraction(3, 4))),
    11: (0, -1, 1, _HALF, -_HALF, 2, -2, -_QUARTER, 4, Fraction(3, 4), Fraction(-4, 3)),
}


class WinogradMatrices(NamedTuple):
    """Matrices of F(m, r): for inputs d (α) and a filter g (r), the outputs are Aᵀ ((G g) · (Bᵀ d))."""

    A: FractionMatrix  # output transform (α, m)
    B: FractionMatrix  # input transform (α, α)
    G: FractionMatrix  # filter transform (α, r)


@functools.cache
def make_winograd_matrices(m: int, r: int, points: tuple[Fraction, ...] | None = None) -> WinogradMatrices:
    """Return the matrices for m outputs of a filter of r taps."""
    alpha = m + r - 1
    fractions = [Fraction(point) for point in points or INTERPOLATION_POINTS[alpha - 1][: alpha - 1]]
    scales = [math.prod((a - b for b in fractions if b != a), start=Fraction(1)) for a in fractions]
    zero_row = [Fraction(0)]
    return WinogradMatrices(
        A=(*(_list_powers(a, m) for a in fractions), (*zero_row * (m - 1), Fraction(1))),
        B=_transpose(
            [
                *([*_polynomial_from_roots([b for b in fractions if b != a]), *zero_row] for a in fractions),
                _polynomial_from_roots(fractions),
            ]
        ),
        G=(
            *(tuple(x / scale for x in _list_powers(a, r)) for a, scale in zip(fractions, scales, strict=True)),
            (*zero_row * (r - 1), Fraction(1)),
        ),
    )


def compute_error_growth(matrices: WinogradMatrices) -> float:
    """Return the factor by which rounding errors of the products grow in the outputs, relatively and along each axis.

    The factor is the root of Σ A²·|B|²·|G|² / r: what the transforms enlarge must cancel in the end.
    """
    A, B, G = (np.array(matrix, np.float64) ** 2 for matrix in matrices)
    return float((A * (B.sum(axis=0) * G.sum(axis=1))[:, None]).sum(axis=0).mean() / G.shape[1])


def _list_powers(point: Fraction, num_powers: int) -> tuple[Fraction, ...]:
    return tuple(point**i for i in range(num_powers))


def _polynomial_from_roots(polynomial_roots: list[Fraction]) -> list[Fraction]:
    """Return the coefficients, constant first, of the monic polynomial with these roots."""
    polynomial = [Fraction(1)]
    for root in polynomial_roots:
        shifted, scaled = [Fraction(0), *polynomial], [*(-root * c for c in polynomial), Fraction(0)]
        polynomial = [a + b for a, b in zip(shifted, scaled, strict=True)]
    return polynomial


def _transpose(rows: list[list[Fraction]]) -> FractionMatrix:
    return tuple(zip(*rows, strict=True))
