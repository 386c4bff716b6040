"""Channels-first convolutions by channels-last kernels: operands and output are transposed by launches of their own.

A channels-last kernel reads neighbouring channels of a pixel in one vector, which tensor cores need. In a
channels-first array the pixels of a channel are neighbours. The conversion is a matrix transpose for each image: (C,
pixels) becomes (pixels, C), and the output is transposed back. The weight is transposed once if it does not change
between calls.

A block transposes a tile through shared memory. Each thread loads vectors along the rows of the source and stores
vectors along the rows of the destination, of 16 bytes where sizes permit. Shared memory holds 32-bit words: one
element, or those of two neighbouring source rows if elements have 16 bits. Its pitch of 33 words and the arrangement
of lanes make both accesses free of bank conflicts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from tvm.s_tir import Schedule
from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.arithmetic import ceil_div
from tvmconv.target import WARP_SIZE
from tvmconv.workloads import Conv, epilogue
from tvmconv.workloads.dtypes import get_itemsize
from tvmconv.workloads.layout import CHANNELS_LAST

from ..primitives import disable_buffer_reuse, mark_constant_args
from ..tir_builder import (
    Buffer,
    Expr,
    allocate,
    build_schedule,
    emit_call,
    emit_ptx,
    if_,
    load_global,
    logical_and,
    store,
    store_global,
    thread_axis,
)

EmitKernels = Callable[[dict[str, Buffer]], None]

NUM_WARPS = 8  # per block
TILE_COLUMNS = 64  # columns of the source per block
TILE_WORDS = 32  # 32-bit words per column of the tile
PITCH = TILE_WORDS + 1  # words from one column to the next in shared memory
VECTOR_BYTES = 16


def build_channels_last_schedule(
    w: Conv, emit_kernels: EmitKernels, *, converts_input: bool = True, converts_output: bool = True
) -> Schedule:
    """Return the schedule of kernels that compute `w.to_channels_last()`, with conversions if `w` is channels first.

    Args:
        w: The workload.
        emit_kernels: Function that emits the kernels; it receives buffers by name. Those that are converted are
            channels last.
        converts_input: Whether X is converted.
        converts_output: Whether residuals and the output are converted.
    """
    if w.layout == CHANNELS_LAST:
        return build_schedule(w, emit_kernels)
    conversions = _Conversions(w, converts_input, converts_output)
    schedule = build_schedule(w, lambda arguments: conversions.emit(arguments, emit_kernels))
    mark_constant_args(schedule, "K")
    disable_buffer_reuse(schedule)  # TVM does not see the accesses of TMA
    return schedule


@dataclasses.dataclass(frozen=True)
class _Conversions:
    """Conversions of a channels-first workload's arrays."""

    w: Conv
    converts_input: bool
    converts_output: bool

    def emit(self, arguments: dict[str, Buffer], emit_kernels: EmitKernels) -> None:
        """Emit the conversions of the arguments, the kernels, and the conversion of the output."""
        w = self.w
        pixels_in, pixels_out = math.prod(w.input_size), math.prod(w.output_size)
        shapes = {"K": (w.O, w.C // w.groups, math.prod(w.kernel))}
        if self.converts_input:
            shapes["X"] = (w.N, w.C, pixels_in)
        if self.converts_output:
            residuals = [op.name for op in epilogue.get_ops(w.epilogue) if op.argument_kind == "output"]
            shapes |= dict.fromkeys(residuals, (w.N, w.O, pixels_out))
        converted = dict(arguments)
        for name, (batch, channels, pixels) in shapes.items():
            if min(channels, pixels) > 1:  # otherwise both layouts are the same
                converted[name] = allocate(f"{name}_last", batch * channels * pixels, w.storage, "global")
                emit_transpose(arguments[name], converted[name], batch, channels, pixels, waits=name != "K")
        if not self.converts_output or min(w.O, pixels_out) == 1:
            emit_kernels(converted)
            return
        converted["Y"] = allocate("Y_last", w.N * w.O * pixels_out, w.storage, "global")
        emit_kernels(converted)
        emit_transpose(converted["Y"], arguments["Y"], w.N, pixels_out, w.O)


def emit_transpose(
    source: Buffer, destination: Buffer, batch: int, rows: int, columns: int, *, waits: bool = True
) -> None:
    """Emit the kernel of `destination[b, column, row] = source[b, row, column]`.

    Args:
        source: Array of batch × rows × columns elements of 16 or 32 bits.
        destination: Array of batch × columns × rows elements.
        batch: Number of matrices.
        rows: Rows of the source.
        columns: Columns of the source.
        waits: Whether the kernel may start before the previous launch ends, and then waits for it.
    """
    itemsize = get_itemsize(str(source.dtype))
    tile_rows = TILE_WORDS * 4 // itemsize
    tiles_rows, tiles_columns = ceil_div(rows, tile_rows), ceil_div(columns, TILE_COLUMNS)
    with (
        thread_axis(batch * tiles_rows * tiles_columns, "blockIdx.x") as block,
        thread_axis(NUM_WARPS * WARP_SIZE, "threadIdx.x") as thread,
    ):
        tile = allocate("tile", TILE_COLUMNS * PITCH, "uint32", "shared")
        if waits:
            emit_ptx("griddepcontrol.wait")
            emit_ptx("griddepcontrol.launch_dependents")
        transpose = _TileTranspose(
            tile,
            (rows, columns),
            itemsize,
            first_row=block // tiles_columns % tiles_rows * tile_rows,
            first_column=block % tiles_columns * TILE_COLUMNS,
            warp=thread // WARP_SIZE,
            lane=thread % WARP_SIZE,
        )
        image = block // (tiles_rows * tiles_columns)
        transpose.load(source, image)
        emit_call(T.cuda.cta_sync())
        transpose.store(destination, image)


@dataclasses.dataclass(frozen=True)
class _TileTranspose:
    """The work of a thread on a tile: a column of the tile is contiguous in shared memory.

    Attributes:
        tile: Shared memory, `TILE_COLUMNS` × `PITCH` words.
        shape: Rows and columns of the source matrix.
        itemsize: Bytes per element.
        first_row: First row of the tile.
        first_column: First column of the tile.
        warp: Index of the thread's warp in the block.
        lane: Index of the thread in its warp.
    """

    tile: Buffer
    shape: tuple[int, int]
    itemsize: int
    first_row: Expr
    first_column: Expr
    warp: Expr
    lane: Expr

    @property
    def rows_per_word(self) -> int:
        """Source rows whose elements share a word."""
        return 4 // self.itemsize

    def load(self, source: Buffer, image: Expr) -> None:
        """Load the tile; a warp reads 32 columns of as many words' rows as a vector has elements."""
        rows, columns = self.shape
        vector = math.gcd(columns, VECTOR_BYTES // self.itemsize)
        lanes_along_columns = WARP_SIZE // vector
        vectors = [
            allocate(f"row_{row}", max(1, vector * self.itemsize // 4), "uint32") for row in range(self.rows_per_word)
        ]
        num_steps = TILE_WORDS // vector * (TILE_COLUMNS // WARP_SIZE)
        for step in self._steps(num_steps):
            word = step // 2 * vector + self.lane // lanes_along_columns
            tile_column = step % 2 * WARP_SIZE + self.lane % lanes_along_columns * vector
            column = self.first_column + tile_column
            for row_in_word, registers in enumerate(vectors):
                row = self.first_row + word * self.rows_per_word + row_in_word
                for e in range(max(1, vector * self.itemsize // 4)):
                    store(registers, e, T.uint32(0))
                with if_(self._is_inside(row, column)):
                    load_global(registers, source, (image * rows + row) * columns + column, vector, is_constant=False)
            for e in range(vector):
                store(self.tile, (tile_column + e) * PITCH + word, self._combine(vectors, e))

    def store(self, destination: Buffer, image: Expr) -> None:
        """Store the tile; neighbouring lanes store neighbouring vectors of a column."""
        rows, columns = self.shape
        vector = math.gcd(rows, VECTOR_BYTES // self.itemsize)
        vectors_per_column = TILE_WORDS * self.rows_per_word // vector
        lanes_along_rows = min(WARP_SIZE, vectors_per_column)
        columns_per_warp, warps_per_column = WARP_SIZE // lanes_along_rows, vectors_per_column // lanes_along_rows
        registers = allocate("column", max(1, vector * self.itemsize // 4), "uint32")
        for step in self._steps(TILE_COLUMNS // columns_per_warp * warps_per_column):
            tile_column = step // warps_per_column * columns_per_warp + self.lane // lanes_along_rows
            tile_row = (step % warps_per_column * lanes_along_rows + self.lane % lanes_along_rows) * vector
            row, column = self.first_row + tile_row, self.first_column + tile_column
            first_word = tile_column * PITCH + tile_row // self.rows_per_word
            if vector * self.itemsize < 4:
                store(registers, 0, self._select_half(self.tile[first_word], tile_row % 2))
            else:
                for e in range(vector * self.itemsize // 4):
                    store(registers, e, self.tile[first_word + e])
            with if_(self._is_inside(row, column)):
                store_global(destination, (image * columns + column) * rows + row, registers, vector)

    def _steps(self, num_steps: int) -> list[Expr]:
        """Return the steps of this warp; the steps of a phase are divided among the warps of the block."""
        return [round_idx * NUM_WARPS + self.warp for round_idx in range(num_steps // NUM_WARPS)]

    def _is_inside(self, row: Expr, column: Expr) -> Expr:
        """Whether an element is in the matrix; matrices without partial tiles need no test."""
        tile_rows = TILE_WORDS * self.rows_per_word
        rows, columns = self.shape
        return logical_and(
            True if rows % tile_rows == 0 else row < rows, True if columns % TILE_COLUMNS == 0 else column < columns
        )

    def _combine(self, vectors: list[Buffer], element: int) -> Expr:
        """Return the word with element `element` of each source row."""
        if self.itemsize == 4:
            return vectors[0][element]
        low, high = (self._select_half(vector[element // 2], element % 2) for vector in vectors)
        return low | T.shift_left(high, T.uint32(16))

    @staticmethod
    def _select_half(word: Expr, half: Expr) -> Expr:
        return T.shift_right(word, T.uint32(half * 16)) & T.uint32(0xFFFF)
