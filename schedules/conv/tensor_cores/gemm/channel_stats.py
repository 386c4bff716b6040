"""Mean and variance of each output channel, which a Hopper kernel computes while it stores its tiles.

A warpgroup adds up the columns of its subtiles in shared memory, where they wait for their stores. Its statistics of
each column are those of a block of rows. They go to a workspace, and a second kernel combines the blocks in order, so
that results are the same bits in every run.

Sums of squares lose digits if the mean is far from zero. Elements are therefore shifted by the first one of the block
and its column. The second kernel adds up the deviations of the blocks' means from the mean of all rows. Source: Chan,
Golub, LeVeque, "Algorithms for Computing the Sample Variance", 1983.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.arithmetic import ceil_div
from tvmconv.target import WARP_SIZE, WARPGROUP_SIZE
from tvmconv.tensor_map import CHUNK_BYTES
from tvmconv.workloads.dtypes import get_itemsize

from ....tir_builder import (
    Buffer,
    Expr,
    Register,
    allocate,
    emit_call,
    emit_ptx,
    if_,
    load_global,
    load_shared,
    logical_and,
    serial_loop,
    store,
    store_element,
    thread_axis,
    to_uint32,
    unpack,
    unrolled_loop,
)
from ..implicit_gemm_shape import ACCUMULATOR_BYTES
from .atoms import ThreadPosition, add_across_lanes
from .epilogue_tile import EpilogueTile
from .tile_scheduler import WorkTile

WARPS_PER_WARPGROUP = WARPGROUP_SIZE // WARP_SIZE
COMBINED_CHANNELS = 8  # channels per CTA of the second kernel: 32 bytes, the unit of memory accesses
COMBINING_ROWS = 128  # its threads per channel
LOADS_IN_FLIGHT = 4  # its loads of a thread at a time


@dataclass(frozen=True)
class PartialStats:
    """Statistics of blocks of rows."""

    num_rows: int  # rows of the output: pixels of all images
    num_channels: int  # output channels of all groups
    block_rows: int  # rows per block; the last block may have fewer
    workspace: Buffer  # Float32 array (blocks, 2, channels): mean, and sum of squared deviations from it

    @classmethod
    def with_workspace(cls, num_rows: int, num_channels: int, block_rows: int) -> PartialStats:
        """Return the statistics, and allocate their workspace."""
        extent = ceil_div(num_rows, block_rows), 2, num_channels
        return cls(num_rows, num_channels, block_rows, allocate("partial_stats", extent, "float32", "global"))

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return ceil_div(self.num_rows, self.block_rows)

    def count_rows(self, block: Expr) -> Expr:
        """Return the rows of a block as float32."""
        if self.num_rows % self.block_rows == 0:
            return T.float32(self.block_rows)
        return T.Cast("float32", T.min(self.block_rows, self.num_rows - block * self.block_rows))

    def store(self, first_row: Expr, channel: Expr, sums: ColumnSums, column: int) -> None:
        """Store the statistics of a channel in the block that begins at a row, from the sums of a column."""
        block = first_row // self.block_rows
        for row, value in enumerate(sums.compute_stats(column, self.count_rows(block))):
            store_element(self.workspace, (block, row, channel), value)

    def emit_combination(self, stats: Buffer, *, uses_pdl: bool) -> None:
        """Emit the kernel that writes mean and variance of each channel to an array (2, channels).

        With PDL (programmatic dependent launch) it may start before the previous launch ends.
        """
        num_threads, num_ctas = COMBINED_CHANNELS * COMBINING_ROWS, ceil_div(self.num_channels, COMBINED_CHANNELS)
        with thread_axis(num_ctas, "blockIdx.x") as cta, thread_axis(num_threads, "threadIdx.x") as thread:
            if uses_pdl:
                emit_ptx("griddepcontrol.wait")
                emit_ptx("griddepcontrol.launch_dependents")
            first, channel = thread // COMBINED_CHANNELS, cta * COMBINED_CHANNELS + thread % COMBINED_CHANNELS
            column = T.min(channel, self.num_channels - 1)  # threads beyond the channels store nothing
            total = _CombinedSum(thread)
            words = [allocate(f"loaded_{row}", LOADS_IN_FLIGHT, "uint32") for row in range(2)]

            def add_up(compute: Callable[[Expr, Expr, Expr], Expr], num_loaded: int) -> Expr:
                """Return the sum over blocks of a function of their rows, mean and squared deviations."""
                total.clear()
                with serial_loop(ceil_div(self.num_blocks, COMBINING_ROWS * LOADS_IN_FLIGHT), "step") as step:
                    blocks = [(step * LOADS_IN_FLIGHT + i) * COMBINING_ROWS + first for i in range(LOADS_IN_FLIGHT)]
                    for i, block in enumerate(blocks):
                        for row in range(num_loaded):
                            index = (T.min(block, self.num_blocks - 1) * 2 + row) * self.num_channels + column
                            self._load(words[row], i, index)
                    for i, block in enumerate(blocks):
                        mean, deviations = (T.reinterpret("float32", words[row][i]) for row in range(2))
                        with if_(block < self.num_blocks):
                            total.add(compute(self.count_rows(block), mean, deviations))
                return total.reduce()

            scale = T.float32(1 / self.num_rows)
            mean = Register("mean", "float32", add_up(lambda count, mean, _: count * mean, 1) * scale).value

            def deviate(count: Expr, block_mean: Expr, deviations: Expr) -> Expr:
                return deviations + count * (block_mean - mean) * (block_mean - mean)

            variance = add_up(deviate, 2) * scale
            with if_(logical_and(first == 0, channel < self.num_channels)):
                store_element(stats, (0, channel), mean)
                store_element(stats, (1, channel), variance)

    def _load(self, words: Buffer, position: int, index: Expr) -> None:
        word = allocate("word", 1, "uint32")
        load_global(word, self.workspace, index, 1, is_constant=False)
        store(words, position, word[0])


class _CombinedSum:
    """A sum over the threads of a CTA that have the same channel; all of them receive it.

    Args:
        thread: Index of the thread, whose channel is its remainder.
    """

    def __init__(self, thread: Expr) -> None:
        self._thread, self._num_warps = thread, COMBINED_CHANNELS * COMBINING_ROWS // WARP_SIZE
        self._sum = Register("channel_sum", "float32")
        self._warp_sums = allocate("warp_sums", self._num_warps * COMBINED_CHANNELS, "float32", "shared")

    def clear(self) -> None:
        """Start a sum."""
        self._sum.set(T.float32(0))

    def add(self, value: Expr) -> None:
        """Add a value of this thread."""
        self._sum.set(self._sum.value + value)

    def reduce(self) -> Expr:
        """Return the sum of all threads of this thread's channel."""
        distance = COMBINED_CHANNELS
        while distance < WARP_SIZE:
            self._sum.set(add_across_lanes(self._sum.value, distance))
            distance *= 2
        emit_call(T.cuda.cta_sync())  # an earlier sum has been read
        with if_(self._thread % WARP_SIZE < COMBINED_CHANNELS):
            store(self._warp_sums, self._thread // WARP_SIZE * COMBINED_CHANNELS + self._thread % 32, self._sum.value)
        emit_call(T.cuda.cta_sync())
        self.clear()
        with unrolled_loop(self._num_warps, "warp") as warp:
            self.add(self._warp_sums[warp * COMBINED_CHANNELS + self._thread % COMBINED_CHANNELS])
        return self._sum.value


class ColumnSums:
    """Sums of the elements of some columns in registers, shifted by the first element of each column.

    Args:
        num_columns: Number of columns.
    """

    def __init__(self, num_columns: int) -> None:
        names = "shift", "shifted_sum", "square_sum"
        self._shift, self._sum, self._squares = (allocate(name, num_columns, "float32") for name in names)

    def start(self, first_column: int, values: Sequence[Expr]) -> None:
        """Start the sums of neighbouring columns with their first elements, which are not added yet."""
        for column, value in enumerate(values, first_column):
            store(self._shift, column, value)
            store(self._sum, column, T.float32(0))
            store(self._squares, column, T.float32(0))

    def add(self, first_column: int, values: Sequence[Expr]) -> None:
        """Add an element to each of neighbouring columns."""
        for column, value in enumerate(values, first_column):
            difference = value - self._shift[column]
            store(self._sum, column, self._sum[column] + difference)
            store(self._squares, column, self._squares[column] + difference * difference)

    def add_across_lanes(self, column: int, first_distance: int) -> None:
        """Add the sums of all lanes of a warp whose indices are equal modulo a power of two."""
        distance = first_distance
        while distance < WARP_SIZE:
            for sums in (self._sum, self._squares):
                store(sums, column, add_across_lanes(sums[column], distance))
            distance *= 2

    def compute_stats(self, column: int, count: Expr) -> tuple[Expr, Expr]:
        """Return the mean of `count` elements, and their sum of squared deviations from it."""
        difference = self._sum[column] * (T.float32(1) / count)
        deviations = self._squares[column] - self._sum[column] * difference
        return self._shift[column] + difference, T.max(deviations, T.float32(0))


@dataclass(frozen=True)
class SubtileStats:
    """Adds up the columns of a warpgroup's subtiles in shared memory.

    Each warp takes a quarter of the columns, in 32-bit words, and its lanes take different rows.
    """

    stats: PartialStats  # Statistics of all blocks of rows. A block has the rows of a warpgroup in a work tile.
    tile: EpilogueTile  # division of a warpgroup's accumulators into subtiles
    channels_per_group: int  # output channels of a group, beyond which no channel is valid
    is_exact: bool  # whether tiles have no channels beyond the group

    @functools.cached_property
    def sums(self) -> ColumnSums:
        """Sums of this thread's columns of all subtiles along N; they are allocated where they are used first."""
        return ColumnSums(self.tile.subtiles_n * self.elements)

    @property
    def elements(self) -> int:
        """Elements of a 32-bit word."""
        return ACCUMULATOR_BYTES // get_itemsize(self.tile.dtype)

    @property
    def words(self) -> int:
        """Words of a warp in a row of a subtile."""
        return self.tile.row_bytes // ACCUMULATOR_BYTES // WARPS_PER_WARPGROUP

    @property
    def row_groups(self) -> int:
        """Lanes of a warp that read the same word of different rows."""
        return WARP_SIZE // self.words

    def add(
        self, buffer: Expr, tile: WorkTile, warpgroup: Expr, m_atom: int, n_idx: int, thread: ThreadPosition
    ) -> None:
        """Add up a subtile that all threads have written; after the last rows, store the statistics of the block.

        Args:
            buffer: Shared-memory address of the subtile.
            tile: The work tile.
            warpgroup: Index of the warpgroup among those that share the tile.
            m_atom: Index of the subtile along M.
            n_idx: Index of the subtile along N.
            thread: Position of this thread.
        """
        first_row, first_column = self.tile.row(tile, warpgroup, 0), n_idx * self.elements
        if m_atom == 0:
            self.sums.start(first_column, self._load(buffer, 0, thread))
        group = thread.lane // self.words
        with unrolled_loop(self.tile.atom.m // self.row_groups, "i") as i:
            row = self._choose_row(i, group)
            values = self._load(buffer, row, thread)
            with if_(self._is_inside(first_row + m_atom * self.tile.atom.m + row)):
                self.sums.add(first_column, values)
        if m_atom == self.tile.m_atoms - 1:
            self._store_block(tile, first_row, n_idx, thread)

    def _choose_row(self, i: Expr, group: Expr) -> Expr:
        """Return a row of a lane; the rows that the lanes of a warp read at a time are in different banks."""
        if self.row_groups == 4:  # the 128-byte swizzle exchanges the chunks of rows 2j and 2j + 1
            return i // 2 * 8 + group * 2 + i % 2
        return i * self.row_groups + group

    def _load(self, buffer: Expr, row: Expr, thread: ThreadPosition) -> list[Expr]:
        """Return the elements of this thread's word of a row."""
        word, registers = self._word(thread), allocate("column_word", 1, "uint32")
        words_per_chunk = CHUNK_BYTES // ACCUMULATOR_BYTES
        offset = self.tile.layout.swizzled_offset(row, word // words_per_chunk)
        load_shared(registers, buffer + offset + to_uint32(word % words_per_chunk * ACCUMULATOR_BYTES), 4)
        return unpack(registers, self.elements, self.tile.dtype)

    def _word(self, thread: ThreadPosition) -> Expr:
        return thread.warpgroup_thread // WARP_SIZE * self.words + thread.lane % self.words

    def _is_inside(self, row: Expr) -> Expr:
        rows = self.tile.warpgroups * self.tile.m_atoms * self.tile.atom.m
        return True if self.stats.num_rows % rows == 0 else row < self.stats.num_rows

    def _store_block(self, tile: WorkTile, first_row: Expr, n_idx: int, thread: ThreadPosition) -> None:
        """Store mean and squared deviations of the block's columns."""
        for e in range(self.elements):
            self.sums.add_across_lanes(n_idx * self.elements + e, self.words)
            channel = tile.n + n_idx * self.tile.n + self._word(thread) * self.elements + e
            is_valid = True if self.is_exact else channel < self.channels_per_group
            with if_(logical_and(thread.lane < self.words, first_row < self.stats.num_rows, is_valid)):
                index = tile.group * self.channels_per_group + channel
                self.stats.store(first_row, index, self.sums, n_idx * self.elements + e)
