"""What becomes of the sums of `stem`: the epilogue in registers, and rows put together and stored by each warp."""

from __future__ import annotations

import math

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.gpu import WARP
from tvmconv.workloads import epilogue

from ....program import (
    Expr,
    both,
    call,
    load_global,
    load_shared,
    pack,
    ptx,
    store,
    store_global,
    store_shared,
    uint,
    unpack,
    unrolled,
    when,
)
from .block import Block
from .lines import CHANNELS, PIXELS, QUAD_WORDS, VECTOR, WORD


class Outputs(Block):
    """The end of a tile: the epilogue, and its way to memory."""

    def _finish(self, number: Expr) -> None:
        """Apply the epilogue to the sums of a tile, and store it, a row at a time."""
        with unrolled(self.tile.rows, "r") as r:
            for name in self.of_outputs:
                self._move_outputs(number, r, name, to_memory=False)
                call(T.cuda.warp_sync())
                if name != self.of_outputs[-1]:  # the last one's are read one by one, where later the outputs are
                    with unrolled(self.n_tiles, "j") as j, unrolled(2, "second") as second:
                        self._read_outputs(name, j, second)
                    call(T.cuda.warp_sync())
            with unrolled(self.n_tiles, "j") as j:
                for index in range(self.begun, len(self.of_channels)):
                    self._load_of_channel(index, j)
                with unrolled(2, "second") as second:
                    for name in self.of_outputs[-1:]:
                        self._read_outputs(name, j, second)
                    self._write_outputs(j, second, [self._finished(r, j, second, e) for e in range(2)])
            call(T.cuda.warp_sync())
            self._move_outputs(number, r, "Y", to_memory=True)
            call(T.cuda.warp_sync())

    def _finished(self, r: Expr, j: Expr, second: Expr, e: int) -> Expr:
        """A sum with the epilogue, but for what it begins with."""

        def read(name: str) -> Expr:
            if name in self.of_channel:
                return self.of_channel[name][e]
            return unpack(self._residual(name, j, second), 2, self.w.storage)[e]

        return epilogue.compute(self.w.epilogue[self.begun :], self.sums[self._sum(r, j) + second * 2 + e], read)

    def _output(self, j: Expr, second: Expr, e: int) -> Expr:
        """Where in shared memory the warp has one of the lane's outputs of an mma."""
        pixel, channel = self.lane // QUAD_WORDS, j * CHANNELS + self.lane % QUAD_WORDS * 2 + e
        if self.lines.channels_last:  # of the mma's pixels in its own order
            offset = (pixel + second * 8) * self.output_row + channel * self.lines.size
        else:
            across, between = self.placed.spread
            offset = channel * self.output_row + (pixel * across + second * between) * self.lines.size
        return self._outputs + uint(offset)

    @property
    def _outputs(self) -> Expr:
        """Where in shared memory the warp puts its outputs together."""
        return self.base[0] + uint(self.output_at) + uint(self.warp * self.output_bytes)

    def _residual(self, name: str, j: Expr, second: Expr) -> list[Expr]:
        """The registers with the lane's two elements, for an mma, of a tensor like the output."""
        words = 2 // self.lines.pair
        first = 0 if name == self.of_outputs[-1] else (j * 2 + second) * words
        return [self.of_output[name][first + word] for word in range(words)]

    def _read_outputs(self, name: str, j: Expr, second: Expr) -> None:
        """Load two elements of a tensor like the output, which the warp has in shared memory."""
        size, words = self.lines.size, 2 // self.lines.pair
        if self.lines.channels_last:
            load_shared(self.words, self._output(j, second, 0), 2 * size)
        elif size == WORD:
            for e in range(2):
                ptx("ld.shared.b32", self.words[e], self._output(j, second, e))
        else:
            for e in range(2):
                ptx("ld.shared.b16", self.halves[e], self._output(j, second, e))
            store(self.words, 0, self._joined(0))
        first = 0 if name == self.of_outputs[-1] else (j * 2 + second) * words
        for word in range(words):
            store(self.of_output[name], first + word, self.words[word])

    def _write_outputs(self, j: Expr, second: Expr, values: list[Expr]) -> None:
        """Round two outputs and put them where the warp stores them from."""
        if self.lines.channels_last:
            pack(self.words, 0, values, self.w.storage)
            store_shared(self._output(j, second, 0), self.words, 2 * self.lines.size)
            return
        for e, value in enumerate(values):
            pack(self.words, 0, [value], self.w.storage)
            store_shared(self._output(j, second, e), self.words, self.lines.size)

    def _move_outputs(self, number: Expr, r: Expr, name: str, *, to_memory: bool) -> None:
        """Move the warp's outputs of a row between shared memory and a tensor, in vectors as wide as fit there."""
        w, lines = self.w, self.lines
        n, p, q = self._origin(number)
        row = p + r
        contiguous = w.O if lines.channels_last else w.Q if lines.phases == 1 else 1
        width = math.gcd(contiguous, VECTOR // lines.size)
        vectors = (self.channels if lines.channels_last else PIXELS) // width  # of a pixel, or a channel
        with unrolled(PIXELS * self.channels // width // WARP, "i") as i:
            vector = i * WARP + self.lane
            major, minor = vector // vectors, vector % vectors * width
            if lines.channels_last:
                together = max(1, 8 // vectors)  # pixels that eight lanes move: such as lie in different banks
                major = major // 8 * 8 + major % together * (8 // together) + major % 8 // together
                across, between = self.placed.spread
                pixel, channel = major % 8 * across + major // 8 * between, minor
            else:
                pixel, channel = minor, major
            column, channel = q + self._column(pixel), self.first_channel + channel
            there = both(
                row < w.P if w.P % self.tile.rows else True,
                column < w.Q if w.Q % int(self.tile.columns) else True,
                channel < w.O if w.O % self.channels else True,
            )
            if lines.channels_last:
                index = ((n * w.P + row) * w.Q + column) * w.O + channel
            else:
                index = ((n * w.O + channel) * w.P + row) * w.Q + column
            here = self._outputs + uint(major * self.output_row + minor * lines.size)
            if to_memory:
                load_shared(self.words, here, width * lines.size)
                with when(there):
                    store_global(self.arguments[name], index, self.words, width)
            else:
                with when(there):
                    load_global(self.words, self.arguments[name], index, width)
                    store_shared(here, self.words, width * lines.size)
