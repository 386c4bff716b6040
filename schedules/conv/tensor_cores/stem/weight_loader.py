"""Weight loader of `stem`: filters are copied unchanged, then spread to aligned rows of words with zeros in between."""

from __future__ import annotations

import math

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.arithmetic import ceil_div

from ....tir_builder import (
    Buffer,
    Expr,
    Register,
    allocate,
    emit_ptx,
    if_,
    items_loop,
    load_global,
    logical_and,
    serial_loop,
    store,
    store_shared,
    to_uint32,
    unrolled_loop,
)
from ..gemm.cp_async import cp_async
from .cta import StemCta, join_halves
from .row_layout import MMA_K_WORDS, VECTOR_BYTES, WORD_BYTES

ROWS_IN_FLIGHT = 8  # weight rows that a thread loads at a time


def copy_filters(cta: StemCta, filters: Buffer) -> None:
    """Copy the tile's filters to shared memory unchanged, with zeros behind the last filter.

    Each asynchronous copy reads all of its bytes or none. If the filters end within a vector, its elements are copied
    one by one. A GPU would accept a partial copy, but compute-sanitizer's memcheck reports it as an access beyond the
    array.
    """
    rows, w, thread, num_threads = cta.row_layout, cta.config.w, cta.thread.thread, cta.num_threads
    vector = VECTOR_BYTES // rows.element_bytes
    num_vectors = cta.config.filter_bytes // VECTOR_BYTES
    first, end = (channels * rows.filter_elements for channels in (cta.first_channel, w.O))
    last_vector, rest = (end - first) // vector, end % vector
    smem = cta.smem + to_uint32(cta.filters_offset)
    with items_loop(num_vectors, thread, num_threads) as index, if_(index != last_vector if rest else True):
        source, is_inside = first + index * vector, True
        if w.O % cta.config.block_n:
            source, is_inside = T.Select(source < end, source, 0), source < end
        destination = smem + to_uint32(index * VECTOR_BYTES)
        cp_async(destination, filters, source, VECTOR_BYTES, is_inside, prefetches_l2=False)
    if rest:
        word = allocate("filter_end", 1, "uint32")
        with if_(logical_and(thread < vector, last_vector < num_vectors)):
            load_global(word, filters, T.Select(thread < rest, last_vector * vector + thread, 0) + first, 1)
            store(word, 0, T.Select(thread < rest, word[0], T.uint32(0)))
            offset = to_uint32((last_vector * vector + thread) * rows.element_bytes)
            store_shared(smem + offset, word, rows.element_bytes)


def spread_filters(cta: StemCta) -> None:
    """Write the filters to rows of words, with zeros between filter rows, once for each phase.

    A thread writes the same word position of several channels, so that its source offset is computed once.
    """
    block_n, thread, num_threads = cta.config.block_n, cta.thread.thread, cta.num_threads
    words_per_row = cta.row_layout.num_k_steps * MMA_K_WORDS
    channels_per_pass = max(1, num_threads // words_per_row)
    while block_n % channels_per_pass:
        channels_per_pass -= 1
    spread = _FilterSpread(cta, channels_per_pass)
    for i in range(ceil_div(words_per_row, num_threads)):
        shares_row = channels_per_pass > 1
        word = i * num_threads + (thread % words_per_row if shares_row else thread)
        is_last = (i + 1) * num_threads > words_per_row or shares_row
        with if_(thread < channels_per_pass * words_per_row - i * num_threads if is_last else True):
            for phase in range(cta.row_layout.num_phases):
                spread.write(word, thread // words_per_row if shares_row else 0, phase)


class _FilterSpread:
    """Writes one word position of every `channels_per_pass`-th channel."""

    def __init__(self, cta: StemCta, channels_per_pass: int) -> None:
        self._cta, self._channels_per_pass = cta, channels_per_pass
        self._sources, self._keep_mask = allocate("sources", 2, "uint32"), Register("keep", "uint32")
        self._row_address, self._words = Register("row", "uint32"), allocate("spread", ROWS_IN_FLIGHT, "uint32")
        self._halves = allocate("spread_halves", 2 * ROWS_IN_FLIGHT, "uint16")

    def write(self, word: Expr, first_channel: Expr, phase: int) -> None:
        """Write a word of the first channel and of every `channels_per_pass`-th channel after it."""
        self._locate_sources(word, first_channel, phase)
        cta, rows = self._cta, self._cta.row_layout
        first_row = phase * cta.config.block_n + first_channel
        position = rows.word_position(word, cta.smem_layout.groups_row_ends, T.Select)
        row_offset = first_row * rows.weight_row_bytes + position * WORD_BYTES
        self._row_address.set(cta.smem + to_uint32(row_offset))
        rows_per_channel = cta.config.block_n // self._channels_per_pass
        batch = math.gcd(rows_per_channel, ROWS_IN_FLIGHT)
        with serial_loop(rows_per_channel // batch, "i") as i:
            with unrolled_loop(batch, "j") as j:
                self._load(i * batch + j, j)
            with unrolled_loop(batch, "j") as j:
                self._store(i * batch + j, j)

    def _locate_sources(self, word: Expr, first_channel: Expr, phase: int) -> None:
        """Compute the addresses of a word's elements, and the mask of those that are not zero."""
        rows, w = self._cta.row_layout, self._cta.config.w
        element_bytes, dilation = rows.element_bytes, w.dilation[-1]
        filter_row, word_in_row = word // rows.words_per_filter_row, word % rows.words_per_filter_row
        mask: Expr = T.uint32(0)
        for e in range(rows.elements_per_word):
            element = word_in_row * rows.elements_per_word + (e - rows.phase_shift(phase))
            tap = element // rows.elements_per_pixel // dilation
            is_inside = logical_and(
                filter_row < rows.num_filter_rows,
                element >= 0,
                tap < w.S,
                element // rows.elements_per_pixel % dilation == 0 if dilation > 1 else True,
            )
            source = first_channel * rows.filter_elements + filter_row * rows.filter_row_elements
            if dilation == 1:
                source = source + element
            else:
                source = source + tap * rows.elements_per_pixel + element % rows.elements_per_pixel
            offset = to_uint32(T.Select(is_inside, source, 0) * element_bytes)
            store(self._sources, e, self._cta.smem + to_uint32(self._cta.filters_offset) + offset)
            bits = (1 << 8 * element_bytes) - 1 << 8 * element_bytes * e
            mask = mask | T.Select(is_inside, T.uint32(bits), T.uint32(0))
        self._keep_mask.set(mask)

    def _load(self, row: Expr, j: Expr) -> None:
        """Load the elements of a word of a channel."""
        rows = self._cta.row_layout
        offset = to_uint32(row * (self._channels_per_pass * rows.filter_elements * rows.element_bytes))
        for e in range(rows.elements_per_word):
            if rows.element_bytes == WORD_BYTES:
                emit_ptx("ld.shared.b32", self._words[j], self._sources[e] + offset)
            else:
                emit_ptx("ld.shared.b16", self._halves[j * 2 + e], self._sources[e] + offset)

    def _store(self, row: Expr, j: Expr) -> None:
        """Store a word of a channel, with zeros for elements that the filter does not have."""
        rows = self._cta.row_layout
        if rows.element_bytes == WORD_BYTES:  # weights are rounded to TF32; mma truncates the inputs
            emit_ptx("cvt.rna.tf32.f32", self._words[j], T.reinterpret("float32", self._words[j]))
        else:
            store(self._words, j, join_halves(self._halves[j * 2], self._halves[j * 2 + 1]))
        store(self._words, j, self._words[j] & self._keep_mask.value)
        offset = to_uint32(row * (self._channels_per_pass * rows.weight_row_bytes))
        emit_ptx("st.shared.b32", self._row_address.value + offset, self._words[j])
