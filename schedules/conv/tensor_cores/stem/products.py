"""How `stem` multiplies: fragments loaded from the staged lines, wherever a lane's pixel begins, and mma."""

from __future__ import annotations

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from ....program import Expr, ptx, store, uint, unrolled, zeros
from .block import Block
from .lines import QUAD_WORDS, STEP_WORDS, VECTOR, WORD

_MMA = {"float16": ("m16n8k16", "f16"), "bfloat16": ("m16n8k16", "bf16"), "tf32": ("m16n8k8", "tf32")}


class Products(Block):
    """The sums of a tile, by mma."""

    def _point_lanes(self) -> None:
        """Where each lane finds its words: of its pixel, for each pattern of four lanes' words, and of the weight."""
        lines, lane = self.lines, self.lane
        row = self.phase * self.channels + lane % 8 + lane // 16 * 8
        offset = row * lines.weight_row_bytes + lane // 8 % 2 * VECTOR
        store(self.weight, 0, self.base[0] + uint(offset))
        column = self._column(lane // QUAD_WORDS * self.placed.spread[0])
        first = (lines.lead + column * lines.step) // lines.pair * WORD
        for index, pattern in enumerate(self.patterns):
            offset = pattern[0]
            for word in range(1, QUAD_WORDS):
                offset = T.Select(lane % QUAD_WORDS == word, pattern[word], offset)
            if pattern == tuple(word * WORD for word in range(QUAD_WORDS)):
                offset = lane % QUAD_WORDS * WORD
            store(self.pixel, index, self.base[0] + uint(self.inputs_at + first + offset))

    def _begin_sums(self) -> None:
        """Set the sums to zero, or to the bias."""
        if not self.begun:
            zeros(self.sums, int(self.tile.accumulators))
            return
        with unrolled(self.n_tiles, "j") as j:
            self._load_of_channel(0, j)
            bias = self.of_channel[self.of_channels[0]]
            with unrolled(self.tile.rows, "r") as r, unrolled(2, "second") as second:
                for e in range(2):
                    store(self.sums, self._sum(r, j) + second * 2 + e, bias[e])

    def _load_weight(self, step: int, slot: int) -> None:
        """Load the weight's fragments of a step."""
        with unrolled(self.channels // 16, "j") as j:
            address = self.weight[0] + uint(j * (16 * self.lines.weight_row_bytes) + step * STEP_WORDS * WORD)
            first = slot * self.n_tiles * 2 + j * 4
            ptx("ldmatrix.sync.aligned.m8n8.x4.shared.b16", *(self.b[first + e] for e in range(4)), address)

    def _multiply(self) -> None:
        """Add the products of a tile to its sums."""
        placed = self.placed
        shape, dtype = _MMA[self.w.dtype]
        mma = f"mma.sync.aligned.{shape}.row.col.f32.{dtype}.{dtype}.f32"
        quads = list(placed.quads())
        second = placed.spread[1] * placed.pixel_bytes
        for step in range(self.lines.steps):
            slot = step if self.tile.hold else 0
            if not self.tile.hold:
                self._load_weight(step, slot)
            with unrolled(self.tile.rows, "r") as r:
                for e in range(4):
                    quad = quads[step * 2 + e // 2]
                    pattern = self.patterns.index(tuple(at - quad[0] for at in quad))
                    offset = r * (self.w.stride[0] * placed.line_bytes) + (e % 2 * second + quad[0])
                    ptx("ld.shared.b32", self.a[e], self.pixel[pattern] + uint(offset))
                with unrolled(self.n_tiles, "j") as j:
                    sums = [self.sums[self._sum(r, j) + e] for e in range(4)]
                    b = [self.b[(slot * self.n_tiles + j) * 2 + e] for e in range(2)]
                    ptx(mma, *sums, *(self.a[e] for e in range(4)), *b, *sums)

    def _go_on(self, buffer: Expr) -> None:
        """Point the lanes to the next tile's inputs; addresses wrap around."""
        if self.buffers > 1:
            back = T.uint32((1 << 32) - (self.buffers - 1) * self.input_bytes)
            step = T.Select(buffer == self.buffers - 1, back, T.uint32(self.input_bytes))
            for index in range(len(self.patterns)):
                store(self.pixel, index, self.pixel[index] + step)
