"""Epilogue of an mma.sync kernel: a tile passes through shared memory and is stored in vectors of channels.

Operations on accumulators are applied in registers, before the tile is staged; the other ones are applied to vectors of
neighbouring channels. CTAs of a cluster that split the reduction stage their partial sums, and each of them adds up and
stores a share of the rows, which it reads through distributed shared memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.arithmetic import ceil_div

from ....tir_builder import (
    Buffer,
    Expr,
    Register,
    allocate,
    choose_offset_dtype,
    emit_call,
    emit_ptx,
    fill_zeros,
    if_,
    is_below,
    load_global,
    load_shared,
    logical_and,
    serial_loop,
    store,
    store_global,
    to_offset,
    to_uint32,
    unrolled_loop,
)
from ..implicit_gemm_shape import ACCUMULATOR_BYTES, ImplicitGemmShape
from .channel_arguments import ChannelArgumentTile
from .epilogue_ops import EpilogueOps, apply_to_vector, load_argument
from .mma_sync_mainloop import WarpTiling
from .pipelines import map_to_cta
from .tile_scheduler import WorkTile

MAX_VECTORS_IN_FLIGHT = 4  # output vectors that a thread holds at a time


@dataclass(frozen=True)
class StagedEpilogue:
    """The epilogue of a CTA."""

    shape: ImplicitGemmShape  # the product
    tiling: WarpTiling  # division of the tile among warps
    arguments: Mapping[str, Buffer]  # argument buffers by name
    register_ops: EpilogueOps  # Operations on accumulators. Additions may be applied in any order.
    vector_ops: EpilogueOps  # operations on vectors of channels
    stages_sums: bool  # whether the staged tile has float32 sums, instead of results
    num_parts: int  # CTAs of a cluster that split the reduction
    split: Expr  # index of this CTA among them
    smem: Expr  # shared-memory address of the CTA
    tile_offset: int  # offset of the staged tile in bytes
    pitch_bytes: int  # bytes from one row of the staged tile to the next
    channel_args: ChannelArgumentTile  # per-channel arguments of `register_ops` in shared memory

    @property
    def staged_itemsize(self) -> int:
        """Bytes of an element of the staged tile."""
        return ACCUMULATOR_BYTES if self.stages_sums else self.shape.output_itemsize

    @property
    def vector(self) -> int:
        """Neighbouring channels that a thread stores at a time."""
        return math.gcd(self.shape.n, self.shape.output_vector)

    def apply(self, accumulators: Buffer, tile: WorkTile) -> None:
        """Stage a tile, and store it with all operations applied."""
        with if_(self.tiling.holds_sums):
            self.stage(accumulators)
        emit_call(T.cuda.cluster_sync() if self.num_parts > 1 else T.cuda.cta_sync())
        self.store(tile)
        if self.num_parts > 1:  # a CTA must not exit before the others have read its shared memory
            emit_call(T.cuda.cluster_sync())

    def prefetch_channel_args(self, tile: WorkTile) -> None:
        """Start the copy of the per-channel arguments of a tile to shared memory.

        The copy belongs to the first commit group of the tile and is complete for all threads at the tile's end. Of the
        CTAs that split a reduction, only the first adds these arguments. All threads have read them before the copy for
        the next tile starts, because a barrier lies between the mainloop and the store of the tile.
        """
        tiling, n = self.tiling, self.shape.n
        self.channel_args.copy_async(
            self.arguments,
            tile,
            n,
            tiling.thread.thread,
            tiling.num_threads,
            is_exact=n % tiling.block_n == 0,
            is_needed=True if self.num_parts == 1 else self.split == 0,
        )

    def init_accumulators(self, accumulators: Buffer, tile: WorkTile) -> None:
        """Set the accumulators to zero, or to a residual if that is an operation on accumulators."""
        tiling, shape = self.tiling, self.shape
        fill_zeros(accumulators, tiling.num_accumulators)
        is_first_part = logical_and(tiling.holds_sums, True if self.num_parts == 1 else self.split == 0)
        width, words = self._residual_width, allocate("residual_words", 8, "uint32")
        for op in self.register_ops.ops:
            if op.argument_kind != "output":
                continue
            n_loop, m_loop = unrolled_loop(tiling.mmas_n, "j"), unrolled_loop(tiling.mmas_m, "i")
            with if_(is_first_part), n_loop as mma_n, m_loop as mma_m, unrolled_loop(2, "h") as half:
                row, column = tiling.row(tile, mma_m, half), tiling.column(tile, mma_n)
                for pair in range(0, 2, width):
                    with if_(tiling.is_inside(shape, row, column + pair)):
                        channel = tile.group * shape.n + (column + pair)
                        index = self._output_index(row, channel)
                        values = load_argument(op, self.arguments, self.vector_ops.dtype, channel, index, width, words)
                        first = tiling.accumulator(mma_m, mma_n, half) + pair
                        for e, value in enumerate(values):
                            store(accumulators, first + e, op.compute(accumulators[first + e], value))

    def stage(self, accumulators: Buffer) -> None:
        """Apply the operations on accumulators and copy the tile to shared memory."""
        tiling, itemsize, packed = self.tiling, self.staged_itemsize, allocate("packed", 1, "uint32")
        row, column = tiling.first_row + tiling.thread.lane // 4, tiling.first_column + tiling.thread.lane % 4 * 2
        row_bytes, column_bytes = self._strides
        address = self.smem + to_uint32(self.tile_offset) + to_uint32(row * row_bytes)
        address = address + to_uint32(column * column_bytes)
        channel_values = {}
        for name in self.channel_args.names:
            channel_values[name] = registers = allocate(f"{name}_columns", tiling.mmas_n * 2, "float32")
            with unrolled_loop(tiling.mmas_n, "j") as mma_n:
                pair = [registers[mma_n * 2 + e] for e in range(2)]
                self.channel_args.load(name, column + mma_n * tiling.atom.n, pair)
        ops = replace(self.register_ops, ops=tuple(op for op in self.register_ops.ops if op.argument_kind != "output"))
        m_loop, n_loop = unrolled_loop(tiling.mmas_m, "i"), unrolled_loop(tiling.mmas_n, "j")
        with m_loop as mma_m, n_loop as mma_n, unrolled_loop(2, "h") as half:
            first = tiling.accumulator(mma_m, mma_n, half)
            pair = [
                ops.apply(accumulators[first + e], lambda name, e=e: channel_values[name][mma_n * 2 + e])  # type: ignore[misc]
                for e in range(2)
            ]
            destination = address + to_uint32((mma_m * tiling.atom.m + half * 8) * row_bytes)
            destination = destination + to_uint32(mma_n * (tiling.atom.n * column_bytes))
            if itemsize == ACCUMULATOR_BYTES:
                self._store_sums(destination, pair)
            else:
                ops.pack(packed, 0, pair)
                self._store_packed(destination, packed[0])

    @property
    def _strides(self) -> tuple[int, int]:
        """Bytes from one row of the product to the next in shared memory, and from one column to the next."""
        return self.pitch_bytes, self.staged_itemsize

    def _store_sums(self, address: Expr, pair: Sequence[Expr]) -> None:
        """Store the float32 sums of two neighbouring columns to shared memory."""
        emit_ptx("st.shared.v2.b32", address, *pair)

    def _store_packed(self, address: Expr, word: Expr) -> None:
        """Store the results of two neighbouring columns, of which a word has as many as fit, to shared memory."""
        if self.staged_itemsize == 1:
            emit_ptx("st.shared.b16", address, T.Cast("uint16", word))
        else:
            emit_ptx("st.shared.b32", address, word)

    def store(self, tile: WorkTile) -> None:
        """Store the staged tile; each CTA of a cluster stores a share of the rows.

        A thread holds several vectors at a time: it issues all loads before it waits for any.
        """
        tiling, vector = self.tiling, self.vector
        num_vectors = tiling.block_m // self.num_parts * (tiling.block_n // vector)
        num_passes = ceil_div(num_vectors, tiling.num_threads)
        in_flight = math.gcd(num_passes, MAX_VECTORS_IN_FLIGHT)
        residuals = self.vector_ops.residuals if self.stages_sums else []
        loaded = [[allocate(f"{name}_{i}", 8, "uint32") for name in residuals or ["result"]] for i in range(in_flight)]
        values, words = allocate("values", 8, "float32"), allocate("words", 8, "uint32")
        with serial_loop(num_passes // in_flight, "i") as i:
            vectors = [
                self._locate((i * in_flight + number) * tiling.num_threads + tiling.thread.thread, num_vectors, tile)
                for number in range(in_flight)
            ]
            for (is_inside, offset, _channel, index), registers in zip(vectors, loaded, strict=True):
                with if_(is_inside):
                    if not self.stages_sums:
                        load_shared(registers[0], self.smem + offset, vector * self.shape.output_itemsize)
                    for name, residual in zip(residuals, registers, strict=False):
                        load_global(residual, self.arguments[name], index, vector)
            for (is_inside, offset, channel, index), registers in zip(vectors, loaded, strict=True):
                with if_(is_inside):
                    result = registers[0]
                    if self.stages_sums:
                        result, prefetched = words, dict(zip(residuals, registers, strict=False))
                        self._load_sums(values, words, offset)
                        self._apply_vector_ops(channel, index, values, words, prefetched)
                    store_global(self.arguments["Y"], index, result, vector)

    def _apply_vector_ops(
        self, channel: Expr, index: Expr, values: Buffer, words: Buffer, prefetched: Mapping[str, Buffer]
    ) -> None:
        """Apply the operations on vectors to sums, and pack the results."""
        apply_to_vector(self.vector_ops, self.arguments, channel, index, self.vector, values, words, prefetched)

    @property
    def _residual_width(self) -> int:
        """Neighbouring columns of a residual that are loaded at a time to initialize accumulators."""
        return math.gcd(self.shape.n, 2)

    def _output_index(self, row: Expr, channel: Expr) -> Expr:
        """Return the index of an output; channels are counted over all groups."""
        columns = self.shape.groups * self.shape.n
        return to_offset(row, choose_offset_dtype(self.shape.m * columns)) * columns + channel

    def _locate(self, vector_idx: Expr, num_vectors: int, tile: WorkTile) -> tuple[Expr, Expr, Expr, Expr]:
        """Return whether a vector is stored, its offset in shared memory, its first channel, and its output index."""
        tiling, vectors_per_row = self.tiling, self.tiling.block_n // self.vector
        row = self.split * (tiling.block_m // self.num_parts) + vector_idx // vectors_per_row
        column = vector_idx % vectors_per_row * self.vector
        is_inside = logical_and(
            is_below(vector_idx, num_vectors, tiling.num_threads),
            tiling.is_inside(self.shape, tile.m + row, tile.n + column),
        )
        offset = to_uint32(self.tile_offset) + to_uint32(row * self.pitch_bytes)
        channel = tile.group * self.shape.n + (tile.n + column)
        index = self._output_index(tile.m + row, channel)
        return is_inside, offset + to_uint32(column * self.staged_itemsize), channel, index

    def _load_sums(self, sums: Buffer, words: Buffer, offset: Expr) -> None:
        """Load a vector of sums, added up over the CTAs of a cluster."""
        if self.num_parts == 1:
            load_shared(sums, self.smem + offset, self.vector * ACCUMULATOR_BYTES)
            return
        fill_zeros(sums, self.vector)
        remote = Register("remote_sums", "uint32")
        with unrolled_loop(self.num_parts, "g") as part:
            map_to_cta(remote, self.smem + offset, part)
            for first in range(0, self.vector, 4):
                count = min(4, self.vector - first)
                loaded = [words[e] for e in range(count)]
                suffix, address = f".v{count}" if count > 1 else "", remote.value + to_uint32(first * ACCUMULATOR_BYTES)
                emit_ptx(f"ld.shared::cluster{suffix}.b32", *loaded, address)
                for e in range(count):
                    store(sums, first + e, sums[first + e] + T.reinterpret("float32", loaded[e]))
