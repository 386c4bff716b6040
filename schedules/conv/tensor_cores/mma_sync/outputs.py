"""What becomes of the sums of `mma_sync`: put together in shared memory and stored, or left in scratch memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.arithmetic import ceil_div
from tvmconv.workloads import epilogue

from ....program import (
    Buffer,
    Expr,
    allocate,
    both,
    load_global,
    load_shared,
    pack,
    ptx,
    serial,
    store,
    store_global,
    uint,
    unrolled,
    when,
    zeros,
)
from ..outputs import finish, without_relu
from ..product import SUM_BYTES
from .block import Block
from .tiles import MMA_M, MMA_N

TOGETHER = 4  # vectors of outputs that a thread has at a time, at most
STAGED = "staged"  # what a vector is called that only passes through


class Outputs(Block):
    """The end of a tile: the epilogue, and its way to memory."""

    def _store_partial(self, partial: Buffer) -> None:
        """Store this block's sums to scratch memory: (blocks that share an output, pixels, channels)."""
        p = self.p
        width = math.gcd(p.n, 2)
        with unrolled(self.mmas_m, "i") as i, unrolled(self.mmas_n, "j") as j, unrolled(2, "h") as h:
            m, n = self._pixel(i, h), self._channel(j)
            at = (self.part * p.m + m) * self.w.O + self.group * p.n + n
            for pair in range(0, 2, width):
                with when(self._is_output(m, n + pair)):
                    first = (i * self.mmas_n + j) * 4 + h * 2 + pair
                    for e in range(width):
                        store(self.value, e, self.sums[first + e])
                    to = partial.access_ptr("w", offset=at + pair)
                    ptx(f"st.global{'.v2' if width == 2 else ''}.b32", to, *(self.value[e] for e in range(width)))

    def _stage(self) -> None:
        """Put the tile into shared memory, where the threads that store it find neighbouring channels."""
        itemsize = self.staged_itemsize
        operations, relu = without_relu(self.early, "float32" if self.unfinished else self.w.storage)
        row = self.warp_m * (self.mmas_m * MMA_M) + self.lane // 4
        column = self.warp_n * (self.mmas_n * MMA_N) + self.lane % 4 * 2
        at = self.memory[0] + uint(self.ring) + uint(row * self.pitch) + uint(column * itemsize)
        for place, operation in enumerate(self.of_channels):
            added = self.added[operation.name]
            with unrolled(self.mmas_n, "j") as j:
                ptx("ld.shared.v2.b32", added[j * 2], added[j * 2 + 1], self._of_channel(place, column + j * MMA_N))
        with unrolled(self.mmas_m, "i") as i, unrolled(self.mmas_n, "j") as j, unrolled(2, "h") as h:
            sums = [self.sums[(i * self.mmas_n + j) * 4 + h * 2 + e] for e in range(2)]
            pair = [self._applied(operations, value, j * 2 + e) for e, value in enumerate(sums)]
            to = at + uint((i * MMA_M + h * 8) * self.pitch) + uint(j * (MMA_N * itemsize))
            if itemsize == SUM_BYTES:
                ptx("st.shared.v2.b32", to, *pair)
            else:
                pack(self.words, 0, pair, self.w.storage, relu)
                ptx("st.shared.b32", to, self.words[0])

    def _applied(self, operations: Sequence[epilogue.Operation], value: Expr, channel: Expr) -> Expr:
        """A sum of one of this thread's channels with operations applied in registers, but for what it began with."""
        for operation in operations:
            if operation.takes == "channel":
                value = operation.compute(value, self.added[operation.name][channel])
            elif not operation.takes:
                value = operation.compute(value)
        return value

    def _store(self) -> None:
        """Store the tile from shared memory in vectors of channels; of a cluster each block its share of the pixels.

        A thread has several vectors at a time: it asks for all that it reads before it waits for any.
        """
        t, p, w = self.t, self.p, self.w
        vectors = t.block_m // t.split_k * (t.block_n // self.vector)
        passes = ceil_div(vectors, t.threads)
        together = math.gcd(passes, TOGETHER)
        reading = [operation for operation in self.late if operation.takes == "output"]
        names = [operation.name for operation in reading] if self.unfinished else [STAGED]
        asked = [{name: allocate(f"{name}_{u}", 8, "uint32") for name in names} for u in range(together)]
        with serial(passes // together, "i") as i:
            numbers = [(i * together + u) * t.threads + self.thread for u in range(together)]
            for number, words in zip(numbers, asked, strict=True):
                inside, at, m, n = self._vector(number, vectors)
                with when(inside):
                    if not self.unfinished:
                        load_shared(words[STAGED], self.memory[0] + at, self.vector * p.itemsize)
                    for operation in reading if self.unfinished else ():
                        load_global(words[operation.name], self.arguments[operation.name], m * w.O + n, self.vector)
            for number, words in zip(numbers, asked, strict=True):
                inside, at, m, n = self._vector(number, vectors)
                with when(inside):
                    if self.unfinished:
                        self._sum_up(at)
                        finish(w, self.arguments, self.late, m, n, self.vector, self.value, self.words, words)
                    staged = self.words if self.unfinished else words[STAGED]
                    store_global(self.arguments["Y"], m * w.O + n, staged, self.vector)

    def _vector(self, number: Expr, vectors: int) -> tuple[Expr, Expr, Expr, Expr]:
        """Whether a vector of the tile is to be stored, its place in shared memory, its pixel and first channel."""
        t, across = self.t, self.t.block_n // self.vector
        row, column = self.part * (t.block_m // t.split_k) + number // across, number % across * self.vector
        m, n = self.at_m + row, self.at_n + column
        inside = both(True if vectors % t.threads == 0 else number < vectors, self._is_output(m, n))
        at = uint(self.ring) + uint(row * self.pitch) + uint(column * self.staged_itemsize)
        return inside, at, m, self.group * self.p.n + n

    def _sum_up(self, at: Expr) -> None:
        """Load neighbouring sums of the tile, in a cluster added up over its blocks."""
        if self.t.split_k == 1:
            load_shared(self.value, self.memory[0] + at, self.vector * SUM_BYTES)
            return
        total = self.value
        zeros(total, self.vector)
        with unrolled(int(self.t.split_k), "g") as g:
            ptx("mapa.shared::cluster.u32", self.words[0], self.memory[0] + at, uint(g))
            for first in range(0, self.vector, 4):
                count = min(4, self.vector - first)
                suffix = f".v{count}" if count > 1 else ""
                read = [self.words[1 + e] for e in range(count)]
                ptx(f"ld.shared::cluster{suffix}.b32", *read, self.words[0] + uint(first * SUM_BYTES))
                for e in range(count):
                    store(total, first + e, total[first + e] + T.reinterpret("float32", read[e]))
