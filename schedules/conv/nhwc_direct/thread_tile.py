"""Thread tiles of the NHWC direct schedules.

A thread computes a *strip*: a vector of neighbouring output channels at rows × columns of neighbouring pixels of a
plane. The threads of a block are arranged along the channels (x), the columns (y) and the rows (z), so that each access
of a warp consists of one or several contiguous runs.
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
MAX_LOAD_BYTES = 16  # maximum bytes per load or store instruction
VECTOR_CHOICES = (8, 4, 2, 1)  # channels per thread
THREADS_C_CHOICES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class ThreadTile:
    """Tile of a thread, and arrangement of threads in a block; one config, or many as columns."""

    vector: Any  # channels per thread
    channels: Tile  # tile (block, thread) of the channel vectors
    rows: Tile  # tile of the output rows, with `LEVELS`
    columns: Tile  # tile of the output columns, with `LEVELS`

    @classmethod
    def from_tiles(cls, w: Conv, vector: Any, threads_c: Any, row_tile: Tile, column_tile: Tile) -> ThreadTile:
        """Return the thread tile with these tiles and `threads_c` threads along the channels."""
        num_vectors = w.O // vector
        channels = Tile(num_vectors, {"block": ceil_div(num_vectors, threads_c), "thread": threads_c})
        return cls(vector, channels, row_tile, column_tile)

    @classmethod
    def from_columns(cls, w: Conv, columns: Columns) -> ThreadTile:
        """Return the thread tiles of columns."""
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
        """Threads per block."""
        return self.channels.thread * self.rows.thread * self.columns.thread

    @property
    def num_accumulators(self) -> Any:
        """Accumulators per thread, one for each of its outputs."""
        return self.vector * self.rows.local * self.columns.local

    def count_blocks(self, w: Conv) -> Any:
        """Return the number of blocks in the grid."""
        num_planes = PlaneShape.from_workload(w).num_output_planes
        return num_planes * self.channels.block * self.rows.block * self.columns.block


def list_vector_choices(w: Conv, is_allowed: Callable[[int], bool]) -> tuple[int, ...]:
    """Return the allowed options for output channels per thread: divisors of all channels that one store can write."""
    return tuple(
        v for v in VECTOR_CHOICES if v * get_element_bytes(w) <= MAX_LOAD_BYTES and w.O % v == 0 and is_allowed(v)
    )


def list_threads_c_choices(w: Conv) -> tuple[int, ...]:
    """Return the options for threads per block along the channels: powers of two, and divisors of the channels."""
    return tuple(sorted({*THREADS_C_CHOICES, *(n for n in list_divisors(w.O) if n <= THREADS_C_CHOICES[-1])}))


def compute_window_extent(w: Conv) -> tuple[int, int, int]:
    """Return the extent of an output's input window in planes, rows and columns, with dilation."""
    plane_shape = PlaneShape.from_workload(w)
    planes, rows, columns = (
        (n - 1) * d + 1 for n, d in zip(plane_shape.kernel_size, plane_shape.dilations, strict=True)
    )
    return planes, rows, columns


def list_input_offsets(num_outputs: int, stride: int, num_taps: int, dilation: int) -> list[int]:
    """Return the offsets of the inputs along an axis that neighbouring outputs read, relative to the first one."""
    return sorted({i * stride + r * dilation for i in range(num_outputs) for r in range(num_taps)})


def count_distinct_inputs(num_outputs: Any, stride: int, num_taps: int, dilation: int) -> Any:
    """Return the number of distinct inputs along an axis that neighbouring outputs read."""
    counts = [
        len(list_input_offsets(n, stride, num_taps, dilation)) for n in range(int(np.max(num_outputs, initial=0)) + 1)
    ]
    return np.array(counts)[num_outputs]
