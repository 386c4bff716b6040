"""The input of a strip: lines of it in registers, that several outputs take together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx

from tvmconv.workloads import Conv

from ..planes import Planes
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
        front: the input's plane that the strip meets first; it may lie outside.
        top: likewise the line that its first row meets first.
        left: likewise its column.
    """

    def __init__(self, w: Conv, X: Any, strip: Strip, at: Place, width: int, lines: int, taps: int) -> None:
        self._w, self._X, self._strip, self._at, self._width = w, X, strip, at, width
        self._places = places(strip.columns.local, w.stride[-1], taps, w.dilation[-1])
        if self._places != [*range(len(self._places))]:  # what neighbouring columns take lies side by side even so
            self._places.sort(key=lambda place: (place % w.stride[-1], place))
        self.held = local("window", (lines, len(self._places), width), w.storage)
        self._sizes = sizes = Planes.of(w)
        firsts = zip((at.plane, at.row, at.column), sizes.steps, sizes.before, strict=True)
        self.front, self.top, self.left = (first * step - zeros for first, step, zeros in firsts)

    def place(self, j: Any, s: int) -> Any:
        """Where in a line the input is that the filter's column `s` meets for the strip's column `j`."""
        first = self._places.index(s * self._w.dilation[-1])
        if self._strip.columns.local == 1:
            return first
        return first + j * (self._places.index(s * self._w.dilation[-1] + self._w.stride[-1]) - first)

    def load_line(self, i: Any, t: Any, line: Any, channel: Any, column: Any = 0) -> None:
        """Load line `i`: of the plane that the filter's plane `t` meets, so many lines down, from a channel on."""
        plane, line = self.front + t * self._sizes.dilations[0], self.top + line
        if self._places == [*range(len(self._places))]:
            with loop("g", len(self._places)) as g:
                self._load(i, g, (plane, line, self.left + column + g), channel)
        else:
            for g, place in enumerate(self._places):
                self._load(i, g, (plane, line, self.left + column + place), channel)

    def _load(self, i: Any, g: Any, at: tuple[Any, Any, Any], channel: Any) -> None:
        """Load a vector of the input, zeros outside."""

        def fill(value: Callable[[Any], Any]) -> None:
            copy(self._width, self.held, lambda lane: (i, g, lane), value)

        guarded(
            self._inside(at),
            lambda: fill(lambda lane: self._X[self._sizes.place(self._at.image, at, channel + lane)]),
            lambda: fill(lambda lane: tirx.const(0, self._w.storage)),
        )

    def _inside(self, at: tuple[Any, Any, Any]) -> list[Any]:
        """What has to hold for a place of the input to exist, tested for where it might not."""
        sizes, tests = self._sizes, []
        computed = (sizes.out[0], *(tile.block * tile.size for tile in (self._strip.rows, self._strip.columns)))
        for i, (place, size, outputs, seen) in enumerate(zip(at, sizes.size, computed, reach(self._w), strict=True)):
            last = (outputs - 1) * sizes.steps[i] + seen - 1 - sizes.before[i]
            tests += [place >= 0] * (sizes.before[i] > 0) + [place < size] * (last >= size)
        return tests
