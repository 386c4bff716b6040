"""What `stem` stages, where it lies in shared memory, and what a tile uses of a GPU.

`Lines` is a convolution seen as lines of memory: in NHWC an input line is an image row with its channels interleaved,
in NCHW a row of one channel's plane. A filter line is what meets one input line: the taps of a row, with the channels
of a pixel. The reduction runs over filter lines, and along them in words of 32 bits.

`Tile` is one config as numbers, or many configs as columns: each formula serves the schedule, the limits and the cost
model.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tvmconv.gpu import BANK_BYTES, BANKS, WARP
from tvmconv.knobs import Columns
from tvmconv.knobs.space import Usage
from tvmconv.workloads import Conv2d
from tvmconv.workloads.dtypes import numpy_dtype
from tvmconv.workloads.layout import CHANNELS_LAST

WORD = 4  # bytes, of a register and of a bank
VECTOR = 16  # bytes of the widest copy
PIXELS, CHANNELS, STEP_WORDS = 16, 8, 8  # of an mma: m16n8k16 of 16 bits, or m16n8k8 of TF32
QUAD_WORDS = 4  # words of the reduction that neighbouring lanes load together
SUM_BYTES = 4

_ROUND = BANKS * BANK_BYTES
_SPREADS = ((1, 8), (2, 1))  # pixels from one lane's to the next, and from a lane's first to its second


@dataclass(frozen=True)
class Lines:
    """A convolution as lines of memory.

    Attributes:
        w: the convolution.
    """

    w: Conv2d

    @property
    def channels_last(self) -> bool:
        """Whether a line has all channels of its pixels."""
        return self.w.layout == CHANNELS_LAST

    @property
    def planes(self) -> int:
        """Lines of an image row."""
        return 1 if self.channels_last else self.w.C

    @property
    def pixel(self) -> int:
        """Elements of a pixel in a line."""
        return self.w.C if self.channels_last else 1

    @property
    def length(self) -> int:
        """Elements of an input line."""
        return self.w.W * self.pixel

    @property
    def size(self) -> int:
        """Bytes of an element."""
        return numpy_dtype(self.w.storage).itemsize

    @property
    def pair(self) -> int:
        """Elements of a word."""
        return WORD // self.size

    @property
    def vector(self) -> int:
        """Elements that are copied at a time: so many that every line begins with a whole copy."""
        return math.gcd(self.length, VECTOR // self.size)

    @property
    def asynchronous(self) -> bool:
        """Whether a copy has the four bytes that cp.async moves at least (PTX ISA, "cp.async")."""
        return self.vector * self.size >= WORD

    @property
    def unit(self) -> int:
        """Elements that a thread stages at a time."""
        return self.vector if self.asynchronous else self.pair

    @property
    def step(self) -> int:
        """Elements from an output's first input to its neighbour's."""
        return self.w.stride[1] * self.pixel

    @property
    def phases(self) -> int:
        """How many neighbouring pixels begin at different halves of a word."""
        return 2 if self.step % self.pair else 1

    @property
    def lead(self) -> int:
        """Elements that are staged before the first that a tile needs, to begin with a whole copy."""
        return -self.w.before[1] * self.pixel % self.vector

    def shift(self, phase: int) -> int:
        """The half of a word at which the pixels of a phase begin: the filter's first element meets it."""
        return (self.lead + phase * self.step) % self.pair

    @property
    def taps(self) -> int:
        """Elements of a filter line in memory."""
        return self.w.S * self.pixel

    @property
    def filter_lines(self) -> int:
        """Lines of a filter: of each plane its rows."""
        return self.planes * self.w.R

    @property
    def filter_size(self) -> int:
        """Elements of a filter in memory."""
        return self.filter_lines * self.taps

    @property
    def line_words(self) -> int:
        """Words of a filter line as it is multiplied: with zeros for what dilation and phases skip."""
        reach = self.w.window[1] * self.pixel
        return -(-(reach + max(map(self.shift, range(self.phases)))) // self.pair)

    @property
    def words(self) -> int:
        """Words of the reduction."""
        return self.filter_lines * self.line_words

    @property
    def steps(self) -> int:
        """Steps of the reduction, one mma each."""
        return -(-self.words // STEP_WORDS)

    @property
    def ends_fit(self) -> bool:
        """Whether the ends of four lines, a word of each, can share a load without more steps than words need."""
        ends = self.line_words % QUAD_WORDS * -(-self.filter_lines // QUAD_WORDS)
        quads = self.filter_lines * (self.line_words // QUAD_WORDS) + ends
        return -(-quads * QUAD_WORDS // STEP_WORDS) == self.steps

    def position(self, word: Any, ends: bool, select: Callable[[Any, Any, Any], Any]) -> Any:
        """Where in the reduction a word of the filter lines is; those behind the last are its zeros.

        Args:
            word: a number, or an expression.
            ends: whether the ends of the lines are behind all other words: `Placement`.
            select: of a condition and two values the first if the condition holds, else the second.
        """
        lines, row = self.filter_lines, self.line_words
        if not ends:
            return word
        whole = row // QUAD_WORDS * QUAD_WORDS
        shared = -(-lines // QUAD_WORDS) * QUAD_WORDS  # lines of an end, with those of zeros
        line, within = word // row, word % row
        in_ends = lines * whole + (within - whole) * shared + line
        known = select(within < whole, line * whole + within, in_ends) if whole else in_ends
        if shared == lines:
            return select(word < lines * row, known, word)
        zero = word - lines * row
        among_ends = lines * whole + zero // (shared - lines) * shared + lines + zero % (shared - lines)
        unknown = select(word < lines * whole + (row - whole) * shared, among_ends, word)
        return select(word < lines * row, known, unknown)

    def quads(self, ends: bool, line_bytes: int, plane_bytes: int) -> Iterator[tuple[int, ...]]:
        """For each four words of the reduction where in shared memory they are, in bytes from the first word's pixel.

        What the zeros of the weight meet is the quad's first word: it has to be a number.

        Args:
            ends: as for `position`.
            line_bytes: from one staged line to the next.
            plane_bytes: from one plane's to the next one's.
        """

        def offset(word: int) -> int:
            line, within = divmod(word, self.line_words)
            plane, row = divmod(line, self.w.R)
            return plane * plane_bytes + row * self.w.dilation[0] * line_bytes + within * WORD

        words = range(self.words)
        at = {self.position(word, ends, lambda test, one, other: one if test else other): word for word in words}
        for first in range(0, self.steps * STEP_WORDS, QUAD_WORDS):
            known = [offset(at[position]) for position in range(first, first + QUAD_WORDS) if position in at]
            yield (*known, *(known[:1] or [0]) * (QUAD_WORDS - len(known)))

    @property
    def weight_row_bytes(self) -> int:
        """From one channel's filter to the next: an odd number of 16 bytes, so that eight rows fall into all banks."""
        return self.steps * STEP_WORDS * WORD + VECTOR


@dataclass(frozen=True)
class Placement:
    """How the lines of a tile lie in shared memory, and which pixel each lane multiplies.

    Attributes:
        lines: the convolution.
        elements: of a line that a tile needs.
        line_bytes: from one staged line to the next.
        plane_lines: staged lines of a plane.
        spread: pixels from one lane's to the next lane's, and from a lane's first to its second.
        ends: whether the ends of the filter lines, which are no four words, are behind all other words of the
            reduction: of four lines a word each.
        conflicts: wavefronts by which the loads of one output row's inputs exceed one each, all steps together.
    """

    lines: Lines
    elements: int
    line_bytes: int
    plane_lines: int
    spread: tuple[int, int]
    ends: bool

    def quads(self) -> Iterator[tuple[int, ...]]:
        """For each four words of the reduction where in shared memory they are: `Lines.quads`."""
        return self.lines.quads(self.ends, self.line_bytes, self.plane_lines * self.line_bytes)

    @property
    def copies(self) -> int:
        """Units of a line that are staged."""
        return -(-self.elements // self.lines.unit)

    @property
    def pixel_bytes(self) -> int:
        """From one pixel of a warp to its next."""
        return self.lines.phases * self.lines.step * self.lines.size

    @property
    def conflicts(self) -> int:
        """Wavefronts beyond one a load, over the quads of an output row."""
        line, plane = (nbytes % _ROUND for nbytes in (self.line_bytes, self.plane_lines * self.line_bytes))
        return _conflicts(self.lines, self.ends, self.spread, line, plane)


@functools.lru_cache(maxsize=1 << 16)
def _conflicts(lines: Lines, ends: bool, spread: tuple[int, int], line: int, plane: int) -> int:
    """The conflicts of lines and planes that begin so many bytes behind a round of the banks."""
    step = spread[0] * lines.phases * lines.step * lines.size
    pixels = [lane * step for lane in range(WARP // QUAD_WORDS)]
    far = _ROUND << 20  # so that no line meets another's words
    quads = lines.quads(ends, far + line, (far << 10) + plane)
    return sum(_wavefronts({(pixel + word) // BANK_BYTES for pixel in pixels for word in quad}) - 1 for quad in quads)


def _wavefronts(words: set[int]) -> int:
    """How often the fullest bank has to be asked for a load of these words."""
    banks = [word % BANKS for word in words]
    return max(map(banks.count, set(banks)))


@functools.lru_cache(maxsize=4096)
def place(w: Conv2d, rows: int, warps: int) -> Placement:
    """The placement with the fewest bank conflicts, and of those the smallest."""
    lines = Lines(w)
    elements = lines.lead + (PIXELS * warps - 1) * lines.step + lines.line_words * lines.pair
    unit = lines.unit * lines.size
    least = -(-elements // lines.unit) * unit
    plane_lines = (rows - 1) * w.stride[0] + w.window[0]
    candidates = (
        Placement(lines, elements, least + more, plane_lines, spread, ends)
        for more in range(0, _ROUND, unit)
        for spread in _SPREADS
        for ends in ((False, True) if lines.ends_fit else (False,))
    )
    best = next(candidates)
    for candidate in candidates:
        if best.conflicts == 0:
            break
        best = min(best, candidate, key=lambda placement: placement.conflicts)
    return best


@dataclass(frozen=True)
class Tile:
    """What a block computes at a time, and how many blocks there are.

    Attributes:
        w: the convolution.
        rows: output rows.
        warps: of a block; each computes 16 pixels of every row.
        block_n: output channels, a multiple of 16.
        stages: tiles whose inputs are in shared memory at a time.
        blocks: that share all tiles, at most; 0 for a block a tile.
        hold: whether a warp keeps the weight in registers; else it loads it for each tile from shared memory.
    """

    w: Conv2d
    rows: Any
    warps: Any
    block_n: Any
    stages: Any
    blocks: Any
    hold: Any

    @classmethod
    def of_columns(cls, w: Conv2d, c: Columns) -> Tile:
        """The tiles of many configs."""
        return cls(w, *(c[name] for name in ("rows", "warps", "block_n", "stages", "blocks", "hold")))

    @property
    def lines(self) -> Lines:
        """The convolution as lines of memory."""
        return Lines(self.w)

    @property
    def threads(self) -> Any:
        """Threads of a block."""
        return self.warps * WARP

    @property
    def columns(self) -> Any:
        """Output columns of a tile."""
        return self.warps * PIXELS

    @property
    def channel_tiles(self) -> Any:
        """Tiles along the output channels."""
        return -(-self.w.O // self.block_n)

    @property
    def tiles_across(self) -> Any:
        """Tiles of an output row."""
        return -(-self.w.Q // self.columns)

    @property
    def tiles_down(self) -> Any:
        """Tiles of an output column."""
        return -(-self.w.P // self.rows)

    @property
    def tiles(self) -> Any:
        """Tiles of pixels, of the whole batch."""
        return self.w.N * self.tiles_down * self.tiles_across

    @property
    def grid(self) -> Any:
        """Blocks along the tiles of pixels."""
        share = -(-self.blocks // self.channel_tiles)
        return np.where(self.blocks == 0, self.tiles, np.minimum(self.tiles, share))

    @property
    def rounds(self) -> Any:
        """Tiles of a block, at most."""
        return -(-self.tiles // self.grid)

    @property
    def buffers(self) -> Any:
        """Tiles whose inputs are in shared memory at a time: no more than a block has."""
        return np.minimum(self.stages, self.rounds)

    @property
    def ahead(self) -> Any:
        """Tiles whose inputs are asked for before the first is computed."""
        return np.maximum(1, self.buffers - 1)

    @property
    def accumulators(self) -> Any:
        """Sums of a thread."""
        return self.rows * self.block_n // 2

    @property
    def weight_registers(self) -> Any:
        """Registers of a thread for the weight, all steps together."""
        return self.lines.steps * self.block_n // CHANNELS * 2

    @property
    def products(self) -> Any:
        """The mma of a warp for a tile, all of them unrolled."""
        return self.lines.steps * self.rows * self.block_n // CHANNELS

    @property
    def placed(self) -> Placement:
        """Where the lines lie."""
        return place(self.w, int(self.rows), int(self.warps))

    @property
    def plane_lines(self) -> Any:
        """Lines of a plane that a tile needs."""
        return (self.rows - 1) * self.w.stride[0] + self.w.window[0]

    @property
    def input_bytes(self) -> Any:
        """Shared memory for the inputs of a tile."""
        rows, warps = np.broadcast_arrays(self.rows, self.warps)
        pairs = zip(rows.ravel().tolist(), warps.ravel().tolist(), strict=True)
        line = np.array([place(self.w, *pair).line_bytes for pair in pairs], dtype=np.int64).reshape(rows.shape)
        return _whole(self.lines.planes * self.plane_lines * line)

    @property
    def weight_bytes(self) -> Any:
        """Shared memory for the weight, once for each phase."""
        return self.lines.phases * self.block_n * self.lines.weight_row_bytes

    @property
    def filter_bytes(self) -> Any:
        """Shared memory for the filters as they are in memory, which the weight is spread from."""
        return self.block_n * self.lines.filter_size * self.lines.size

    @property
    def argument_bytes(self) -> Any:
        """Shared memory for what the epilogue has for each channel."""
        return self.block_n * SUM_BYTES * sum(operation.takes == "channel" for operation in self.w.reading)

    @property
    def output_row_bytes(self) -> Any:
        """Shared memory from one pixel's outputs to the next's, or where channels come first from one channel's.

        What is behind them shifts eight of the first, or four of every second of the others, against the banks.
        """
        if self.lines.channels_last:
            return self.block_n * self.lines.size + VECTOR * self.lines.size // 2
        return PIXELS * self.lines.size + VECTOR

    @property
    def output_bytes(self) -> Any:
        """Shared memory in which a warp puts its outputs in the order of their store."""
        return self.output_row_bytes * (PIXELS if self.lines.channels_last else self.block_n)

    @property
    def shared_bytes(self) -> Any:
        """Shared memory of a block: the filters lie where later the last inputs and the outputs are."""
        later = (self.buffers - self.ahead) * self.input_bytes + self.warps * self.output_bytes
        fixed = self.weight_bytes + self.argument_bytes + self.ahead * self.input_bytes
        return fixed + np.maximum(later, self.filter_bytes)

    def usage(self) -> Usage:
        """What configs use of a device."""
        blocks = self.grid * self.channel_tiles
        staged = self.input_bytes + self.weight_bytes / self.rounds
        return Usage(
            threads=self.threads,
            shared_bytes=np.zeros_like(blocks),
            accumulators=self.accumulators,
            blocks=blocks,
            dynamic_shared_bytes=self.shared_bytes,
            steps=self.rounds,
            products=self.products,
            staged_bytes=staged / self.threads,
            traffic=self.tiles * self.channel_tiles * staged,
            all_threads=blocks * self.threads,
            held=self.accumulators + np.where(self.hold == 1, self.weight_registers, 0),
            computed=self.tiles * self.rows * self.columns * self.channel_tiles * self.block_n,
        )


def _whole(nbytes: Any) -> Any:
    """Rounded up to the widest copy."""
    return -(-nbytes // VECTOR) * VECTOR
