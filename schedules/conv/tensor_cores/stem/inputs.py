"""How `stem` brings the input: lines staged whole, for tiles that are next."""

from __future__ import annotations

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.arithmetic import ceil_div

from ....program import Expr, both, call, ptx, serial, store, store_shared, uint, unrolled, when
from .block import ASYNC_COPY, WORDS, Block
from .lines import WORD

UNROLLED = 16  # steps of a copy


class Inputs(Block):
    """The input lines of tiles, on their way to shared memory."""

    def _stage_if_any(self, number: Expr, buffer: Expr) -> None:
        """Copy the input lines of a tile to shared memory, if there is such a tile."""
        with when(number < int(self.tile.tiles)):
            if self.lines.asynchronous:
                self._stage(number, buffer)
            else:
                self._stage_words(number, buffer)
        if self.lines.asynchronous:
            call(T.ptx.cp.async_.commit_group())

    def _wait_for_inputs(self) -> None:
        """Wait for the inputs of the tile that is next, of all threads; also for the reads of the one before."""
        if self.lines.asynchronous:
            call(T.ptx.cp.async_.wait_group(max(0, self.buffers - 2)))
        call(T.cuda.cta_sync())

    def _stage(self, number: Expr, buffer: Expr) -> None:
        """Copy lines in whole copies, by themselves."""
        units = self._units
        with (unrolled if units <= UNROLLED * self.threads else serial)(ceil_div(units, self.threads), "unit") as i:
            unit = i * self.threads + self.thread
            with when(unit < units if units % self.threads else True):
                source, there = self._input(number, unit, 0)
                source = T.Select(there, source, 0)
                address = self.arguments["X"].access_ptr("r", offset=source)
                nbytes = self.lines.unit * self.lines.size
                known = T.Select(there, uint(nbytes), uint(0))  # the rest of them are zeros
                ptx(ASYNC_COPY[nbytes], self._place(unit, buffer), address, nbytes, known)

    def _stage_words(self, number: Expr, buffer: Expr) -> None:
        """Copy lines of which every second begins in the middle of a word, element by element, several at a time."""
        units = self._units
        each = ceil_div(units, self.threads)
        batch = min(each, WORDS)

        def unit(i: Expr, j: Expr) -> Expr:
            return (i * batch + j) * self.threads + self.thread

        with serial(ceil_div(each, batch), "i") as i:
            with unrolled(batch, "j") as j:
                for place in range(2):
                    source, there = self._input(number, unit(i, j), place)
                    there = both(there, unit(i, j) < units)
                    address = self.arguments["X"].access_ptr("r", offset=T.Select(there, source, 0))
                    ptx("ld.global.nc.b16", self.halves[j * 2 + place], address)
                    read = self.halves[j * 2 + place]
                    store(self.halves, j * 2 + place, T.Select(there, read, T.uint16(0)))
            with unrolled(batch, "j") as j, when(unit(i, j) < units):
                store(self.words, 0, self._joined(j * 2))
                store_shared(self._place(unit(i, j), buffer), self.words, WORD)

    @property
    def _units(self) -> int:
        """Copies of a tile."""
        return self.lines.planes * self.placed.plane_lines * self.placed.copies

    def _input(self, number: Expr, unit: Expr, place: int) -> tuple[Expr, Expr]:
        """The element of X that is the given place of a copy of a tile, and whether there is one."""
        w, lines = self.w, self.lines
        n, p, q = self._origin(number)
        line, along = unit // self.placed.copies, unit % self.placed.copies
        plane, row = line // self.placed.plane_lines, line % self.placed.plane_lines
        h = p * w.stride[0] - w.before[0] + row
        element = q * lines.step - (w.before[1] * lines.pixel + lines.lead) + along * lines.unit + place
        there = both(h >= 0, h < w.H, element >= 0, element < lines.length)
        return ((n * lines.planes + plane) * w.H + h) * lines.length + element, there

    def _place(self, unit: Expr, buffer: Expr) -> Expr:
        """Where a copy of a tile goes in shared memory."""
        line, along = unit // self.placed.copies, unit % self.placed.copies
        offset = line * self.placed.line_bytes + along * (self.lines.unit * self.lines.size)
        return self.base[0] + uint(buffer * self.input_bytes) + uint(self.inputs_at + offset)
