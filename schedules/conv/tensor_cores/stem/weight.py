"""How `stem` brings the weight: copied as it is, and spread to rows of words with the zeros that alignment asks for."""

from __future__ import annotations

import math

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.arithmetic import ceil_div

from ....program import Expr, both, load_global, ptx, serial, store, store_shared, uint, unrolled, when
from .block import ASYNC_COPY, WEIGHT_ROWS, Block
from .lines import STEP_WORDS, VECTOR, WORD


class Weight(Block):
    """The tile's filters, and what the epilogue has for each of its channels, in shared memory once a block."""

    def _stage_arguments(self) -> None:
        """Copy what the epilogue has for each channel to shared memory."""
        for index, name in enumerate(self.of_channels):
            with serial(ceil_div(self.channels, self.threads), "i") as i:
                channel = i * self.threads + self.thread
                with when(channel < self.channels if self.channels % self.threads else True):
                    known = self.first_channel + channel < self.w.O
                    source = T.Select(known, self.first_channel + channel, 0)
                    ptx("ld.global.nc.f32", self.values[0], self.arguments[name].access_ptr("r", offset=source))
                    ptx("st.shared.f32", self._argument(index, channel), self.values[0])

    def _copy_weight(self) -> None:
        """Copy the tile's filters to shared memory as they are; behind the last of all filters are zeros.

        A copy is of all its bytes or of none: where filters end within a vector, its elements are copied one by one.
        An asynchronous copy of a part would do on a GPU, but memcheck takes it to read all, beyond the array.
        """
        vector = VECTOR // self.lines.size  # elements
        vectors = int(self.tile.filter_bytes) // VECTOR
        first, end = (channels * self.lines.filter_size for channels in (self.first_channel, self.w.O))
        last, rest = (end - first) // vector, end % vector  # the vector that the filters end within, if they do
        with serial(ceil_div(vectors, self.threads), "i") as i:
            unit = i * self.threads + self.thread
            inside = unit < vectors if vectors % self.threads else True
            with when(both(inside, unit != last if rest else True)):
                source: Expr = first + unit * vector
                known: Expr = uint(VECTOR)
                if self.w.O % self.channels:
                    known = T.Select(source < end, known, uint(0))
                    source = T.Select(source < end, source, 0)
                destination = self.base[0] + uint(self.filters_at) + uint(unit * VECTOR)
                ptx(ASYNC_COPY[VECTOR], destination, self.arguments["K"].access_ptr("r", offset=source), VECTOR, known)
        if rest:
            with when(both(self.thread < vector, last < vectors)):
                source = T.Select(self.thread < rest, last * vector + self.thread, 0) + first
                load_global(self.words, self.arguments["K"], source, 1)
                store(self.words, 0, T.Select(self.thread < rest, self.words[0], T.uint32(0)))
                place = uint((last * vector + self.thread) * self.lines.size)
                store_shared(self.base[0] + uint(self.filters_at) + place, self.words, self.lines.size)

    def _spread_weight(self) -> None:
        """Put the filters in rows of words, with zeros between their lines, once for each phase.

        A thread has one word of some channels' rows: where that comes from is told once.
        """
        lines = self.lines
        row_words = lines.steps * STEP_WORDS
        together = max(1, self.threads // row_words)  # channels at a time
        while self.channels % together:
            together -= 1
        for part in range(ceil_div(row_words, self.threads)):
            word = part * self.threads + self.thread % row_words if together > 1 else part * self.threads + self.thread
            last = (part + 1) * self.threads > row_words or together > 1
            with when(self.thread < together * row_words - part * self.threads if last else True):
                for phase in range(lines.phases):
                    self._spread_words(word, self.thread // row_words if together > 1 else 0, together, phase)

    def _spread_words(self, word: Expr, first: Expr, together: int, phase: int) -> None:
        """Put a word in the rows of the first channel and of every so many-th after it."""
        lines, size = self.lines, self.lines.size
        line, within = word // lines.line_words, word % lines.line_words
        keep: Expr = T.uint32(0)
        for e in range(lines.pair):
            element = within * lines.pair + (e - lines.shift(phase))
            dilation = self.w.dilation[1]
            tap = element // lines.pixel // dilation
            there = both(
                line < lines.filter_lines,
                element >= 0,
                tap < self.w.S,
                element // lines.pixel % dilation == 0 if dilation > 1 else True,
            )
            source = first * lines.filter_size + line * lines.taps + tap * lines.pixel + element % lines.pixel
            if dilation == 1:
                source = first * lines.filter_size + line * lines.taps + element
            place = uint(T.Select(there, source, 0) * size)
            store(self.sources, e, self.base[0] + uint(self.filters_at) + place)
            bits = (1 << 8 * size) - 1 << 8 * size * e
            keep = keep | T.Select(there, T.uint32(bits), T.uint32(0))
        store(self.keep, 0, keep)
        row = phase * self.channels + first
        position = lines.position(word, self.placed.ends, T.Select)
        store(self.row, 0, self.base[0] + uint(row * lines.weight_row_bytes + position * WORD))

        rows = self.channels // together
        batch = math.gcd(rows, WEIGHT_ROWS)
        with serial(rows // batch, "i") as i:
            with unrolled(batch, "j") as j:
                for e in range(lines.pair):
                    filters = uint((i * batch + j) * (together * lines.filter_size * size))
                    if size == WORD:
                        ptx("ld.shared.b32", self.words[j], self.sources[e] + filters)
                    else:
                        ptx("ld.shared.b16", self.halves[j * 2 + e], self.sources[e] + filters)
            with unrolled(batch, "j") as j:
                if size == WORD:  # rounded here, where it costs nothing; what it multiplies is cut off
                    ptx("cvt.rna.tf32.f32", self.words[j], T.reinterpret("float32", self.words[j]))
                else:
                    store(self.words, j, self._joined(j * 2))
                store(self.words, j, self.words[j] & self.keep[0])
                address = self.row[0] + uint((i * batch + j) * (together * lines.weight_row_bytes))
                ptx("st.shared.b32", address, self.words[j])
