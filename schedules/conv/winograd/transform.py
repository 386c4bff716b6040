"""Winograd transforms in registers, matrixᵀ · X · matrix, of the kernels that are emitted as TIR."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from tvmconv.workloads.dtypes import ACCUMULATOR

from ...tir_builder import Expr, allocate, store
from .cook_toom import FractionMatrix
from .te_stages import transpose, weighted_sum

ReadColumn = Callable[[int], Sequence[Sequence[Expr]]]  # from a column of X to its elements: (row, channel)


def transform_both_axes(
    matrix: FractionMatrix, read_column: ReadColumn, num_channels: int = 1
) -> Iterator[tuple[tuple[int, int], list[Expr]]]:
    """Yield the position and the channels of each element of matrixᵀ · X · matrix, row by row.

    X is read one column at a time, so that few of its elements are in registers at once.
    """
    columns, size = transpose(matrix), len(matrix)
    half = allocate("half", len(columns) * size * num_channels, ACCUMULATOR)
    for j in range(size):
        column = read_column(j)
        for u, weights in enumerate(columns):
            for e in range(num_channels):
                value = weighted_sum([channels[e] for channels in column].__getitem__, weights)
                store(half, (u * size + j) * num_channels + e, value)
    for u in range(len(columns)):
        rows = [[half[(u * size + j) * num_channels + e] for j in range(size)] for e in range(num_channels)]
        for v, weights in enumerate(columns):
            yield (u, v), [weighted_sum(row.__getitem__, weights) for row in rows]
