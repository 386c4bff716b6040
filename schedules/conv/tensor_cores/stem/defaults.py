"""What the tile of `stem` may be, and which it is by default: what fills the warps, and the GPU, of an H200."""

from __future__ import annotations

from collections.abc import Iterator

from tvmconv.arithmetic import round_up
from tvmconv.gpu import MAX_THREADS, WARP
from tvmconv.workloads import Conv2d

from .lines import PIXELS, Lines
from .tile import Tile

ROWS, STAGES = (1, 2, 4, 8), (2, 3, 4)
BLOCK_WARPS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)
BLOCK_CHANNELS = (16, 32, 48, 64, 96, 128)
BLOCKS = (0, 66, 132, 264, 396, 528, 792, 1056)

SHARED_BYTES = 99 << 10  # that a block may have on every architecture since sm_80 (tvmconv/gpu.py)
MULTIPROCESSORS = 132  # of an H200: what the defaults are for
WARPS = 16  # of a multiprocessor, by default: at 64 sums a thread its registers are for as many


def default(w: Conv2d) -> Tile:
    """The tile by default: the first of those that are sensible, the best first, to have room on every GPU."""
    tiles = list(sensible(w))
    return next((tile for tile in tiles if tile.shared_bytes <= SHARED_BYTES), tiles[-1])


def sensible(w: Conv2d) -> Iterator[Tile]:
    """Tiles that leave few lanes idle and no multiprocessor, of an H200, and then smaller and smaller ones."""
    channels = channel_choices(w)
    block_n = min((n for n in channels if n <= 64), key=lambda n: (round_up(w.O, n), -n))  # idle channels are few
    rows = min(2, row_choices(w)[-1])
    for n in (n for n in reversed(channels) if n <= block_n):
        for max_warps in (8, 4, 2):
            for count in dict.fromkeys((rows, 1)):
                yield _filling(w, count, n, max_warps)


def _filling(w: Conv2d, rows: int, block_n: int, max_warps: int) -> Tile:
    """The tile of so many rows and channels whose warps fill output rows best; fewer, where tiles would be few."""

    def tile(warps: int, blocks: int = 0) -> Tile:
        lines = Tile(w, rows, warps, block_n, STAGES[0], blocks, 0)
        held = lines.weight_registers <= 32 and lines.rounds > 1
        return Tile(w, rows, warps, block_n, STAGES[0], blocks, int(held))

    def filled(candidate: Tile) -> float:
        used = w.Q / (candidate.tiles_across * candidate.columns)
        return float(used * candidate.warps / (candidate.warps + 0.5))  # what a block has to do by itself is shared

    options = warp_choices(w)
    candidates = [tile(warps) for warps in options if warps <= max_warps] or [tile(options[0])]
    many = [each for each in candidates if each.tiles * each.channel_tiles >= 0.75 * MULTIPROCESSORS]
    best = max(many, key=filled) if many else max(candidates, key=lambda each: (each.tiles, filled(each)))
    resident = max(blocks for blocks in BLOCKS if blocks <= MULTIPROCESSORS * max(1, WARPS // best.warps))
    return tile(best.warps, resident if resident < best.tiles * best.channel_tiles else 0)


def row_choices(w: Conv2d) -> tuple[int, ...]:
    """Numbers of output rows, of which more than half are in the output if there is one tile."""
    return tuple(rows for rows in ROWS if rows < 2 * w.P)


def warp_choices(w: Conv2d) -> tuple[int, ...]:
    """Numbers of warps of which the last one has something to compute; as many for even as for odd pixels."""
    phases = Lines(w).phases
    fitting = (warps for warps in BLOCK_WARPS if warps % phases == 0 and warps * WARP <= MAX_THREADS)
    return tuple(warps for warps in fitting if warps == phases or (warps - phases) * PIXELS < w.Q)


def channel_choices(w: Conv2d) -> tuple[int, ...]:
    """Numbers of channels of which the last 16 have something to compute."""
    return tuple(channels for channels in BLOCK_CHANNELS if channels - PIXELS < w.O)
