"""The matrices of minimal filtering compute the filter: as an identity of rationals."""

import itertools
from fractions import Fraction

import pytest
from tvmconv.builtin.conv.winograd.cook_toom import make_winograd_matrices

SIZES = [(m, r) for m in range(2, 7) for r in range(3, 8) if m + r - 2 <= 11]


@pytest.mark.parametrize(("m", "r"), SIZES)
def test_outputs_are_the_sums_of_the_filter_exactly(m, r):
    """Output j is the sum over k of input j + k times tap k, and of nothing else: for each input, output and tap."""
    A, B, G = make_winograd_matrices(m, r)
    alpha = m + r - 1
    for i, j, k in itertools.product(range(alpha), range(m), range(r)):
        weight = sum(A[e][j] * G[e][k] * B[i][e] for e in range(alpha))
        assert weight == (i == j + k), (i, j, k)


def test_matrices_are_exact_in_float32_up_to_tiles_of_four():
    for m in (2, 4):
        A, B, _ = make_winograd_matrices(m, 3)
        assert all(Fraction(float(value)) == value for matrix in (A, B) for row in matrix for value in row)
