"""A convolution as `stem` sees it: lines of memory.

In NHWC an input line is an image row with its channels interleaved, in NCHW a row of one channel's plane. A filter line
is what meets one input line: the taps of a row, with the channels of a pixel. The reduction runs over filter lines, and
along them in words of 32 bits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tvmconv.arithmetic import ceil_div, round_up
from tvmconv.workloads import Conv2d
from tvmconv.workloads.dtypes import numpy_dtype
from tvmconv.workloads.layout import CHANNELS_LAST

WORD = 4  # bytes, of a register and of a bank
VECTOR = 16  # bytes of the widest copy
PIXELS, CHANNELS, STEP_WORDS = 16, 8, 8  # of an mma: m16n8k16 of 16 bits, or m16n8k8 of TF32
QUAD_WORDS = 4  # words of the reduction that neighbouring lanes load together
SUM_BYTES = 4


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
        return ceil_div(reach + max(map(self.shift, range(self.phases))), self.pair)

    @property
    def words(self) -> int:
        """Words of the reduction."""
        return self.filter_lines * self.line_words

    @property
    def steps(self) -> int:
        """Steps of the reduction, one mma each."""
        return ceil_div(self.words, STEP_WORDS)

    @property
    def ends_fit(self) -> bool:
        """Whether the ends of four lines, a word of each, can share a load without more steps than words need."""
        ends = self.line_words % QUAD_WORDS * ceil_div(self.filter_lines, QUAD_WORDS)
        quads = self.filter_lines * (self.line_words // QUAD_WORDS) + ends
        return ceil_div(quads * QUAD_WORDS, STEP_WORDS) == self.steps

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
        shared = round_up(lines, QUAD_WORDS)  # lines of an end, with those of zeros
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
        for quad in _quads(self, ends):
            known = [plane * plane_bytes + line * line_bytes + within * WORD for plane, line, within in quad]
            yield (*known, *(known[:1] or [0]) * (QUAD_WORDS - len(known)))

    @property
    def weight_row_bytes(self) -> int:
        """From one channel's filter to the next: an odd number of 16 bytes, so that eight rows fall into all banks."""
        return self.steps * STEP_WORDS * WORD + VECTOR


@functools.lru_cache(maxsize=256)
def _quads(lines: Lines, ends: bool) -> list[list[tuple[int, int, int]]]:
    """For each four words of the reduction where they are: plane, line of it, and word of the line; no zeros."""
    row, at = lines.line_words, dict[int, tuple[int, int, int]]()
    for word in range(lines.words):
        line, within = divmod(word, row)
        plane, filter_row = divmod(line, lines.w.R)
        position = lines.position(word, ends, lambda test, one, other: one if test else other)
        at[position] = plane, filter_row * lines.w.dilation[0], within
    firsts = range(0, lines.steps * STEP_WORDS, QUAD_WORDS)
    return [[at[n] for n in range(first, first + QUAD_WORDS) if n in at] for first in firsts]
