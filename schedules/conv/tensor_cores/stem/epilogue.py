"""Epilogue of `stem`: applied in registers; each warp arranges its output rows in shared memory and stores them."""

from __future__ import annotations

import math

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.target import WARP_SIZE
from tvmconv.workloads import epilogue

from ....tir_builder import (
    Expr,
    emit_call,
    emit_ptx,
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
from .base import StemKernelBase
from .row_layout import MMA_CHANNELS, MMA_PIXELS, QUAD_WORDS, VECTOR_BYTES, WORD_BYTES


class StemEpilogue(StemKernelBase):
    """The end of a tile: the epilogue and the store to global memory."""

    def apply_and_store(self, tile_idx: Expr) -> None:
        """Apply the epilogue to a tile's accumulators and store the tile, one row at a time."""
        with unrolled_loop(self.config.block_p, "r") as output_row:
            for name in self.residual_names:
                self.copy_output_row(tile_idx, output_row, name, stores_to_global=False)
                emit_call(T.cuda.warp_sync())
                if name != self.residual_names[-1]:  # the last residual is read pair by pair, in place of the outputs
                    with unrolled_loop(self.num_mma_n, "j") as mma_n, unrolled_loop(2, "second") as pixel_half:
                        self.load_residual_pair(name, mma_n, pixel_half)
                    emit_call(T.cuda.warp_sync())
            with unrolled_loop(self.num_mma_n, "j") as mma_n:
                for arg_idx in range(self.starts_with_bias, len(self.channel_arg_names)):
                    self.load_channel_arg(arg_idx, mma_n)
                with unrolled_loop(2, "second") as pixel_half:
                    for name in self.residual_names[-1:]:
                        self.load_residual_pair(name, mma_n, pixel_half)
                    self.store_output_pair(
                        mma_n, pixel_half, [self.apply_epilogue_ops(output_row, mma_n, pixel_half, e) for e in range(2)]
                    )
            emit_call(T.cuda.warp_sync())
            self.copy_output_row(tile_idx, output_row, "Y", stores_to_global=True)
            emit_call(T.cuda.warp_sync())

    def apply_epilogue_ops(self, output_row: Expr, mma_n: Expr, pixel_half: Expr, channel_idx: int) -> Expr:
        """Return an accumulator after the epilogue, without the bias that initialized it."""

        def read_argument(name: str) -> Expr:
            if name in self.channel_arg_regs:
                return self.channel_arg_regs[name][channel_idx]
            return unpack(self.residual_words(name, mma_n, pixel_half), 2, self.w.storage)[channel_idx]

        return epilogue.apply_to_expression(
            self.w.epilogue[self.starts_with_bias :],
            self.accum[self.accum_index(output_row, mma_n) + pixel_half * 2 + channel_idx],
            read_argument,
        )

    def output_address(self, mma_n: Expr, pixel_half: Expr, channel_idx: int) -> Expr:
        """Return the shared-memory address of one of the lane's outputs of an mma."""
        pixel = self.lane_idx // QUAD_WORDS
        channel = mma_n * MMA_CHANNELS + self.lane_idx % QUAD_WORDS * 2 + channel_idx
        if self.row_layout.channels_last:  # pixels in the order of the mma
            offset = (pixel + pixel_half * 8) * self.output_row_bytes + channel * self.row_layout.element_bytes
        else:
            lane_stride, half_stride = self.smem_layout.pixel_spread
            offset = (
                channel * self.output_row_bytes
                + (pixel * lane_stride + pixel_half * half_stride) * self.row_layout.element_bytes
            )
        return self.output_base + to_uint32(offset)

    @property
    def output_base(self) -> Expr:
        """Shared-memory address at which the warp arranges its outputs."""
        return self.smem_base[0] + to_uint32(self.output_offset) + to_uint32(self.warp_idx * self.output_bytes)

    def residual_words(self, name: str, mma_n: Expr, pixel_half: Expr) -> list[Expr]:
        """Return the registers that hold the lane's two elements of a residual for an mma."""
        num_words = 2 // self.row_layout.elements_per_word
        first_word = 0 if name == self.residual_names[-1] else (mma_n * 2 + pixel_half) * num_words
        return [self.residual_regs[name][first_word + word] for word in range(num_words)]

    def load_residual_pair(self, name: str, mma_n: Expr, pixel_half: Expr) -> None:
        """Load two elements of a residual from the warp's shared memory to registers."""
        element_bytes, num_words = self.row_layout.element_bytes, 2 // self.row_layout.elements_per_word
        if self.row_layout.channels_last:
            load_shared(self.packed, self.output_address(mma_n, pixel_half, 0), 2 * element_bytes)
        elif element_bytes == WORD_BYTES:
            for e in range(2):
                emit_ptx("ld.shared.b32", self.packed[e], self.output_address(mma_n, pixel_half, e))
        else:
            for e in range(2):
                emit_ptx("ld.shared.b16", self.halves[e], self.output_address(mma_n, pixel_half, e))
            store(self.packed, 0, self.join_halves(0))
        first_word = 0 if name == self.residual_names[-1] else (mma_n * 2 + pixel_half) * num_words
        for word in range(num_words):
            store(self.residual_regs[name], first_word + word, self.packed[word])

    def store_output_pair(self, mma_n: Expr, pixel_half: Expr, values: list[Expr]) -> None:
        """Round two outputs and store them to the warp's shared memory."""
        if self.row_layout.channels_last:
            pack(self.packed, 0, values, self.w.storage)
            store_shared(self.output_address(mma_n, pixel_half, 0), self.packed, 2 * self.row_layout.element_bytes)
            return
        for e, value in enumerate(values):
            pack(self.packed, 0, [value], self.w.storage)
            store_shared(self.output_address(mma_n, pixel_half, e), self.packed, self.row_layout.element_bytes)

    def copy_output_row(self, tile_idx: Expr, output_row: Expr, name: str, *, stores_to_global: bool) -> None:
        """Copy a row of the warp's outputs between shared memory and a tensor, in the widest aligned vectors."""
        w, layout = self.w, self.row_layout
        n, p, q = self.compute_tile_origin(tile_idx)
        row_idx = p + output_row
        contiguous_elements = w.O if layout.channels_last else w.Q if layout.num_phases == 1 else 1
        vector_elements = math.gcd(contiguous_elements, VECTOR_BYTES // layout.element_bytes)
        vectors_per_major = (self.block_n if layout.channels_last else MMA_PIXELS) // vector_elements
        with unrolled_loop(MMA_PIXELS * self.block_n // vector_elements // WARP_SIZE, "i") as i:
            vector_idx = i * WARP_SIZE + self.lane_idx
            major, minor = vector_idx // vectors_per_major, vector_idx % vectors_per_major * vector_elements
            if layout.channels_last:
                pixels_per_pass = max(1, 8 // vectors_per_major)  # eight lanes copy pixels that lie in different banks
                major = major // 8 * 8 + major % pixels_per_pass * (8 // pixels_per_pass) + major % 8 // pixels_per_pass
                lane_stride, half_stride = self.smem_layout.pixel_spread
                pixel, channel = major % 8 * lane_stride + major // 8 * half_stride, minor
            else:
                pixel, channel = minor, major
            column, channel = q + self.pixel_column(pixel), self.first_channel + channel
            is_inside = logical_and(
                row_idx < w.P if w.P % self.config.block_p else True,
                column < w.Q if w.Q % int(self.config.block_q) else True,
                channel < w.O if w.O % self.block_n else True,
            )
            if layout.channels_last:
                index = ((n * w.P + row_idx) * w.Q + column) * w.O + channel
            else:
                index = ((n * w.O + channel) * w.P + row_idx) * w.Q + column
            smem_address = self.output_base + to_uint32(major * self.output_row_bytes + minor * layout.element_bytes)
            if stores_to_global:
                load_shared(self.packed, smem_address, vector_elements * layout.element_bytes)
                with if_(is_inside):
                    store_global(self.arguments[name], index, self.packed, vector_elements)
            else:
                with if_(is_inside):
                    load_global(self.packed, self.arguments[name], index, vector_elements)
                    store_shared(smem_address, self.packed, vector_elements * layout.element_bytes)
