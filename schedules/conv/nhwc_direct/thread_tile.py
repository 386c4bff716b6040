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
from tvmconv.space import Columns, Tile
from tvmconv.space.factors import list_divisors
from tvmconv.workloads import Conv

from ..axis_tiles import get_element_bytes
from ..plane_shape import PlaneShape

LEVELS = ("block", "thread", "local")
MAX_LOAD_BYTES = 16  # that one instruction moves at most
VECTOR_CHOICES = (8, 4, 2, 1)  # channels of a thread
THREADS_C_CHOICES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class ThreadTile:
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
    def from_tiles(cls, w: Conv, vector: Any, threads_c: Any, row_tile: Tile, column_tile: Tile) -> ThreadTile:
        """The strips of these tiles, with so many threads along the channels."""
        num_vectors = w.O // vector
        return cls(
            vector,
            Tile(num_vectors, {"block": ceil_div(num_vectors, threads_c), "thread": threads_c}),
            row_tile,
            column_tile,
        )

    @classmethod
    def from_columns(cls, w: Conv, columns: Columns) -> ThreadTile:
        """The strips of many configs."""
        _, num_rows, num_columns = PlaneShape.from_workload(w).output_size
        axes = (("tile_y", num_rows), ("tile_x", num_columns))
        return cls.from_tiles(
            w,
            columns["vector"],
            columns["threads_c"],
            *(Tile.from_column(n, LEVELS, columns[knob]) for knob, n in axes),
        )

    @property
    def num_threads(self) -> Any:
        """Threads of a block."""
        return self.channels.thread * self.rows.thread * self.columns.thread

    @property
    def num_accumulators(self) -> Any:
        """Outputs of a thread."""
        return self.vector * self.rows.local * self.columns.local

    def count_blocks(self, w: Conv) -> Any:
        """Blocks of the grid."""
        return (
            PlaneShape.from_workload(w).num_output_planes * self.channels.block * self.rows.block * self.columns.block
        )


def list_vector_choices(w: Conv, is_allowed: Callable[[int], bool]) -> tuple[int, ...]:
    """The numbers of output channels that a thread may have: those of one store at most that divide all and fit."""
    return tuple(
        v for v in VECTOR_CHOICES if v * get_element_bytes(w) <= MAX_LOAD_BYTES and w.O % v == 0 and is_allowed(v)
    )


def list_threads_c_choices(w: Conv) -> tuple[int, ...]:
    """Threads that a block may have along the channels: powers of two, and what divides the channels."""
    return tuple(sorted({*THREADS_C_CHOICES, *(n for n in list_divisors(w.O) if n <= THREADS_C_CHOICES[-1])}))


def compute_window_extent(w: Conv) -> tuple[int, int, int]:
    """From an output's first input to its last, in planes, rows and columns, both included."""
    plane_shape = PlaneShape.from_workload(w)
    planes, rows, columns = (
        (n - 1) * d + 1 for n, d in zip(plane_shape.kernel_size, plane_shape.dilations, strict=True)
    )
    return planes, rows, columns


def list_input_offsets(num_outputs: int, stride: int, num_taps: int, dilation: int) -> list[int]:
    """Which inputs along an axis neighbouring outputs take, counted from the first one's first."""
    return sorted({i * stride + r * dilation for i in range(num_outputs) for r in range(num_taps)})


def count_distinct_inputs(num_outputs: Any, stride: int, num_taps: int, dilation: int) -> Any:
    """How many inputs along an axis so many neighbouring outputs take."""
    counts = [
        len(list_input_offsets(n, stride, num_taps, dilation)) for n in range(int(np.max(num_outputs, initial=0)) + 1)
    ]
    return np.array(counts)[num_outputs]
