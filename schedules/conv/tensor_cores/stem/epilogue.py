"""Epilogue of `stem`: applied in registers; each warp arranges its output rows in shared memory and stores them."""

from __future__ import annotations

import math
from collections.abc import Mapping

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.target import WARP_SIZE
from tvmconv.workloads.dtypes import ACCUMULATOR

from ....tir_builder import (
    Buffer,
    Expr,
    allocate,
    emit_call,
    emit_ptx,
    fill_zeros,
    if_,
    is_below,
    load_global,
    load_shared,
    logical_and,
    store,
    store_global,
    store_shared,
    to_uint32,
    unrolled_loop,
)
from ..gemm.epilogue_ops import EpilogueOps, apply_to_columns
from ..gemm.tile_scheduler import WorkTile
from .cta import StemCta, join_halves
from .row_layout import MMA_CHANNELS, MMA_PIXELS, QUAD_WORDS, VECTOR_BYTES, WORD_BYTES


class StemEpilogue:
    """The start and the end of a tile: what accumulators begin with, the epilogue, and the store to global memory."""

    def __init__(self, cta: StemCta, arguments: Mapping[str, Buffer]) -> None:
        self._cta, self._arguments, self._rows = cta, arguments, cta.row_layout
        ops = EpilogueOps.from_workload(cta.config.w)
        # Accumulators start with the bias if it is the first operation of the epilogue.
        first_op = ops.ops[0] if ops.ops else None
        self._starts_with_bias = first_op is not None and first_op.is_addition and first_op.argument_kind == "channel"
        self._ops = ops.replace_ops(ops.ops[1:] if self._starts_with_bias else ops.ops)
        self._channel_values = {name: allocate(name, 2, ACCUMULATOR) for name in ops.channel_args}
        words = 4 // self._rows.elements_per_word * cta.num_mma_n  # of a lane's elements of an output row
        self._residuals = {name: allocate(name, words, "uint32") for name in ops.residuals}
        self._words, self._pair = (
            allocate("words", VECTOR_BYTES // WORD_BYTES, "uint32"),
            allocate("pair", 2, "float32"),
        )
        self._halves = allocate("halves", 2, "uint16")

    def copy_channel_args(self) -> None:
        """Start the copy of the per-channel arguments to shared memory."""
        cta, extent = self._cta, self._cta.config.w.O
        tile, is_exact = WorkTile(0, cta.first_channel, 0), extent % cta.config.block_n == 0
        cta.channel_args.copy_async(
            self._arguments, tile, extent, cta.thread.thread, cta.num_threads, is_exact=is_exact
        )

    def init_accumulators(self, accumulators: Buffer) -> None:
        """Set the accumulators to zero, or to the bias."""
        if not self._starts_with_bias:
            fill_zeros(accumulators, self._cta.config.num_accumulators)
            return
        with unrolled_loop(self._cta.num_mma_n, "j") as mma_n:
            bias = self._load_channel_value(self._cta.config.channel_args[0], mma_n)
            with unrolled_loop(self._cta.config.block_p, "r") as output_row, unrolled_loop(2, "second") as half:
                for e in range(2):
                    store(accumulators, self._cta.accumulator(output_row, mma_n) + half * 2 + e, bias[e])

    def store(self, accumulators: Buffer, tile_idx: Expr) -> None:
        """Apply the epilogue to a tile's accumulators and store the tile, one row at a time."""
        with unrolled_loop(self._cta.config.block_p, "r") as output_row:
            for name in self._residuals:
                self._load_residual(tile_idx, output_row, name)
            with unrolled_loop(self._cta.num_mma_n, "j") as mma_n:
                values = {name: self._load_channel_value(name, mma_n) for name in self._ops.channel_args}
                with unrolled_loop(2, "second") as half:
                    first = self._cta.accumulator(output_row, mma_n) + half * 2
                    residuals = {name: self._residual_pair(name, mma_n, half) for name in self._residuals}
                    sums = [accumulators[first + e] for e in range(2)]
                    apply_to_columns(self._ops, sums, values, residuals, self._pair, self._words)
                    self._store_pair(mma_n, half)
            emit_call(T.cuda.warp_sync())
            self._copy_row(tile_idx, output_row, "Y", stores_to_global=True)
            emit_call(T.cuda.warp_sync())

    def _load_channel_value(self, name: str, mma_n: Expr) -> list[Expr]:
        """Load a per-channel argument of the lane's two channels of an mma."""
        pair = [self._channel_values[name][e] for e in range(2)]
        self._cta.channel_args.load(name, mma_n * MMA_CHANNELS + self._cta.thread.lane % QUAD_WORDS * 2, pair)
        return pair

    def _residual_pair(self, name: str, mma_n: Expr, half: Expr) -> list[Expr]:
        """Return the registers that hold two elements of a residual."""
        count = 2 // self._rows.elements_per_word
        return [self._residuals[name][(mma_n * 2 + half) * count + word] for word in range(count)]

    def _address(self, mma_n: Expr, half: Expr, e: int) -> Expr:
        """Return the shared-memory address of one of the lane's outputs of an mma."""
        pixel, channel = self._cta.thread.lane // QUAD_WORDS, self._cta.thread.lane % QUAD_WORDS * 2
        channel, row_bytes = mma_n * MMA_CHANNELS + channel + e, self._cta.config.output_row_bytes
        if self._rows.stores_channels_last:  # pixels in the order of the mma
            offset = (pixel + half * 8) * row_bytes + channel * self._rows.element_bytes
        else:
            lane_stride, half_stride = self._cta.smem_layout.pixel_spread
            offset = channel * row_bytes + (pixel * lane_stride + half * half_stride) * self._rows.element_bytes
        return self._cta.output_address + to_uint32(offset)

    def _load_residual(self, tile_idx: Expr, output_row: Expr, name: str) -> None:
        """Load the lane's elements of a row of a residual to registers, through the place of the outputs."""
        self._copy_row(tile_idx, output_row, name, stores_to_global=False)
        emit_call(T.cuda.warp_sync())
        with unrolled_loop(self._cta.num_mma_n, "j") as mma_n, unrolled_loop(2, "second") as half:
            registers = self._residual_pair(name, mma_n, half)
            if self._rows.stores_channels_last:
                suffix = "v2.b32" if len(registers) == 2 else "b32"
                emit_ptx(f"ld.shared.{suffix}", *registers, self._address(mma_n, half, 0))
            elif len(registers) == 2:
                for e in range(2):
                    emit_ptx("ld.shared.b32", registers[e], self._address(mma_n, half, e))
            else:
                for e in range(2):
                    emit_ptx("ld.shared.b16", self._halves[e], self._address(mma_n, half, e))
                word = (mma_n * 2 + half) * len(registers)
                store(self._residuals[name], word, join_halves(self._halves[0], self._halves[1]))
        emit_call(T.cuda.warp_sync())

    def _store_pair(self, mma_n: Expr, half: Expr) -> None:
        """Store two rounded outputs to the warp's shared memory."""
        if self._rows.stores_channels_last:
            store_shared(self._address(mma_n, half, 0), self._words, 2 * self._rows.element_bytes)
        elif self._rows.element_bytes == WORD_BYTES:
            for e in range(2):
                emit_ptx("st.shared.b32", self._address(mma_n, half, e), self._words[e])
        else:
            for e in range(2):
                value = T.Cast("uint16", T.shift_right(self._words[0], T.uint32(16 * e)))
                emit_ptx("st.shared.b16", self._address(mma_n, half, e), value)

    def _copy_row(self, tile_idx: Expr, output_row: Expr, name: str, *, stores_to_global: bool) -> None:
        """Copy a row of the warp's outputs between shared memory and a tensor, in the widest aligned vectors."""
        cta, rows, w, block_n = self._cta, self._rows, self._cta.config.w, self._cta.config.block_n
        contiguous = w.O if rows.stores_channels_last else w.Q if rows.num_phases == 1 else 1
        vector = math.gcd(contiguous, VECTOR_BYTES // rows.element_bytes)
        vectors_per_major = (block_n if rows.stores_channels_last else MMA_PIXELS) // vector
        with unrolled_loop(MMA_PIXELS * block_n // vector // WARP_SIZE, "i") as i:
            vector_idx = i * WARP_SIZE + cta.thread.lane
            major, minor = vector_idx // vectors_per_major, vector_idx % vectors_per_major * vector
            if rows.stores_channels_last:
                pixels_per_pass = max(1, 8 // vectors_per_major)  # eight lanes copy pixels that lie in different banks
                major = major // 8 * 8 + major % pixels_per_pass * (8 // pixels_per_pass) + major % 8 // pixels_per_pass
                lane_stride, half_stride = cta.smem_layout.pixel_spread
                pixel, channel = major % 8 * lane_stride + major // 8 * half_stride, minor
            else:
                pixel, channel = minor, major
            is_inside, index = self._locate(tile_idx, output_row, pixel, channel)
            offset = major * cta.config.output_row_bytes + minor * rows.element_bytes
            address = cta.output_address + to_uint32(offset)
            if stores_to_global:
                load_shared(self._words, address, vector * rows.element_bytes)
                with if_(is_inside):
                    store_global(self._arguments[name], index, self._words, vector)
            else:
                with if_(is_inside):
                    load_global(self._words, self._arguments[name], index, vector)
                    store_shared(address, self._words, vector * rows.element_bytes)

    def _locate(self, tile_idx: Expr, output_row: Expr, pixel: Expr, channel: Expr) -> tuple[Expr, Expr]:
        """Return whether an output of the warp is inside the output tensor, and its index there."""
        config, w = self._cta.config, self._cta.config.w
        plane, p, q = self._cta.tile_origin(tile_idx)
        row, column, channel = p + output_row, q + self._cta.pixel_column(pixel), self._cta.first_channel + channel
        is_inside = logical_and(
            is_below(row, w.P, config.block_p),
            is_below(column, w.Q, config.block_q),
            is_below(channel, w.O, config.block_n),
        )
        if self._rows.stores_channels_last:
            return is_inside, ((plane * w.P + row) * w.Q + column) * w.O + channel
        depth = w.output_size[0]
        image_channel = plane // depth * w.O + channel
        return is_inside, ((image_channel * depth + plane % depth) * w.P + row) * w.Q + column
