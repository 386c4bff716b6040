"""The swizzles of shared-memory tiles that TMA and wgmma access, as a table."""

from __future__ import annotations

from collections.abc import Sequence

from tvmconv.analysis.memory.swizzles import SwizzledSmemTile
from tvmconv.reports.tables import EMPTY_CELL, Table, format_significant


def format_tiles(tiles: Sequence[SwizzledSmemTile]) -> str:
    """Return a table with one row per tile: its TMA and wgmma swizzles, and its wavefronts per 8 rows of 16 bytes."""
    headers = ("tile of", "TMA", "swizzle", "wgmma reads it as", "wavefronts of 8 rows")
    rows = [
        (
            tile.array,
            f"{tile.kind}s it",
            _format_swizzle(tile.tma_swizzle),
            _format_reader(tile),
            format_significant(tile.num_wavefronts / tile.num_core_matrices) if tile.num_core_matrices else EMPTY_CELL,
        )
        for tile in tiles
    ]
    table = Table(headers, rows, left_aligned=frozenset(headers[:4]))
    return "\n".join(["Tiles in shared memory, by TMA and wgmma:", table.format_text()])


def _format_swizzle(nbytes: int) -> str:
    return f"{nbytes} bytes" if nbytes else "none"


def _format_reader(tile: SwizzledSmemTile) -> str:
    if not tile.wgmma_swizzles:
        return EMPTY_CELL
    swizzle_text = " and ".join(map(_format_swizzle, sorted(tile.wgmma_swizzles)))
    return swizzle_text if tile.is_consistent else f"{swizzle_text}: this does not match TMA"
