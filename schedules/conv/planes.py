"""Convolutions of any rank as planes of rows and columns: an image is one plane, a signal one of a single row.

What is written for images serves signals and volumes so: of a volume, each plane of the output is computed like an
image, from as many planes of the input as the kernel is deep.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvmconv.workloads import Conv

RANK = 3


@dataclass(frozen=True)
class Planes:
    """The sizes of a convolution over planes, rows and columns, with 1 for those that it does not have.

    Attributes:
        w: the convolution.
        size: of an input.
        out: of an output.
        taps: of the kernel.
        steps: strides.
        dilations: distances between taps.
        before: zeros before the input.
    """

    w: Conv
    size: tuple[int, ...]
    out: tuple[int, ...]
    taps: tuple[int, ...]
    steps: tuple[int, ...]
    dilations: tuple[int, ...]
    before: tuple[int, ...]

    @classmethod
    @functools.lru_cache(maxsize=64)
    def of(cls, w: Conv) -> Planes:
        """Those of a convolution."""

        def filled(sizes: Sequence[int], unit: int = 1) -> tuple[int, ...]:
            return (*[unit] * (RANK - w.rank), *sizes)

        return cls(
            w,
            size=filled(w.space),
            out=filled(w.out),
            taps=filled(w.kernel),
            steps=filled(w.stride),
            dilations=filled(w.dilation),
            before=filled(w.before, 0),
        )

    @property
    def count(self) -> int:
        """Planes of all outputs."""
        return self.w.N * self.out[0]

    @property
    def all_taps(self) -> int:
        """Taps of the kernel."""
        return math.prod(self.taps)

    def tap(self, number: Any) -> tuple[Any, Any, Any]:
        """Plane, row and column of a tap, from its number."""
        columns = self.taps[-1]
        return (*self.tap_row(number // columns), number % columns)

    def tap_row(self, number: Any) -> tuple[Any, Any]:
        """Plane and row of a row of taps, from its number."""
        planes, rows, _ = self.taps
        return (0, number) if planes == 1 else (number // rows, number % rows)

    def number(self, tap: tuple[Any, Any, Any]) -> Any:
        """The number of a tap, as they lie in memory."""
        _, rows, columns = self.taps
        plane, row, column = tap
        return (plane * rows + row) * columns + column

    def place(self, first: Any, at: Sequence[Any], last: Any) -> tuple[Any, ...]:
        """Where an element lies in an array with channels last: `at` is its plane, row and column."""
        return (first, *at[RANK - self.w.rank :], last)
