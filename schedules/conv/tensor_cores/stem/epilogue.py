"""Epilogue of `stem`: applied in registers; each warp arranges its output rows in shared memory and stores them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

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
    load_global,
    load_shared,
    logical_and,
    pack,
    store,
    store_global,
    store_shared,
    to_uint32,
    unpack,
    unrolled_loop,
)
from ..gemm.epilogue_ops import EpilogueOps
from .cta import StemCta, join_halves
from .row_layout import MMA_CHANNELS, MMA_PIXELS, QUAD_WORDS, VECTOR_BYTES, WORD_BYTES


class StemEpilogue:
    """The start and the end of a tile: what accumulators begin with, the epilogue, and the store to global memory.

    Args:
        cta: The CTA.
        arguments: Argument buffers by name.
    """

    def __init__(self, cta: StemCta, arguments: Mapping[str, Buffer]) -> None:
        self._cta, self._arguments, self._rows, ops = (
            cta,
            arguments,
            cta.row_layout,
            EpilogueOps.from_workload(cta.config.w),
        )
        self._channel_args, self._residuals = ops.channel_args, ops.residuals
        # Accumulators start with the bias if it is the first operation of the epilogue.
        first_op = ops.ops[0] if ops.ops else None
        self._starts_with_bias = first_op is not None and first_op.is_addition and first_op.argument_kind == "channel"
        # ReLU is not fused into the conversion, which rounds to the storage dtype one or two elements at a time.
        self._ops, self._dtype = EpilogueOps(ops.ops[int(self._starts_with_bias) :], "float32"), ops.dtype
        self._argument_pairs = {name: allocate(name, 2, ACCUMULATOR) for name in self._channel_args}
        self._residual_words = {name: allocate(name, self._count_words(name), "uint32") for name in self._residuals}
        self._words, self._halves = (
            allocate("words", VECTOR_BYTES // WORD_BYTES, "uint32"),
            allocate("pair", 2, "uint16"),
        )

    def init_accumulators(self, accumulators: Buffer) -> None:
        """Set the accumulators to zero, or to the bias."""
        if not self._starts_with_bias:
            fill_zeros(accumulators, int(self._cta.config.num_accumulators))
            return
        with unrolled_loop(self._cta.num_mma_n, "j") as mma_n:
            bias = self._load_argument_pair(0, mma_n)
            with unrolled_loop(self._cta.config.block_p, "r") as output_row, unrolled_loop(2, "second") as half:
                for e in range(2):
                    store(accumulators, self._cta.accumulator(output_row, mma_n) + half * 2 + e, bias[e])

    def store(self, accumulators: Buffer, tile_idx: Expr) -> None:
        """Apply the epilogue to a tile's accumulators and store the tile, one row at a time."""
        num_mma_n = self._cta.num_mma_n
        with unrolled_loop(self._cta.config.block_p, "r") as output_row:
            for name in self._residuals:
                self._copy_row(tile_idx, output_row, name, stores_to_global=False)
                emit_call(T.cuda.warp_sync())
                if name != self._residuals[-1]:  # the last residual is read pair by pair, in place of the outputs
                    with unrolled_loop(num_mma_n, "j") as mma_n, unrolled_loop(2, "second") as half:
                        self._load_residual_pair(name, mma_n, half)
                    emit_call(T.cuda.warp_sync())
            with unrolled_loop(num_mma_n, "j") as mma_n:
                for arg_idx in range(self._starts_with_bias, len(self._channel_args)):
                    self._load_argument_pair(arg_idx, mma_n)
                with unrolled_loop(2, "second") as half:
                    for name in self._residuals[-1:]:
                        self._load_residual_pair(name, mma_n, half)
                    first = self._cta.accumulator(output_row, mma_n) + half * 2
                    pair = [self._apply_ops(accumulators[first + e], mma_n, half, e) for e in range(2)]
                    self._store_pair(mma_n, half, pair)
            emit_call(T.cuda.warp_sync())
            self._copy_row(tile_idx, output_row, "Y", stores_to_global=True)
            emit_call(T.cuda.warp_sync())

    def _load_argument_pair(self, arg_idx: int, mma_n: Expr) -> list[Expr]:
        pair = self._argument_pairs[self._channel_args[arg_idx]]
        self._cta.load_argument_pair(arg_idx, mma_n, [pair[0], pair[1]])
        return [pair[0], pair[1]]

    def _apply_ops(self, value: Expr, mma_n: Expr, half: Expr, e: int) -> Expr:
        """Return an accumulator after the epilogue, without the bias that initialized it."""

        def read(name: str) -> Expr:
            if name in self._argument_pairs:
                return self._argument_pairs[name][e]
            first, count = self._word_range(name, mma_n, half)
            words = [self._residual_words[name][first + word] for word in range(count)]
            return unpack(words, 2, self._dtype)[e]

        return self._ops.apply(value, read)

    def _count_words(self, name: str) -> int:
        """Return the registers of a residual: two elements for the last residual, a whole row for the others."""
        num_pairs = 1 if name == self._residuals[-1] else self._cta.num_mma_n * 2
        return num_pairs * 2 // self._rows.elements_per_word

    def _word_range(self, name: str, mma_n: Expr, half: Expr) -> tuple[Expr, int]:
        """Return the first of the registers that hold the lane's two elements of a residual, and their number."""
        count = 2 // self._rows.elements_per_word
        return 0 if name == self._residuals[-1] else (mma_n * 2 + half) * count, count

    def _address(self, mma_n: Expr, half: Expr, e: int) -> Expr:
        """Return the shared-memory address of one of the lane's outputs of an mma."""
        pixel, channel = self._cta.thread.lane // QUAD_WORDS, self._cta.thread.lane % QUAD_WORDS * 2
        channel, row_bytes = mma_n * MMA_CHANNELS + channel + e, int(self._cta.config.output_row_bytes)
        if self._rows.channels_last:  # pixels in the order of the mma
            offset = (pixel + half * 8) * row_bytes + channel * self._rows.element_bytes
        else:
            lane_stride, half_stride = self._cta.smem_layout.pixel_spread
            offset = channel * row_bytes + (pixel * lane_stride + half * half_stride) * self._rows.element_bytes
        return self._cta.output_address + to_uint32(offset)

    def _load_residual_pair(self, name: str, mma_n: Expr, half: Expr) -> None:
        """Load two elements of a residual from the warp's shared memory to registers."""
        element_bytes = self._rows.element_bytes
        if self._rows.channels_last:
            load_shared(self._words, self._address(mma_n, half, 0), 2 * element_bytes)
        elif element_bytes == WORD_BYTES:
            for e in range(2):
                emit_ptx("ld.shared.b32", self._words[e], self._address(mma_n, half, e))
        else:
            for e in range(2):
                emit_ptx("ld.shared.b16", self._halves[e], self._address(mma_n, half, e))
            store(self._words, 0, join_halves(self._halves[0], self._halves[1]))
        first, count = self._word_range(name, mma_n, half)
        for word in range(count):
            store(self._residual_words[name], first + word, self._words[word])

    def _store_pair(self, mma_n: Expr, half: Expr, values: Sequence[Expr]) -> None:
        """Round two outputs and store them to the warp's shared memory."""
        if self._rows.channels_last:
            pack(self._words, 0, values, self._dtype)
            store_shared(self._address(mma_n, half, 0), self._words, 2 * self._rows.element_bytes)
            return
        for e, value in enumerate(values):
            pack(self._words, 0, [value], self._dtype)
            store_shared(self._address(mma_n, half, e), self._words, self._rows.element_bytes)

    def _copy_row(self, tile_idx: Expr, output_row: Expr, name: str, *, stores_to_global: bool) -> None:
        """Copy a row of the warp's outputs between shared memory and a tensor, in the widest aligned vectors."""
        cta, rows, w, block_n = self._cta, self._rows, self._cta.config.w, int(self._cta.config.block_n)
        contiguous = w.O if rows.channels_last else w.Q if rows.num_phases == 1 else 1
        vector = math.gcd(contiguous, VECTOR_BYTES // rows.element_bytes)
        vectors_per_major = (block_n if rows.channels_last else MMA_PIXELS) // vector
        with unrolled_loop(MMA_PIXELS * block_n // vector // WARP_SIZE, "i") as i:
            vector_idx = i * WARP_SIZE + cta.thread.lane
            major, minor = vector_idx // vectors_per_major, vector_idx % vectors_per_major * vector
            if rows.channels_last:
                pixels_per_pass = max(1, 8 // vectors_per_major)  # eight lanes copy pixels that lie in different banks
                major = major // 8 * 8 + major % pixels_per_pass * (8 // pixels_per_pass) + major % 8 // pixels_per_pass
                lane_stride, half_stride = cta.smem_layout.pixel_spread
                pixel, channel = major % 8 * lane_stride + major // 8 * half_stride, minor
            else:
                pixel, channel = minor, major
            is_inside, index = self._locate(tile_idx, output_row, pixel, channel)
            offset = major * int(cta.config.output_row_bytes) + minor * rows.element_bytes
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
        n, p, q = self._cta.tile_origin(tile_idx)
        row, column, channel = p + output_row, q + self._cta.pixel_column(pixel), self._cta.first_channel + channel
        is_inside = logical_and(
            row < w.P if w.P % config.block_p else True,
            column < w.Q if w.Q % int(config.block_q) else True,
            channel < w.O if w.O % int(config.block_n) else True,
        )
        if self._rows.channels_last:
            return is_inside, ((n * w.P + row) * w.Q + column) * w.O + channel
        return is_inside, ((n * w.O + channel) * w.P + row) * w.Q + column
