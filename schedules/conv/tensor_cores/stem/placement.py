"""Where the lines of a tile of `stem` lie in shared memory: chosen by counting bank conflicts."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from tvmconv.arithmetic import ceil_div
from tvmconv.gpu import BANK_BYTES, BANKS, WARP
from tvmconv.workloads import Conv2d

from .lines import PIXELS, QUAD_WORDS, Lines

_ROUND = BANKS * BANK_BYTES
_SPREADS = ((1, 8), (2, 1))  # pixels from one lane's to the next, and from a lane's first to its second


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
        return ceil_div(self.elements, self.lines.unit)

    @property
    def pixel_bytes(self) -> int:
        """From one pixel of a warp to its next."""
        return self.lines.phases * self.lines.step * self.lines.size

    @property
    def conflicts(self) -> int:
        """Wavefronts beyond one a load, over the quads of an output row."""
        line, plane = (nbytes % _ROUND for nbytes in (self.line_bytes, self.plane_lines * self.line_bytes))
        return _conflicts(self.lines, self.ends, self.spread, line, plane)


@functools.lru_cache(maxsize=4096)
def place(w: Conv2d, rows: int, warps: int) -> Placement:
    """The placement with the fewest bank conflicts, and of those the smallest."""
    lines = Lines(w)
    elements = lines.lead + (PIXELS * warps - 1) * lines.step + lines.line_words * lines.pair
    unit = lines.unit * lines.size
    least = ceil_div(elements, lines.unit) * unit
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
