"""Mainloop of `stem`: fragments are loaded from staged input rows at any pixel offset and multiplied by mma."""

from __future__ import annotations

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.workloads.dtypes import ACCUMULATOR

from ....tir_builder import Expr, Register, allocate, emit_ptx, store, to_uint32, unrolled_loop
from ..gemm.atoms import MmaSyncAtom, ldmatrix_x4
from .cta import StemCta
from .row_layout import MMA_K_WORDS, QUAD_WORDS, VECTOR_BYTES, WORD_BYTES


class StemMainloop:
    """Accumulation of a tile by mma."""

    def __init__(self, cta: StemCta) -> None:
        self._cta, self._atom = cta, MmaSyncAtom(cta.config.w.dtype, cta.config.w.dtype)
        self._quads = list(cta.smem_layout.list_quads())
        self._patterns = list(dict.fromkeys(map(_pattern_of, self._quads)))
        self.accumulators = allocate("accumulators", cta.config.num_accumulators, ACCUMULATOR)
        num_weight_steps = cta.row_layout.num_k_steps if cta.config.weights_in_registers else 1
        self._a_fragment = allocate("a_fragment", self._atom.a_registers, "uint32")
        self._b_fragments = allocate("b_fragments", num_weight_steps * cta.num_mma_n * self._atom.b_registers, "uint32")
        self._weight_address = Register("weight", "uint32")
        self._pixel_addresses = allocate("pixel", len(self._patterns), "uint32")

    def init_lane_addresses(self) -> None:
        """Compute each lane's shared-memory addresses of its pixel, per quad pattern, and of the weight."""
        cta, layout, lane = self._cta, self._cta.row_layout, self._cta.thread.lane
        row = cta.phase * cta.config.block_n + lane % 8 + lane // 16 * 8
        offset = row * layout.weight_row_bytes + lane // 8 % 2 * VECTOR_BYTES
        self._weight_address.set(cta.smem + to_uint32(offset))
        column = cta.pixel_column(lane // QUAD_WORDS * cta.smem_layout.pixel_spread[0])
        first_word = (layout.lead_elements + column * layout.output_step_elements) // layout.elements_per_word
        for pattern_idx, pattern in enumerate(self._patterns):
            offset = pattern[0]
            for word in range(1, QUAD_WORDS):
                offset = T.Select(lane % QUAD_WORDS == word, pattern[word], offset)
            if pattern == tuple(word * WORD_BYTES for word in range(QUAD_WORDS)):
                offset = lane % QUAD_WORDS * WORD_BYTES
            address = cta.smem + to_uint32(cta.inputs_offset + first_word * WORD_BYTES + offset)
            store(self._pixel_addresses, pattern_idx, address)

    def load_all_weights(self) -> None:
        """Load the weight fragments of all k-steps, which stay in registers."""
        for k_step in range(self._cta.row_layout.num_k_steps):
            self._load_weights(k_step, k_step)

    def run(self) -> None:
        """Multiply all k-steps of a tile."""
        cta, layout = self._cta, self._cta.smem_layout
        second_pixel_bytes = layout.pixel_spread[1] * layout.pixel_bytes
        for k_step in range(cta.row_layout.num_k_steps):
            fragment = k_step if cta.config.weights_in_registers else 0
            if not cta.config.weights_in_registers:
                self._load_weights(k_step, fragment)
            with unrolled_loop(cta.config.block_p, "r") as output_row:
                a_registers = [self._a_fragment[e] for e in range(self._atom.a_registers)]
                for e, register in enumerate(a_registers):
                    quad = self._quads[k_step * 2 + e // 2]
                    row_offset = output_row * (cta.config.w.stride[1] * layout.row_bytes)
                    offset = row_offset + (e % 2 * second_pixel_bytes + quad[0])
                    address = self._pixel_addresses[self._patterns.index(_pattern_of(quad))]
                    emit_ptx("ld.shared.b32", register, address + to_uint32(offset))
                with unrolled_loop(cta.num_mma_n, "j") as mma_n:
                    first = cta.accumulator(output_row, mma_n)
                    sums = [self.accumulators[first + e] for e in range(self._atom.num_accumulators)]
                    self._atom.emit(sums, a_registers, self._b_fragment(fragment, mma_n))

    def advance_input_buffer(self, buffer: Expr) -> None:
        """Advance the lanes' addresses to the next tile's input buffer, with wrap-around."""
        num_buffers, input_bytes = int(self._cta.config.num_input_buffers), int(self._cta.config.input_bytes)
        if num_buffers > 1:
            wrap = T.uint32((1 << 32) - (num_buffers - 1) * input_bytes)
            step = T.Select(buffer == num_buffers - 1, wrap, T.uint32(input_bytes))
            for pattern_idx in range(len(self._patterns)):
                store(self._pixel_addresses, pattern_idx, self._pixel_addresses[pattern_idx] + step)

    def _load_weights(self, k_step: int, fragment: int) -> None:
        """Load the weight fragments of a k-step."""
        row_bytes = self._cta.row_layout.weight_row_bytes
        with unrolled_loop(self._cta.config.block_n // 16, "j") as pair:
            offset = pair * (16 * row_bytes) + k_step * MMA_K_WORDS * WORD_BYTES
            registers = self._b_fragment(fragment, pair * 2, 2)
            ldmatrix_x4(registers, self._weight_address.value + to_uint32(offset))

    def _b_fragment(self, fragment: int, mma_n: Expr, count: int = 1) -> list[Expr]:
        size, first = self._atom.b_registers, fragment * self._cta.num_mma_n
        return [self._b_fragments[(first + mma_n) * size + e] for e in range(size * count)]


def _pattern_of(quad: tuple[int, ...]) -> tuple[int, ...]:
    """Return the offsets of a quad's words relative to the first."""
    return tuple(word_offset - quad[0] for word_offset in quad)
