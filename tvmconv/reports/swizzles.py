"""How tiles lie in shared memory that TMA and wgmma access, as a table."""

from __future__ import annotations

from collections.abc import Sequence

from tvmconv.analysis.memory.swizzles import Tile
from tvmconv.reports.tables import NOTHING, Table, significant


def tiles_text(tiles: Sequence[Tile]) -> str:
    """One line a tile: its swizzle, what wgmma takes it to be, and the wavefronts of 8 rows of 16 bytes."""
    headers = ("tile of", "TMA", "swizzle", "wgmma reads it as", "wavefronts of 8 rows")
    rows = [
        (
            each.array,
            f"{each.kind}s it",
            _swizzle(each.swizzle),
            _read(each),
            significant(each.wavefronts / each.matrices) if each.matrices else NOTHING,
        )
        for each in tiles
    ]
    table = Table(headers, rows, left=frozenset(headers[:4]))
    return "\n".join(["Tiles in shared memory, by TMA and wgmma:", table.text()])


def _swizzle(nbytes: int) -> str:
    return f"{nbytes} bytes" if nbytes else "none"


def _read(tile: Tile) -> str:
    if not tile.read_with:
        return NOTHING
    told = " and ".join(map(_swizzle, sorted(tile.read_with)))
    return told if tile.agrees else f"{told}: it does not lie so"
