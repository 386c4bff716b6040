"""Mean and variance of each output channel, from the tile that an mma.sync kernel stages in shared memory."""

from __future__ import annotations

from dataclasses import dataclass

from tvmconv.arithmetic import ceil_div
from tvmconv.workloads.dtypes import get_itemsize

from ....tir_builder import (
    Expr,
    allocate,
    guarded_loop,
    if_,
    is_below,
    load_shared,
    logical_and,
    serial_loop,
    to_uint32,
    unpack,
)
from ..implicit_gemm_shape import ACCUMULATOR_BYTES
from .channel_stats import ColumnSums, PartialStats
from .staged_epilogue import StagedEpilogue
from .tile_scheduler import WorkTile

MIN_BLOCK_ROWS = 16  # rows of a block of statistics


def choose_block_rows(block_m: int, block_n: int, num_threads: int, itemsize: int) -> int:
    """Return the rows of a block of statistics, such that a thread has a word of them and few threads are idle."""
    words = block_n * itemsize // ACCUMULATOR_BYTES
    max_blocks = min(max(1, num_threads // words), block_m // MIN_BLOCK_ROWS)
    return block_m // next(number for number in range(max_blocks, 0, -1) if block_m % number == 0)


@dataclass(frozen=True)
class StagedStatsEpilogue(StagedEpilogue):
    """An epilogue that also adds up the columns of the staged tile; each thread takes words of the rows of a block."""

    stats: PartialStats  # statistics of all blocks of rows; a tile has whole blocks

    @property
    def elements(self) -> int:
        """Elements of a 32-bit word."""
        return ACCUMULATOR_BYTES // get_itemsize(self.vector_ops.dtype)

    def store(self, tile: WorkTile) -> None:
        """Store the staged tile and the statistics of its columns."""
        self._add_columns(tile)
        super().store(tile)

    def _add_columns(self, tile: WorkTile) -> None:
        tiling, block_rows = self.tiling, self.stats.block_rows
        words = tiling.block_n // self.elements
        threads_per_block = min(words, tiling.num_threads)
        block, first_word = tiling.thread.thread // threads_per_block, tiling.thread.thread % threads_per_block
        sums, first_row = ColumnSums(self.elements), block * block_rows
        is_block = logical_and(block < tiling.block_m // block_rows, tile.m + first_row < self.shape.m)
        with if_(is_block), serial_loop(ceil_div(words, threads_per_block), "step") as step:
            word = step * threads_per_block + first_word
            with if_(is_below(word, words, threads_per_block)):
                self._add_word(tile, first_row, word, sums)
                for e in range(self.elements):
                    channel = tile.n + word * self.elements + e
                    with if_(is_below(channel, self.shape.n, tiling.block_n)):
                        self.stats.store(tile.m + first_row, tile.group * self.shape.n + channel, sums, e)

    def _add_word(self, tile: WorkTile, first_row: Expr, word: Expr, sums: ColumnSums) -> None:
        """Add up a word of the rows of a block that lie in the output."""
        registers = allocate("column_word", 1, "uint32")
        address = self.smem + to_uint32(self.tile_offset) + to_uint32(word * ACCUMULATOR_BYTES)

        def load(row: Expr) -> list[Expr]:
            load_shared(registers, address + to_uint32(row * self.pitch_bytes), ACCUMULATOR_BYTES)
            return unpack(registers, self.elements, self.vector_ops.dtype)

        sums.start(0, load(first_row))
        rows = serial_loop(self.stats.block_rows, "row")
        with guarded_loop(rows, lambda i: is_below(tile.m + first_row + i, self.shape.m, self.tiling.block_m)) as i:
            sums.add(0, load(first_row + i))
