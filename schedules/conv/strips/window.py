"""The input of a strip: lines of it in registers, that several outputs take together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx

from tvmconv.workloads import Conv2d

from .strip import Strip, places, reach
from .writing import Place, copy, guarded, local, loop


class Window:
    """Lines of the input as a strip sees them, in registers: for each, the vectors that its columns take together.

    Args:
        w: the workload.
        X: the input.
        strip: the strips.
        at: where the thread is.
        width: channels of a vector.
        lines: how many are held.
        taps: how many of the filter's columns are unrolled.

    Attributes:
        held: the array, (lines, places, channels).
        top: the input's line that the strip's first row meets first; it may lie outside.
        left: likewise its column.
    """

    def __init__(self, w: Conv2d, X: Any, strip: Strip, at: Place, width: int, lines: int, taps: int) -> None:
        self._w, self._X, self._strip, self._at, self._width = w, X, strip, at, width
        self._places = places(strip.columns.local, w.stride[1], taps, w.dilation[1])
        if self._places != [*range(len(self._places))]:  # what neighbouring columns take lies side by side even so
            self._places.sort(key=lambda place: (place % w.stride[1], place))
        self.held = local("window", (lines, len(self._places), width), w.storage)
        self.top = at.row * w.stride[0] - w.before[0]
        self.left = at.column * w.stride[1] - w.before[1]

    def place(self, j: Any, s: int) -> Any:
        """Where in a line the input is that the filter's column `s` meets for the strip's column `j`."""
        first = self._places.index(s * self._w.dilation[1])
        if self._strip.columns.local == 1:
            return first
        return first + j * (self._places.index(s * self._w.dilation[1] + self._w.stride[1]) - first)

    def load_line(self, i: Any, line: Any, channel: Any, column: Any = 0) -> None:
        """Load line `i`: that of the input, so many below the first, from a channel on, the columns shifted."""
        if self._places == [*range(len(self._places))]:
            with loop("g", len(self._places)) as g:
                self._load(i, g, self.top + line, self.left + column + g, channel)
        else:
            for g, place in enumerate(self._places):
                self._load(i, g, self.top + line, self.left + column + place, channel)

    def _load(self, i: Any, g: Any, line: Any, column: Any, channel: Any) -> None:
        """Load a vector of the input, zeros outside."""

        def fill(value: Callable[[Any], Any]) -> None:
            copy(self._width, self.held, lambda lane: (i, g, lane), value)

        guarded(
            self._inside(line, column),
            lambda: fill(lambda lane: self._X[self._at.image, line, column, channel + lane]),
            lambda: fill(lambda lane: tirx.const(0, self._w.storage)),
        )

    def _inside(self, line: Any, column: Any) -> list[Any]:
        """What has to hold for a place of the input to exist, tested for where it might not."""
        w, tests = self._w, []
        sides = zip((line, column), (w.H, w.W), (self._strip.rows, self._strip.columns), reach(w), strict=True)
        for i, (at, size, tile, taps) in enumerate(sides):
            last = (tile.block * tile.size - 1) * w.stride[i] + taps - 1 - w.before[i]
            tests += [at >= 0] * (w.before[i] > 0) + [at < size] * (last >= size)
        return tests
