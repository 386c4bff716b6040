"""Mainloop of `stem`: fragments are loaded from staged input rows at any pixel offset and multiplied by mma."""

from __future__ import annotations

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from ....tir_builder import Expr, emit_ptx, fill_zeros, store, to_uint32, unrolled_loop
from .base import StemKernelBase
from .row_layout import MMA_K_WORDS, QUAD_WORDS, VECTOR_BYTES, WORD_BYTES

_MMA_SHAPE_AND_TYPE = {"float16": ("m16n8k16", "f16"), "bfloat16": ("m16n8k16", "bf16"), "tf32": ("m16n8k8", "tf32")}


class StemMainloop(StemKernelBase):
    """Accumulation of a tile by mma."""

    def init_lane_addresses(self) -> None:
        """Compute each lane's shared-memory addresses of its pixel, per quad pattern, and of the weight."""
        layout, lane_number = self.row_layout, self.lane_idx
        row = self.phase_idx * self.block_n + lane_number % 8 + lane_number // 16 * 8
        offset = row * layout.weight_row_bytes + lane_number // 8 % 2 * VECTOR_BYTES
        store(self.weight_address, 0, self.smem_base[0] + to_uint32(offset))
        pixel_column = self.pixel_column(lane_number // QUAD_WORDS * self.smem_layout.pixel_spread[0])
        first_word_offset = (
            (layout.lead_elements + pixel_column * layout.output_step_elements) // layout.elements_per_word * WORD_BYTES
        )
        for pattern_idx, pattern in enumerate(self.quad_patterns):
            offset = pattern[0]
            for word in range(1, QUAD_WORDS):
                offset = T.Select(lane_number % QUAD_WORDS == word, pattern[word], offset)
            if pattern == tuple(word * WORD_BYTES for word in range(QUAD_WORDS)):
                offset = lane_number % QUAD_WORDS * WORD_BYTES
            store(
                self.pixel_address,
                pattern_idx,
                self.smem_base[0] + to_uint32(self.inputs_offset + first_word_offset + offset),
            )

    def init_accumulators(self) -> None:
        """Set the accumulators to zero, or to the bias."""
        if not self.starts_with_bias:
            fill_zeros(self.accum, int(self.config.num_accumulators))
            return
        with unrolled_loop(self.num_mma_n, "j") as mma_n:
            self.load_channel_arg(0, mma_n)
            bias_regs = self.channel_arg_regs[self.channel_arg_names[0]]
            with unrolled_loop(self.config.block_p, "r") as output_row, unrolled_loop(2, "second") as second:
                for e in range(2):
                    store(self.accum, self.accum_index(output_row, mma_n) + second * 2 + e, bias_regs[e])

    def load_weight_fragments(self, k_step: int, fragment_slot: int) -> None:
        """Load the weight fragments of a k-step."""
        with unrolled_loop(self.block_n // 16, "j") as mma_n_pair:
            address = self.weight_address[0] + to_uint32(
                mma_n_pair * (16 * self.row_layout.weight_row_bytes) + k_step * MMA_K_WORDS * WORD_BYTES
            )
            first_reg = fragment_slot * self.num_mma_n * 2 + mma_n_pair * 4
            emit_ptx(
                "ldmatrix.sync.aligned.m8n8.x4.shared.b16", *(self.b_frag[first_reg + e] for e in range(4)), address
            )

    def run_mainloop(self) -> None:
        """Multiply all k-steps of a tile."""
        layout = self.smem_layout
        shape, dtype = _MMA_SHAPE_AND_TYPE[self.w.dtype]
        mnemonic = f"mma.sync.aligned.{shape}.row.col.f32.{dtype}.{dtype}.f32"
        quads = list(layout.list_quads())
        second_pixel_bytes = layout.pixel_spread[1] * layout.pixel_bytes
        for k_step in range(self.row_layout.num_k_steps):
            fragment_slot = k_step if self.config.weights_in_registers else 0
            if not self.config.weights_in_registers:
                self.load_weight_fragments(k_step, fragment_slot)
            with unrolled_loop(self.config.block_p, "r") as output_row:
                for e in range(4):
                    quad = quads[k_step * 2 + e // 2]
                    pattern_idx = self.quad_patterns.index(tuple(word_offset - quad[0] for word_offset in quad))
                    offset = output_row * (self.w.stride[0] * layout.row_bytes) + (e % 2 * second_pixel_bytes + quad[0])
                    emit_ptx("ld.shared.b32", self.a_frag[e], self.pixel_address[pattern_idx] + to_uint32(offset))
                with unrolled_loop(self.num_mma_n, "j") as mma_n:
                    accum_regs = [self.accum[self.accum_index(output_row, mma_n) + e] for e in range(4)]
                    b_regs = [self.b_frag[(fragment_slot * self.num_mma_n + mma_n) * 2 + e] for e in range(2)]
                    emit_ptx(mnemonic, *accum_regs, *(self.a_frag[e] for e in range(4)), *b_regs, *accum_regs)

    def advance_input_buffer(self, buffer: Expr) -> None:
        """Advance the lanes' addresses to the next tile's input buffer, with wrap-around."""
        if self.num_input_buffers > 1:
            wrap_offset = T.uint32((1 << 32) - (self.num_input_buffers - 1) * self.input_bytes)
            buffer_step = T.Select(buffer == self.num_input_buffers - 1, wrap_offset, T.uint32(self.input_bytes))
            for pattern_idx in range(len(self.quad_patterns)):
                store(self.pixel_address, pattern_idx, self.pixel_address[pattern_idx] + buffer_step)
