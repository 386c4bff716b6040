"""Weight loader of `stem`: filters are copied unchanged, then spread to aligned rows of words with zeros in between."""

from __future__ import annotations

import math

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.arithmetic import ceil_div

from ....tir_builder import (
    Expr,
    emit_ptx,
    if_,
    load_global,
    logical_and,
    serial_loop,
    store,
    store_shared,
    to_uint32,
    unrolled_loop,
)
from .base import CP_ASYNC_MNEMONIC, WEIGHT_ROWS_IN_FLIGHT, StemKernelBase
from .row_layout import MMA_K_WORDS, VECTOR_BYTES, WORD_BYTES


class StemWeightLoader(StemKernelBase):
    """Filters and per-channel epilogue arguments of a tile, copied to shared memory once per block."""

    def load_channel_args(self) -> None:
        """Copy the per-channel epilogue arguments to shared memory."""
        for arg_idx, name in enumerate(self.channel_arg_names):
            with serial_loop(ceil_div(self.block_n, self.num_threads), "i") as i:
                channel = i * self.num_threads + self.thread_idx
                with if_(channel < self.block_n if self.block_n % self.num_threads else True):
                    is_valid = self.first_channel + channel < self.w.O
                    source = T.Select(is_valid, self.first_channel + channel, 0)
                    emit_ptx("ld.global.nc.f32", self.values[0], self.arguments[name].access_ptr("r", offset=source))
                    emit_ptx("st.shared.f32", self.argument_address(arg_idx, channel), self.values[0])

    def copy_filters(self) -> None:
        """Copy the tile's filters to shared memory unchanged, with zeros behind the last filter.

        Each asynchronous copy reads all of its bytes or none. If the filters end within a vector, its elements are
        copied one by one. A GPU would accept a partial copy, but compute-sanitizer's memcheck reports it as an access
        beyond the array.
        """
        vector_elements = VECTOR_BYTES // self.row_layout.element_bytes
        num_vectors = int(self.config.filter_bytes) // VECTOR_BYTES
        first_element, end_element = (
            channels * self.row_layout.filter_elements for channels in (self.first_channel, self.w.O)
        )
        last_vector = (end_element - first_element) // vector_elements
        remaining_elements = end_element % vector_elements
        with serial_loop(ceil_div(num_vectors, self.num_threads), "i") as i:
            vector_idx = i * self.num_threads + self.thread_idx
            is_inside = vector_idx < num_vectors if num_vectors % self.num_threads else True
            with if_(logical_and(is_inside, vector_idx != last_vector if remaining_elements else True)):
                source: Expr = first_element + vector_idx * vector_elements
                valid_bytes: Expr = to_uint32(VECTOR_BYTES)
                if self.w.O % self.block_n:
                    valid_bytes = T.Select(source < end_element, valid_bytes, to_uint32(0))
                    source = T.Select(source < end_element, source, 0)
                destination = self.smem_base[0] + to_uint32(self.filters_offset) + to_uint32(vector_idx * VECTOR_BYTES)
                emit_ptx(
                    CP_ASYNC_MNEMONIC[VECTOR_BYTES],
                    destination,
                    self.arguments["K"].access_ptr("r", offset=source),
                    VECTOR_BYTES,
                    valid_bytes,
                )
        if remaining_elements:
            with if_(logical_and(self.thread_idx < vector_elements, last_vector < num_vectors)):
                source = (
                    T.Select(self.thread_idx < remaining_elements, last_vector * vector_elements + self.thread_idx, 0)
                    + first_element
                )
                load_global(self.packed, self.arguments["K"], source, 1)
                store(self.packed, 0, T.Select(self.thread_idx < remaining_elements, self.packed[0], T.uint32(0)))
                offset_bytes = to_uint32(
                    (last_vector * vector_elements + self.thread_idx) * self.row_layout.element_bytes
                )
                store_shared(
                    self.smem_base[0] + to_uint32(self.filters_offset) + offset_bytes,
                    self.packed,
                    self.row_layout.element_bytes,
                )

    def spread_filters(self) -> None:
        """Write the filters to rows of words, with zeros between filter rows, once for each phase.

        A thread writes the same word position of several channels, so that its source offset is computed once.
        """
        layout = self.row_layout
        words_per_row = layout.num_k_steps * MMA_K_WORDS
        channels_per_pass = max(1, self.num_threads // words_per_row)
        while self.block_n % channels_per_pass:
            channels_per_pass -= 1
        for pass_idx in range(ceil_div(words_per_row, self.num_threads)):
            word_idx = (
                pass_idx * self.num_threads + self.thread_idx % words_per_row
                if channels_per_pass > 1
                else pass_idx * self.num_threads + self.thread_idx
            )
            is_last = (pass_idx + 1) * self.num_threads > words_per_row or channels_per_pass > 1
            with if_(
                self.thread_idx < channels_per_pass * words_per_row - pass_idx * self.num_threads if is_last else True
            ):
                for phase in range(layout.num_phases):
                    self.spread_filter_words(
                        word_idx,
                        self.thread_idx // words_per_row if channels_per_pass > 1 else 0,
                        channels_per_pass,
                        phase,
                    )

    def spread_filter_words(self, word_idx: Expr, first_channel: Expr, channels_per_pass: int, phase: int) -> None:
        """Write one word position of the first channel and of every `channels_per_pass`-th channel after it."""
        layout, element_bytes = self.row_layout, self.row_layout.element_bytes
        filter_row, word_in_row = word_idx // layout.words_per_filter_row, word_idx % layout.words_per_filter_row
        mask: Expr = T.uint32(0)
        for e in range(layout.elements_per_word):
            element = word_in_row * layout.elements_per_word + (e - layout.phase_shift(phase))
            dilation = self.w.dilation[1]
            tap = element // layout.elements_per_pixel // dilation
            is_inside = logical_and(
                filter_row < layout.num_filter_rows,
                element >= 0,
                tap < self.w.S,
                element // layout.elements_per_pixel % dilation == 0 if dilation > 1 else True,
            )
            source = (
                first_channel * layout.filter_elements
                + filter_row * layout.filter_row_elements
                + tap * layout.elements_per_pixel
                + element % layout.elements_per_pixel
            )
            if dilation == 1:
                source = first_channel * layout.filter_elements + filter_row * layout.filter_row_elements + element
            offset_bytes = to_uint32(T.Select(is_inside, source, 0) * element_bytes)
            store(self.source_addresses, e, self.smem_base[0] + to_uint32(self.filters_offset) + offset_bytes)
            bits = (1 << 8 * element_bytes) - 1 << 8 * element_bytes * e
            mask = mask | T.Select(is_inside, T.uint32(bits), T.uint32(0))
        store(self.keep_mask, 0, mask)
        first_row = phase * self.block_n + first_channel
        word_position = layout.word_position(word_idx, self.smem_layout.groups_row_ends, T.Select)
        store(
            self.row_address,
            0,
            self.smem_base[0] + to_uint32(first_row * layout.weight_row_bytes + word_position * WORD_BYTES),
        )

        rows_per_channel = self.block_n // channels_per_pass
        batch_size = math.gcd(rows_per_channel, WEIGHT_ROWS_IN_FLIGHT)
        with serial_loop(rows_per_channel // batch_size, "i") as i:
            with unrolled_loop(batch_size, "j") as j:
                for e in range(layout.elements_per_word):
                    filter_offset = to_uint32(
                        (i * batch_size + j) * (channels_per_pass * layout.filter_elements * element_bytes)
                    )
                    if element_bytes == WORD_BYTES:
                        emit_ptx("ld.shared.b32", self.packed[j], self.source_addresses[e] + filter_offset)
                    else:
                        emit_ptx("ld.shared.b16", self.halves[j * 2 + e], self.source_addresses[e] + filter_offset)
            with unrolled_loop(batch_size, "j") as j:
                if element_bytes == WORD_BYTES:  # weights are rounded to TF32; mma truncates the inputs
                    emit_ptx("cvt.rna.tf32.f32", self.packed[j], T.reinterpret("float32", self.packed[j]))
                else:
                    store(self.packed, j, self.join_halves(j * 2))
                store(self.packed, j, self.packed[j] & self.keep_mask[0])
                address = self.row_address[0] + to_uint32(
                    (i * batch_size + j) * (channels_per_pass * layout.weight_row_bytes)
                )
                emit_ptx("st.shared.b32", address, self.packed[j])
