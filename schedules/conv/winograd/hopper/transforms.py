"""The transforms of `winograd_hopper`: each thread has one tile, or one filter, and some neighbouring channels.

In memory channels come last, as in the operands: `V` is (tiles, α², C), `U` (α², O, C) and `M` (tiles, α², O).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.arithmetic import ceil_div
from tvmconv.workloads import Conv2d, epilogue
from tvmconv.workloads.dtypes import TF32, numpy_dtype

from ....program import (
    Buffer,
    Expr,
    allocate,
    both,
    load_global,
    pack,
    parallel,
    ptx,
    store,
    store_global,
    unpack,
    when,
)
from ...tensor_cores.outputs import finish
from ..cook_toom import Matrix
from ..plan import Grid
from ..stages import transposed, weighted

THREADS = 128  # of a block
DROPPED_BITS = 13  # of a float32, of which TF32 has 10 bits of mantissa


def transform_filters(w: Conv2d, grid: Grid, G: Matrix, K: Buffer, U: Buffer) -> None:
    """Emit the kernel of U = G g Gᵀ.

    Args:
        w: the workload.
        grid: of its tiles.
        G: the matrix, (α, r).
        K: the filters.
        U: the transformed ones.
    """
    vector = 2 if w.C % 2 == 0 else 1
    across = w.C // vector
    with _each(w.O * across, overlaps=False) as index:
        o, c = index // across, index % across * vector
        transform = _Transform(w, (w.R, w.R), vector)
        for r in range(w.R):
            for s in range(w.S):
                transform.load(K, (r, s), ((o * w.R + r) * w.S + s) * w.C + c, True)
        for place, value in transform.apply(transposed(G)):
            u, v = place
            _keep(w, U, ((u * grid.alpha + v) * w.O + o) * w.C + c, value, vector)


def transform_inputs(w: Conv2d, grid: Grid, B: Matrix, vector: int, X: Buffer, V: Buffer) -> None:
    """Emit the kernel of V = Bᵀ d B, with zeros around the images and beyond them.

    Args:
        w: the workload.
        grid: of its tiles.
        B: the matrix, (α, α).
        vector: neighbouring channels of a thread.
        X: the images.
        V: the transformed ones.
    """
    across, (top, left) = w.C // vector, w.before
    with _each(grid.count * across) as index:
        tile, c = index // across, index % across * vector
        image, row, column = grid.place(tile)
        transform = _Transform(w, (grid.alpha, grid.alpha), vector)
        for i in range(grid.alpha):
            for j in range(grid.alpha):
                y, x = row + i - top, column + j - left
                inside = both(y >= 0, y < w.H, x >= 0, x < w.W)
                transform.load(X, (i, j), ((image * w.H + y) * w.W + x) * w.C + c, inside)
        for (u, v), value in transform.apply(B):
            _keep(w, V, (tile * grid.alpha**2 + u * grid.alpha + v) * w.C + c, value, vector)


def transform_outputs(w: Conv2d, grid: Grid, A: Matrix, vector: int, arguments: dict[str, Buffer], M: Buffer) -> None:
    """Emit the kernel of Y = Aᵀ M A and the epilogue.

    Args:
        w: the workload.
        grid: of its tiles.
        A: the matrix, (α, m).
        vector: neighbouring channels of a thread.
        arguments: by name.
        M: the products.
    """
    across, (rows, columns) = w.O // vector, w.out
    words = allocate("finished", 8, "uint32")
    with _each(grid.count * across) as index:
        tile, o = index // across, index % across * vector
        image, row, column = grid.place(tile)
        transform = _Transform(w, (grid.alpha, grid.alpha), vector)
        for i in range(grid.alpha):
            for j in range(grid.alpha):
                transform.load(M, (i, j), (tile * grid.alpha**2 + i * grid.alpha + j) * w.O + o, True)
        for (u, v), value in transform.apply(A):
            p, q = row + u, column + v
            inside = both(True if rows % grid.m == 0 else p < rows, True if columns % grid.m == 0 else q < columns)
            with when(inside):
                m = (image * rows + p) * columns + q
                finish(w, arguments, epilogue.steps(w.epilogue), m, o, vector, value, words)
                store_global(arguments["Y"], m * w.O + o, words, vector)


@contextmanager
def _each(count: int, *, overlaps: bool = True) -> Iterator[Expr]:
    """A kernel with a thread for each of so many; it may begin while the launch before it ends, for which it waits."""
    with parallel(ceil_div(count, THREADS), "blockIdx.x") as block, parallel(THREADS, "threadIdx.x") as thread:
        if overlaps:
            ptx("griddepcontrol.wait")
            ptx("griddepcontrol.launch_dependents")
        index = block * THREADS + thread
        with when(True if count % THREADS == 0 else index < count):
            yield index


class _Transform:
    """The matrices of a thread's channels, which are loaded, and transformed along both axes.

    Args:
        w: the workload.
        shape: of each of them.
        vector: channels.
    """

    def __init__(self, w: Conv2d, shape: tuple[int, int], vector: int) -> None:
        self._w, self._shape, self._vector = w, shape, vector
        rows, columns = shape
        self._each = max(1, vector * numpy_dtype(w.storage).itemsize // 4)  # words of an element's channels
        self._words = [[allocate(f"in_{i}_{j}", self._each, "uint32") for j in range(columns)] for i in range(rows)]

    def load(self, source: Buffer, place: tuple[int, int], index: Expr, holds: Expr) -> None:
        """Load an element where something holds, and else have zeros."""
        i, j = place
        words = self._words[i][j]
        if holds is not True:
            for e in range(self._each):
                store(words, e, T.uint32(0))
        with when(holds):
            load_global(words, source, index, self._vector, constant=False)

    def apply(self, matrix: Matrix) -> Iterator[tuple[tuple[int, int], Buffer]]:
        """Matrixᵀ · what was loaded · matrix: each element, one after the other, with the channels in an array.

        The array is the same for all; whoever takes an element may change it.
        """
        (rows, columns), vector, weights = self._shape, self._vector, transposed(matrix)
        size = len(weights)
        along_rows = allocate("along_rows", size * columns * vector, "float32")
        for j in range(columns):
            channels = [unpack(self._words[i][j], vector, self._w.storage) for i in range(rows)]
            for u in range(size):
                for e in range(vector):
                    column = [each[e] for each in channels]
                    store(along_rows, (u * columns + j) * vector + e, weighted(column.__getitem__, weights[u]))
        value = allocate("value", max(2, vector), "float32")
        for u in range(size):
            for v in range(size):
                for e in range(vector):
                    row = [along_rows[(u * columns + j) * vector + e] for j in range(columns)]
                    store(value, e, weighted(row.__getitem__, weights[v]))
                yield (u, v), value


def _keep(w: Conv2d, to: Buffer, index: Expr, value: Buffer, vector: int) -> None:
    """Round a thread's channels to what is multiplied, and store them."""
    words = allocate("rounded", 8, "uint32")
    pack(words, 0, [value[e] for e in range(vector)], w.storage)
    if w.dtype == TF32.name:  # the tensor cores cut the rest off
        for e in range(vector):
            half, kept = T.uint32(1 << DROPPED_BITS - 1), T.uint32(2**32 - 2**DROPPED_BITS)
            store(words, e, (words[e] + half) & kept)
    store_global(to, index, words, vector)
