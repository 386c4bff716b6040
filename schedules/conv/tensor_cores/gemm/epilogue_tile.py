"""Division of a warpgroup's accumulators into subtiles, which pass through shared memory to their stores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvmconv import tensor_map as maps
from tvmconv.workloads.dtypes import get_itemsize

from ....tir_builder import Expr
from .atoms import ThreadPosition, WgmmaAtom
from .smem_layout import SmemLayout
from .tile_scheduler import WorkTile


@dataclass(frozen=True)
class EpilogueTile:
    """Division of a warpgroup's accumulators into subtiles, each stored at once."""

    atom: WgmmaAtom  # the wgmma instruction
    m_atoms: int  # instructions of a warpgroup along M
    warpgroups: int  # number of warpgroups that share a work tile, along M
    dtype: str  # storage dtype of the output
    row_bytes: int  # bytes of a subtile's rows, which is the width of the swizzle if there is one
    stages: int  # subtiles of a warpgroup in shared memory
    frames: int = 1  # frames of the output, whose rows are counted from the first one of each
    # Whether columns are those of `InterleavedFilters`, so that a thread has four neighbouring channels of 8 bits.
    interleaved: bool = False
    line: tuple[int, int] | None = None  # pixels of a line that are stored, and of all its rows; None if all are
    evicts_first: bool = False  # whether stores go to lines that leave L2 first
    is_swizzled: bool = True  # whether rows are swizzled in shared memory

    @property
    def layout(self) -> SmemLayout:
        """Layout of a subtile in shared memory."""
        return SmemLayout(self.atom.m, self.row_bytes, is_swizzled=self.is_swizzled)

    @property
    def swizzle_bytes(self) -> int:
        """Width of the swizzle; 0 without one."""
        return self.row_bytes if self.is_swizzled else 0

    @property
    def n(self) -> int:
        """Columns of a subtile."""
        return self.row_bytes // get_itemsize(self.dtype)

    @property
    def subtiles_n(self) -> int:
        """Subtiles along N."""
        return self.atom.n // self.n

    def row(self, tile: WorkTile, warpgroup: Expr, m_atom: Expr) -> Expr:
        """Return the first row of a subtile."""
        return tile.m + warpgroup * (self.m_atoms * self.atom.m) + m_atom * self.atom.m

    def coordinates(self, tile: WorkTile, column: Expr, row: Expr) -> tuple[Expr, ...]:
        """Return the coordinates of a subtile of a work tile along the axes of the tensor map."""
        if self.line:
            _, rows = self.line
            return column, row % rows, row // rows, tile.group
        return (column, row, tile.group, tile.residue) if self.frames > 1 else (column, row, tile.group)

    def select_fragment(
        self, accumulators: Sequence[Expr], m_atom: int, n_idx: int, thread: ThreadPosition
    ) -> tuple[list[Expr], Expr]:
        """Return a thread's accumulators of a subtile, and the channel of the first one.

        Accumulator 4j + 2h + e of an atom is in row 8h + lane / 4 and column 8j + 2 (lane % 4) + e of a warp's 16 rows.
        """
        channels = 4 if self.interleaved else 2
        first = m_atom * self.atom.num_accumulators + n_idx * self.n // 2
        return [accumulators[first + e] for e in range(self.n // 2)], n_idx * self.n + thread.lane % 4 * channels

    def tensor_map(self, m: int, n: int, groups: int) -> maps.TensorMap:
        """Return the tensor map of the output, or of a residual: columns of a group, rows, groups, frames.

        If a line has more rows than pixels, rows of a line and lines are axes, and TMA stores no further rows.
        """
        if self.line:
            pixels, rows = self.line
            line_extents, line_strides = (n, pixels, m // rows, groups), (n * groups, n * groups * pixels, n)
            line_box = self.n, self.atom.m, 1, 1
            layout = line_extents, line_strides, line_box, self.swizzle_bytes
            return maps.make_tiled_map(self.dtype, get_itemsize(self.dtype), *layout)
        frames, frame_strides = ((self.frames,), (m * n * groups,)) if self.frames > 1 else ((), ())
        extents, strides = (n, m, groups, *frames), (n * groups, n, *frame_strides)
        box = (self.n, self.atom.m, *(1 for _ in extents[2:]))
        return maps.make_tiled_map(self.dtype, get_itemsize(self.dtype), extents, strides, box, self.swizzle_bytes)
