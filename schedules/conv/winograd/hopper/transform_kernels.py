"""Transform kernels of `winograd_hopper`: each thread transforms some neighbouring channels of one tile or filter.

Channels are last in memory, as in the operands: `V` is (tiles, α², C), `U` (α², O, C) and `M` (tiles, α², O).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.workloads import Conv2d
from tvmconv.workloads.dtypes import TF32, get_itemsize

from ....tir_builder import (
    Buffer,
    Expr,
    allocate,
    if_,
    is_below,
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
from ..te_stages import transpose
from ..transform import transform_both_axes

TRANSFORM_THREADS = 128  # threads per block
TF32_DROPPED_BITS = 13  # low bits of a float32 mantissa that TF32, with 10 bits, drops


def transform_filters(w: Conv2d, grid: WinogradTileGrid, G: FractionMatrix, K: Buffer, U: Buffer) -> None:
    """Emit the kernel of U = G g Gᵀ."""
    vector = 2 if w.C % 2 == 0 else 1
    vectors_per_filter = w.C // vector
    with thread_per_item(w.O * vectors_per_filter, TRANSFORM_THREADS) as index:
        channel_out, channel_in = index // vectors_per_filter, index % vectors_per_filter * vector

        def locate(r: int, s: int) -> tuple[Expr, Expr]:
            return ((channel_out * w.R + r) * w.S + s) * w.C + channel_in, True

        for (u, v), value in _load_and_transform(w, transpose(G), K, vector, locate):
            _round_and_store(w, U, ((u * grid.alpha + v) * w.O + channel_out) * w.C + channel_in, value, vector)


def transform_inputs(w: Conv2d, grid: WinogradTileGrid, B: FractionMatrix, vector: int, X: Buffer, V: Buffer) -> None:
    """Emit the kernel of V = Bᵀ d B, with zeros outside the images."""
    vectors_per_tile, (top, left) = w.C // vector, w.pad_low
    with thread_per_item(grid.count * vectors_per_tile, TRANSFORM_THREADS, uses_pdl=True) as index:
        tile, channel_in = index // vectors_per_tile, index % vectors_per_tile * vector
        image, row, column = grid.tile_origin(tile)

        def locate(i: int, j: int) -> tuple[Expr, Expr]:
            y, x = row + i - top, column + j - left
            is_inside = logical_and(y >= 0, y < w.H, x >= 0, x < w.W)
            return ((image * w.H + y) * w.W + x) * w.C + channel_in, is_inside

        for (u, v), value in _load_and_transform(w, B, X, vector, locate):
            _round_and_store(w, V, (tile * grid.alpha**2 + u * grid.alpha + v) * w.C + channel_in, value, vector)


def transform_outputs(
    w: Conv2d, grid: WinogradTileGrid, A: FractionMatrix, vector: int, arguments: dict[str, Buffer], M: Buffer
) -> None:
    """Emit the kernel of Y = Aᵀ M A with the epilogue."""
    vectors_per_tile, (num_rows, num_columns) = w.O // vector, w.output_size
    ops, registers = EpilogueOps.from_workload(w), allocate("finished", 8, "uint32")
    with thread_per_item(grid.count * vectors_per_tile, TRANSFORM_THREADS, uses_pdl=True) as index:
        tile, channel_out = index // vectors_per_tile, index % vectors_per_tile * vector
        image, row, column = grid.tile_origin(tile)

        def locate(i: int, j: int) -> tuple[Expr, Expr]:
            return (tile * grid.alpha**2 + i * grid.alpha + j) * w.O + channel_out, True

        for (u, v), value in _load_and_transform(w, A, M, vector, locate):
            p, q = row + u, column + v
            with if_(logical_and(is_below(p, num_rows, grid.m), is_below(q, num_columns, grid.m))):
                output_index = ((image * num_rows + p) * num_columns + q) * w.O + channel_out
                apply_to_vector(ops, arguments, channel_out, output_index, vector, value, registers)
                store_global(arguments["Y"], output_index, registers, vector)


def _load_and_transform(
    w: Conv2d, matrix: FractionMatrix, source: Buffer, vector: int, locate: Callable[[int, int], tuple[Expr, Expr]]
) -> Iterator[tuple[tuple[int, int], Buffer]]:
    """Load a matrix X of each of a thread's channels, and yield the elements of matrixᵀ · X · matrix.

    Args:
        w: The workload.
        matrix: The transform.
        source: Array of X.
        vector: Number of channels, which are neighbours in memory.
        locate: Function from a row and a column of X to an index in the array, and to whether that is valid; elements
            of X are zero otherwise.

    Yields:
        The position of an element, and an array of its channels, which the caller may change.
    """
    words_per_element = max(1, vector * get_itemsize(w.storage) // 4)
    size = len(matrix)
    words = [[allocate(f"in_{i}_{j}", words_per_element, "uint32") for j in range(size)] for i in range(size)]
    for i, row in enumerate(words):
        for j, element_words in enumerate(row):
            index, is_valid = locate(i, j)
            if is_valid is not True:
                for e in range(words_per_element):
                    store(element_words, e, T.uint32(0))
            with if_(is_valid):
                load_global(element_words, source, index, vector, is_constant=False)
    value_regs = allocate("value", max(2, vector), "float32")
    columns = transform_both_axes(matrix, lambda j: [unpack(row[j], vector, w.storage) for row in words], vector)
    for point, channels in columns:
        for e, value in enumerate(channels):
            store(value_regs, e, value)
        yield point, value_regs


def _round_and_store(w: Conv2d, destination: Buffer, index: Expr, value_regs: Buffer, num_channels: int) -> None:
    """Round a thread's channels to the dtype of the product, and store them."""
    registers = allocate("rounded", 8, "uint32")
    pack(registers, 0, [value_regs[e] for e in range(num_channels)], w.storage)
    if w.dtype == TF32.name:  # round here, because tensor cores truncate
        for e in range(num_channels):
            rounding_bit, kept_bits = T.uint32(1 << TF32_DROPPED_BITS - 1), T.uint32(2**32 - 2**TF32_DROPPED_BITS)
            store(registers, e, (registers[e] + rounding_bit) & kept_bits)
    store_global(destination, index, registers, num_channels)
