"""How `mma_sync` brings its operands: rows of the reduction that exist nowhere as such, by cp.async."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.arithmetic import ceil_div
from tvmconv.workloads import Conv

from ....program import Expr, both, guarded, load_global, ptx, store, uint, unrolled, when
from ..product import CHUNK, SUM_BYTES
from .block import Block

ASYNC_COPY = {
    16: "cp.async.cg.shared.global.L2::128B",
    8: "cp.async.ca.shared.global.L2::128B",
    4: "cp.async.ca.shared.global.L2::128B",
}


class Copies(Block):
    """Copies to shared memory: of the operands, some steps ahead, and of what the epilogue has for each channel."""

    def _find_rows(self, tile: Expr) -> None:
        """Find where the rows begin that this thread copies. Rows beyond the product repeat its last one."""
        w, p = self.w, self.p
        at_m, at_n, group = self._place(tile)
        strides = _strides((w.N, *w.space, w.C))
        with unrolled(ceil_div(self.t.block_m, self.rows), "i") as i:
            m = T.min(at_m + self.row + i * self.rows, p.m - 1)
            place = m % math.prod(w.out)
            at = m // math.prod(w.out) * strides[0] + group * p.depth
            for axis, first in enumerate(self.first):
                out = place // math.prod(w.out[axis + 1 :]) % w.out[axis]
                store(first, i, out * w.stride[axis] - w.before[axis])
                at = at + first[i] * strides[1 + axis]
            store(self.pixel, i, at)
        with unrolled(ceil_div(self.t.block_n, self.rows), "i") as i:
            n = T.min(at_n + self.row + i * self.rows, p.n - 1)
            store(self.filter, i, (group * p.n + n) * p.k)

    def _copy_input(self, step: Expr, slot: Expr) -> None:
        """Start the copy of this block's pixels, for one of its steps, into a slot of the ring."""
        p, t, w = self.p, self.t, self.w
        start, to = (self.part * self.steps + step) * t.block_k, self._destination(slot)
        strides = _strides((w.N, *w.space, w.C))
        within_tap = p.depth % t.block_k == 0  # all of a step: then the tap is the same for all threads
        for piece in range(0, self.chunk_elements, self.piece):
            k = start + self.chunk * self.chunk_elements + piece
            tap = (start if within_tap else k) // p.depth
            offset = k - tap * p.depth
            away = []
            for axis in range(w.rank):
                away.append(tap // math.prod(w.kernel[axis + 1 :]) % w.kernel[axis] * w.dilation[axis])
                offset = offset + away[axis] * strides[1 + axis]
            with self._passes(t.block_m) as i:
                inside = [
                    T.Cast("uint32", self.first[axis][i] + away[axis]) < T.uint32(w.space[axis])
                    for axis in range(w.rank)
                    if _leaves_image(w, axis)
                ]
                at = to + uint(i * self.rows * self.row_bytes)
                self._copy_piece(at, piece, "X", self.pixel[i] + offset, both(*inside, self._is_in_sum(k)))

    def _copy_filters(self, step: Expr, slot: Expr) -> None:
        """Start the copy of this block's filters, for one of its steps, into a slot of the ring."""
        t = self.t
        start = (self.part * self.steps + step) * t.block_k
        to = self._destination(slot) + uint(t.block_m * self.row_bytes)
        for piece in range(0, self.chunk_elements, self.piece):
            k = start + self.chunk * self.chunk_elements + piece
            with self._passes(t.block_n) as i:
                at = to + uint(i * self.rows * self.row_bytes)
                self._copy_piece(at, piece, "K", self.filter[i] + k, self._is_in_sum(k))

    def _destination(self, slot: Expr) -> Expr:
        """Where the first chunk goes that this thread copies into a slot."""
        line = self.memory[0] + uint(slot * self.stage_bytes) + uint(self.row * self.row_bytes)
        return line + uint((self.chunk ^ self._swizzle(self.row)) * CHUNK)

    def _is_in_sum(self, k: Expr) -> Expr:
        """Whether a place in the reduction is one, and not in the overhang of the last steps."""
        return True if self.p.k % (self.t.block_k * self.steps * self.t.split_k) == 0 else k < self.p.k

    def _passes(self, block: int) -> Any:
        """A loop over the rows of an operand that a thread copies."""
        whole = block % self.rows == 0
        passes = unrolled(ceil_div(block, self.rows), "i")
        return guarded(passes, lambda i: True if whole else self.row + i * self.rows < block)

    def _copy_piece(self, to: Expr, piece: int, operand: str, at: Expr, inside: Expr) -> None:
        """Copy neighbouring elements of an operand to shared memory, or zeros if they are not `inside`."""
        nbytes = self.piece * self.p.itemsize
        to = to + uint(piece * self.p.itemsize)
        if nbytes in ASYNC_COPY:
            self._copy(to, operand, at, nbytes, inside)
            return
        store(self.words, 0, T.uint32(0))  # two bytes are less than an asynchronous copy has
        with when(inside):
            load_global(self.words, self.arguments[operand], at, 1)
        ptx("st.shared.b16", to, T.Cast("uint16", self.words[0]))

    def _copy(self, to: Expr, name: str, at: Expr, nbytes: int, inside: Expr) -> None:
        """Start the copy of neighbouring elements of an argument to shared memory, or of zeros if not `inside`."""
        read = () if inside is True else (T.Select(inside, T.uint32(nbytes), T.uint32(0)),)
        ptx(ASYNC_COPY[nbytes], to, self.arguments[name].access_ptr("r", offset=at), nbytes, *read)

    def _copy_of_channels(self) -> None:
        """Start the copy of what the epilogue has for each channel of the tile, behind all else in shared memory.

        It is there at the end of the tile, for all threads: it goes with the operands that the first step asks for. Of
        blocks that share sums only the first has anything to add. All have read that of one tile before the next one's
        is on its way: there is a barrier between the tile in registers and its store.
        """
        p, t = self.p, self.t
        width = math.gcd(p.n, CHUNK // SUM_BYTES)
        copies = t.block_n // width
        for place, operation in enumerate(self.of_channels):
            with unrolled(ceil_div(copies, t.threads), "i") as i:
                copy = self.thread + i * t.threads
                n = self.at_n + copy * width
                inside = both(True if p.n % t.block_n == 0 else n < p.n, True if t.split_k == 1 else self.part == 0)
                to, at = self._of_channel(place, copy * width), self.group * p.n + n
                with when(True if copies % t.threads == 0 else copy < copies):
                    self._copy(to, operation.name, at, width * SUM_BYTES, inside)


def _strides(shape: Sequence[int]) -> list[int]:
    """Elements from one index to the next along each axis of an array in C order."""
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def _leaves_image(w: Conv, axis: int) -> bool:
    """Whether the filter hangs over the image's border anywhere along an axis."""
    last = (w.out[axis] - 1) * w.stride[axis] + w.window[axis] - 1 - w.before[axis]
    return w.before[axis] > 0 or last >= w.space[axis]
