"""Transform kernels of `winograd_hopper`: each thread transforms some neighbouring channels of one tile or filter.

Channels are last in memory, as in the operands: `V` is (tiles, α², C), `U` (α², O, C) and `M` (tiles, α², O).
"""

from __future__ import annotations

from collections.abc import Iterator

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.workloads import Conv2d
from tvmconv.workloads.dtypes import TF32, get_itemsize

from ....tir_builder import (
    Buffer,
    Expr,
    allocate,
    if_,
    load_global,
    logical_and,
    pack,
    store,
    store_global,
    thread_per_item,
    unpack,
)
from ...tensor_cores.gemm.epilogue_ops import EpilogueOps, apply_to_vector
from ..cook_toom import FractionMatrix
from ..knobs import WinogradTileGrid
from ..te_stages import transpose, weighted_sum

TRANSFORM_THREADS = 128  # threads per block
TF32_DROPPED_BITS = 13  # low bits of a float32 mantissa that TF32, with 10 bits, drops


def transform_filters(w: Conv2d, grid: WinogradTileGrid, G: FractionMatrix, K: Buffer, U: Buffer) -> None:
    """Emit the kernel of U = G g Gᵀ.

    Args:
        w: The workload.
        grid: Grid of output tiles.
        G: Filter transform (α, r).
        K: The filters.
        U: The transformed filters.
    """
    vector = 2 if w.C % 2 == 0 else 1
    vectors_per_filter = w.C // vector
    with thread_per_item(w.O * vectors_per_filter, TRANSFORM_THREADS) as index:
        channel_out, channel_in = index // vectors_per_filter, index % vectors_per_filter * vector
        transform = _WinogradTransform(w, (w.R, w.R), vector)
        for r in range(w.R):
            for s in range(w.S):
                transform.load(K, (r, s), ((channel_out * w.R + r) * w.S + s) * w.C + channel_in, True)
        for point, value in transform.apply(transpose(G)):
            u, v = point
            _round_and_store(w, U, ((u * grid.alpha + v) * w.O + channel_out) * w.C + channel_in, value, vector)


def transform_inputs(w: Conv2d, grid: WinogradTileGrid, B: FractionMatrix, vector: int, X: Buffer, V: Buffer) -> None:
    """Emit the kernel of V = Bᵀ d B, with zeros outside the images.

    Args:
        w: The workload.
        grid: Grid of output tiles.
        B: Input transform (α, α).
        vector: Neighbouring channels per thread.
        X: The input.
        V: The transformed input.
    """
    vectors_per_tile, (top, left) = w.C // vector, w.pad_low
    with thread_per_item(grid.count * vectors_per_tile, TRANSFORM_THREADS, uses_pdl=True) as index:
        tile, channel_in = index // vectors_per_tile, index % vectors_per_tile * vector
        image, row, column = grid.tile_origin(tile)
        transform = _WinogradTransform(w, (grid.alpha, grid.alpha), vector)
        for i in range(grid.alpha):
            for j in range(grid.alpha):
                y, x = row + i - top, column + j - left
                is_inside = logical_and(y >= 0, y < w.H, x >= 0, x < w.W)
                transform.load(X, (i, j), ((image * w.H + y) * w.W + x) * w.C + channel_in, is_inside)
        for (u, v), value in transform.apply(B):
            _round_and_store(w, V, (tile * grid.alpha**2 + u * grid.alpha + v) * w.C + channel_in, value, vector)


def transform_outputs(
    w: Conv2d, grid: WinogradTileGrid, A: FractionMatrix, vector: int, arguments: dict[str, Buffer], M: Buffer
) -> None:
    """Emit the kernel of Y = Aᵀ M A with the epilogue.

    Args:
        w: The workload.
        grid: Grid of output tiles.
        A: Output transform (α, m).
        vector: Neighbouring channels per thread.
        arguments: Argument buffers by name.
        M: The products.
    """
    vectors_per_tile, (num_rows, num_columns) = w.O // vector, w.output_size
    ops, registers = EpilogueOps.from_workload(w), allocate("finished", 8, "uint32")
    with thread_per_item(grid.count * vectors_per_tile, TRANSFORM_THREADS, uses_pdl=True) as index:
        tile, channel_out = index // vectors_per_tile, index % vectors_per_tile * vector
        image, row, column = grid.tile_origin(tile)
        transform = _WinogradTransform(w, (grid.alpha, grid.alpha), vector)
        for i in range(grid.alpha):
            for j in range(grid.alpha):
                transform.load(M, (i, j), (tile * grid.alpha**2 + i * grid.alpha + j) * w.O + channel_out, True)
        for (u, v), value in transform.apply(A):
            p, q = row + u, column + v
            is_inside = logical_and(
                True if num_rows % grid.m == 0 else p < num_rows, True if num_columns % grid.m == 0 else q < num_columns
            )
            with if_(is_inside):
                output_index = ((image * num_rows + p) * num_columns + q) * w.O + channel_out
                apply_to_vector(ops, arguments, channel_out, output_index, vector, value, registers)
                store_global(arguments["Y"], output_index, registers, vector)


class _WinogradTransform:
    """Matrices of a thread's channels, which are loaded and then transformed along both axes.

    Args:
        w: The workload.
        shape: Shape of each matrix.
        vector: Number of channels.
    """

    def __init__(self, w: Conv2d, shape: tuple[int, int], vector: int) -> None:
        self._w, self._shape, self._vector_channels = w, shape, vector
        rows, columns = shape
        self._words_per_element = max(1, vector * get_itemsize(w.storage) // 4)
        self._element_words = [
            [allocate(f"in_{i}_{j}", self._words_per_element, "uint32") for j in range(columns)] for i in range(rows)
        ]

    def load(self, source: Buffer, position: tuple[int, int], index: Expr, is_valid: Expr) -> None:
        """Load an element of all channels, or zeros if it is not valid."""
        i, j = position
        element_words = self._element_words[i][j]
        if is_valid is not True:
            for e in range(self._words_per_element):
                store(element_words, e, T.uint32(0))
        with if_(is_valid):
            load_global(element_words, source, index, self._vector_channels, is_constant=False)

    def apply(self, matrix: FractionMatrix) -> Iterator[tuple[tuple[int, int], Buffer]]:
        """Yield the position and value of each element of matrixᵀ · X · matrix; the value is an array of the channels.

        All elements are yielded in the same array, which the caller may change.
        """
        (rows, columns), num_channels, weights = self._shape, self._vector_channels, transpose(matrix)
        num_outputs = len(weights)
        along_rows = allocate("along_rows", num_outputs * columns * num_channels, "float32")
        for j in range(columns):
            channels = [unpack(self._element_words[i][j], num_channels, self._w.storage) for i in range(rows)]
            for u in range(num_outputs):
                for e in range(num_channels):
                    column = [channel_values[e] for channel_values in channels]
                    store(
                        along_rows, (u * columns + j) * num_channels + e, weighted_sum(column.__getitem__, weights[u])
                    )
        value_regs = allocate("value", max(2, num_channels), "float32")
        for u in range(num_outputs):
            for v in range(num_outputs):
                for e in range(num_channels):
                    row = [along_rows[(u * columns + j) * num_channels + e] for j in range(columns)]
                    store(value_regs, e, weighted_sum(row.__getitem__, weights[v]))
                yield (u, v), value_regs


def _round_and_store(w: Conv2d, destination: Buffer, index: Expr, value_regs: Buffer, num_channels: int) -> None:
    """Round a thread's channels to the dtype of the product, and store them."""
    registers = allocate("rounded", 8, "uint32")
    pack(registers, 0, [value_regs[e] for e in range(num_channels)], w.storage)
    if w.dtype == TF32.name:  # round here, because tensor cores truncate
        for e in range(num_channels):
            rounding_bit, kept_bits = T.uint32(1 << TF32_DROPPED_BITS - 1), T.uint32(2**32 - 2**TF32_DROPPED_BITS)
            store(registers, e, (registers[e] + rounding_bit) & kept_bits)
    store_global(destination, index, registers, num_channels)
