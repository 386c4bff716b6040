"""What the parts of `stem` have in common: numbers of a block, its arrays, its lanes, the tiles that it is at."""

from __future__ import annotations

from contextlib import ExitStack

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.gpu import WARP
from tvmconv.workloads import epilogue
from tvmconv.workloads.dtypes import ACCUMULATOR

from ....program import Buffer, Expr, allocate, parallel, parallel_blocks, ptx, uint
from .lines import CHANNELS, PIXELS, QUAD_WORDS, SUM_BYTES, VECTOR, WORD
from .tile import Tile

ASYNC_COPY = {4: "cp.async.ca.shared.global", 8: "cp.async.ca.shared.global", 16: "cp.async.cg.shared.global"}
WORDS, WEIGHT_ROWS = 8, 8  # of lines, and of the weight's, that a thread has under way at a time


class Block:
    """A block of the grid.

    Args:
        tile: what it computes at a time.
        arguments: by name.
    """

    def __init__(self, tile: Tile, arguments: dict[str, Buffer]) -> None:
        self.tile, self.w = tile, tile.w
        self.arguments = arguments
        self.lines, self.placed = tile.lines, tile.placed
        self.threads, self.channels = int(tile.threads), int(tile.block_n)
        self.buffers, self.grid = int(tile.buffers), int(tile.grid)
        self.n_tiles = self.channels // CHANNELS
        first = epilogue.steps(self.w.epilogue)[:1]
        self.begun = any(operation.adds and operation.takes == "channel" for operation in first)  # a sum, with the bias
        self.of_channels = [operation.name for operation in self.w.reading if operation.takes == "channel"]
        self.of_outputs = [operation.name for operation in self.w.reading if operation.takes == "output"]

        self.ahead = int(tile.ahead)
        self.input_bytes = int(tile.input_bytes)
        self.arguments_at = int(tile.weight_bytes)  # behind the weight
        self.inputs_at = self.arguments_at + int(tile.argument_bytes)
        self.filters_at = self.inputs_at + self.ahead * self.input_bytes
        self.output_at = self.inputs_at + self.buffers * self.input_bytes
        self.output_bytes, self.output_row = int(tile.output_bytes), int(tile.output_row_bytes)

    def _bind(self, axes: ExitStack) -> None:
        """Open the loops of blocks and threads."""
        bind = axes.enter_context
        self.channel_tile, self.block = bind(parallel_blocks(int(self.tile.channel_tiles), self.grid))
        self.thread = bind(parallel(self.threads, "threadIdx.x"))

    def _allocate(self) -> None:
        """Registers, by what they are for, and shared memory."""
        tile, steps = self.tile, self.lines.steps if self.tile.hold else 1
        self.patterns = list(dict.fromkeys(tuple(at - quad[0] for at in quad) for quad in self.placed.quads()))
        self.shared = allocate("shared", int(tile.shared_bytes) // WORD, "uint32", "shared.dyn")
        self.sums = allocate("sums", int(tile.accumulators), ACCUMULATOR)
        self.a = allocate("a", 4, "uint32")
        self.b = allocate("b", steps * self.n_tiles * 2, "uint32")
        self.base = allocate("base", 1, "uint32")
        self.weight = allocate("weight", 1, "uint32")
        self.pixel = allocate("pixel", len(self.patterns), "uint32")
        self.values = allocate("values", 2, ACCUMULATOR)
        self.sources = allocate("sources", 2, "uint32")
        self.keep = allocate("keep", 1, "uint32")
        self.row = allocate("row", 1, "uint32")
        self.words = allocate("words", max(VECTOR // WORD, WEIGHT_ROWS), "uint32")
        self.halves = allocate("halves", 2 * max(WORDS, WEIGHT_ROWS), "uint16")
        self.of_channel = {name: allocate(name, 2, ACCUMULATOR) for name in self.of_channels}
        self.of_output = {name: allocate(name, self._residuals(name), "uint32") for name in self.of_outputs}

    def _residuals(self, name: str) -> int:
        """Registers for a tensor like the output: for two elements, or for all of a row while another one is read."""
        pairs = 1 if name == self.of_outputs[-1] else self.n_tiles * 2
        return pairs * 2 // self.lines.pair

    @property
    def lane(self) -> Expr:
        """The thread's number in its warp."""
        return self.thread % WARP

    @property
    def warp(self) -> Expr:
        """The warp's number in its block."""
        return self.thread // WARP

    @property
    def phase(self) -> Expr:
        """Whether the warp's pixels are the even or the odd ones, where these differ."""
        return self.warp % self.lines.phases

    @property
    def first_channel(self) -> Expr:
        """The tile's first output channel."""
        return self.channel_tile * self.channels

    def _column(self, pixel: Expr) -> Expr:
        """The column in the tile of one of the warp's 16 pixels."""
        return (self.warp // self.lines.phases * PIXELS + pixel) * self.lines.phases + self.phase

    def _tile_number(self, i: Expr) -> Expr:
        """The i-th tile of the block."""
        return i * self.grid + self.block

    def _origin(self, number: Expr) -> tuple[Expr, Expr, Expr]:
        """Image, first output row and first column of a tile."""
        tile = self.tile
        across, down = int(tile.tiles_across), int(tile.tiles_down)
        return number // (down * across), number // across % down * tile.rows, number % across * int(tile.columns)

    def _argument(self, index: int, channel: Expr) -> Expr:
        """Where in shared memory the epilogue has a number for a channel of the tile."""
        at = self.arguments_at + index * self.channels * SUM_BYTES
        return self.base[0] + uint(at) + uint(channel * SUM_BYTES)

    def _load_of_channel(self, index: int, j: Expr) -> None:
        """Load what the epilogue has for the lane's two channels of an mma."""
        values = self.of_channel[self.of_channels[index]]
        address = self._argument(index, j * CHANNELS + self.lane % QUAD_WORDS * 2)
        ptx("ld.shared.v2.f32", values[0], values[1], address)

    def _sum(self, r: Expr, j: Expr) -> Expr:
        """The first of four sums of a lane: two channels of one pixel, and of its second."""
        return (r * self.n_tiles + j) * 4

    def _joined(self, first: Expr) -> Expr:
        """Two halves of a word, in registers one behind the other, as the word."""
        low, high = (T.Cast("uint32", self.halves[first + e]) for e in range(2))
        return low | T.shift_left(high, T.uint32(16))
