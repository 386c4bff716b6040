"""Strips: what a thread computes of an image with channels last.

A *strip* is a vector of neighbouring output channels at a few neighbouring pixels of a plane, rows × columns of them.
Threads of a block lie side by side along the channels (x), the columns (y) and the rows (z), so that what a warp reads
or writes at a time is one contiguous run, or several.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tvmconv.arithmetic import ceil_div
from tvmconv.knobs import Columns, Tile
from tvmconv.knobs.factors import divisors
from tvmconv.workloads import Conv

from ..planes import Planes
from ..tiles import element_bytes

LEVELS = ("block", "thread", "local")
LOAD_BYTES = 16  # that one instruction moves at most
VECTORS = (8, 4, 2, 1)  # channels of a thread
THREADS_C = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Strip:
    """The strip of a thread, and how threads make up a block; of one config, or as columns of many.

    Attributes:
        vector: channels.
        channels: a tile of the vectors: (block, thread).
        rows: a tile of the output's rows, of `LEVELS`.
        columns: a tile of its columns, likewise.
    """

    vector: Any
    channels: Tile
    rows: Tile
    columns: Tile

    @classmethod
    def of(cls, w: Conv, vector: Any, threads: Any, rows: Tile, columns: Tile) -> Strip:
        """The strips of these tiles, with so many threads along the channels."""
        extent = w.O // vector
        return cls(vector, Tile(extent, {"block": ceil_div(extent, threads), "thread": threads}), rows, columns)

    @classmethod
    def of_columns(cls, w: Conv, c: Columns) -> Strip:
        """The strips of many configs."""
        _, rows, columns = Planes.of(w).out
        axes = (("tile_y", rows), ("tile_x", columns))
        return cls.of(w, c["vector"], c["threads_c"], *(Tile.of_column(n, LEVELS, c[knob]) for knob, n in axes))

    @property
    def threads(self) -> Any:
        """Threads of a block."""
        return self.channels.thread * self.rows.thread * self.columns.thread

    @property
    def sums(self) -> Any:
        """Outputs of a thread."""
        return self.vector * self.rows.local * self.columns.local

    def blocks(self, w: Conv) -> Any:
        """Blocks of the grid."""
        return Planes.of(w).count * self.channels.block * self.rows.block * self.columns.block


def vectors(w: Conv, fits: Callable[[int], bool]) -> tuple[int, ...]:
    """The numbers of output channels that a thread may have: those of one store at most that divide all and fit."""
    return tuple(v for v in VECTORS if v * element_bytes(w) <= LOAD_BYTES and w.O % v == 0 and fits(v))


def threads_across(w: Conv) -> tuple[int, ...]:
    """Threads that a block may have along the channels: powers of two, and what divides the channels."""
    return tuple(sorted({*THREADS_C, *(n for n in divisors(w.O) if n <= THREADS_C[-1])}))


def reach(w: Conv) -> tuple[int, int, int]:
    """From an output's first input to its last, in planes, rows and columns, both included."""
    sizes = Planes.of(w)
    planes, rows, columns = ((n - 1) * d + 1 for n, d in zip(sizes.taps, sizes.dilations, strict=True))
    return planes, rows, columns


def places(outputs: int, stride: int, taps: int, dilation: int) -> list[int]:
    """Which inputs along an axis neighbouring outputs take, counted from the first one's first."""
    return sorted({i * stride + r * dilation for i in range(outputs) for r in range(taps)})


def distinct(outputs: Any, stride: int, taps: int, dilation: int) -> Any:
    """How many inputs along an axis so many neighbouring outputs take."""
    counts = [len(places(n, stride, taps, dilation)) for n in range(int(np.max(outputs, initial=0)) + 1)]
    return np.array(counts)[outputs]
