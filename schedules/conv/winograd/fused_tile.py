"""What there is to choose in `winograd_fused`, and what it uses of a GPU: of one config or of many as columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tvmconv.arithmetic import ceil_div, round_up
from tvmconv.gpu import MAX_THREADS, REGISTERS, WARP
from tvmconv.knobs import Columns, Knobs
from tvmconv.knobs.space import Usage
from tvmconv.workloads import Conv2d

from ..plan import MAX_ACCUMULATORS, MAX_PRODUCTS, MIN_THREADS, SUM_BYTES, VECTOR
from .plan import Grid, default_tile_size, tile_sizes

SIZES = (1, 2, 4, 8, 16)
TAPS = (1, 2, 4, 8)
PLACES = (1, 2, 3, 4, 6, 7, 8, 9)  # those that divide α² of some m and R
OWN_REGISTERS = 48  # of a thread besides its sums, at least: a transform's


@dataclass(frozen=True)
class Tile:
    """A block's part.

    Attributes:
        w: the workload.
        grid: of its output tiles.
        places: of the α² places, those of a thread.
        threads_y: threads along the output channels.
        local_y: output channels of a thread.
        threads_x: threads along the output tiles.
        local_x: output tiles of a thread.
        taps: input channels between two barriers.
        exchanged: of a thread's channels, those whose products are in shared memory together, in the end.
    """

    w: Conv2d
    grid: Grid
    places: Any
    threads_y: Any
    local_y: Any
    threads_x: Any
    local_x: Any
    taps: Any
    exchanged: Any

    @classmethod
    def of_columns(cls, w: Conv2d, c: Columns) -> Tile:
        """The tiles of many configs."""
        names = ("places", "threads_y", "local_y", "threads_x", "local_x", "taps", "exchanged")
        return cls(w, Grid.of(w, c["tile_m"]), *(c[name] for name in names))

    @property
    def all_places(self) -> Any:
        """Places in a tile of inputs, α²."""
        return self.grid.alpha**2

    @property
    def threads(self) -> Any:
        """Of a block."""
        return self.all_places // self.places * self.threads_y * self.threads_x

    @property
    def channels(self) -> Any:
        """Output channels of a block."""
        return self.threads_y * self.local_y

    @property
    def tiles(self) -> Any:
        """Output tiles of a block."""
        return self.threads_x * self.local_x

    @property
    def blocks(self) -> tuple[Any, Any]:
        """Along the output channels, and along the output tiles."""
        return ceil_div(self.w.O, self.channels), ceil_div(self.grid.count, self.tiles)

    @property
    def accumulators(self) -> Any:
        """Of a thread."""
        return self.places * self.local_y * self.local_x

    @property
    def depth(self) -> Any:
        """Input channels, with those of zeros that fill the last step."""
        return round_up(self.w.C, self.taps)

    @property
    def together(self) -> Any:
        """Output channels whose products are in shared memory together."""
        return self.threads_y * self.exchanged

    @property
    def vector(self) -> int:
        """Neighbouring channels that a thread copies at once."""
        return VECTOR if self.channels % VECTOR == 0 else 1

    @property
    def shared_bytes(self) -> Any:
        """Of a block: filters and inputs of a step, whose place the products take in the end."""
        staged, met = self.taps * (self.channels + self.tiles), self.together * self.tiles
        return SUM_BYTES * self.all_places * np.maximum(staged, met)


def ask(w: Conv2d, k: Knobs) -> Tile:
    """Ask for everything."""
    grid = Grid.of(w, k.choice("tile_m", tile_sizes(w), default_tile_size(w)))
    alpha = grid.alpha
    enough = [n for n in PLACES if alpha**2 % n == 0 and alpha**2 // n * 16 <= MAX_THREADS]
    tile = Tile(
        w,
        grid,
        places=k.choice("places", PLACES, enough[0]),
        threads_y=k.choice("threads_y", SIZES, 4),
        local_y=k.choice("local_y", SIZES, 8 if w.O >= 32 else 4),
        threads_x=k.choice("threads_x", SIZES, 4),
        local_x=k.choice("local_x", SIZES, 4 if alpha <= 6 else 2),
        taps=k.choice("taps", TAPS, 4 if alpha <= 6 else 2),
        exchanged=k.choice("exchanged", SIZES[:-1], 1),
    )

    def tiles(c: Columns) -> Tile:
        return Tile.of_columns(w, c)

    k.condition("places are shared out evenly", lambda c: tiles(c).all_places % c["places"] == 0)
    k.condition("a thread's channels are exchanged in equal parts", lambda c: c["local_y"] % c["exchanged"] == 0)
    k.search_only("few enough accumulators", lambda c: tiles(c).accumulators <= MAX_ACCUMULATORS)
    k.search_only(f"at least {2 * MIN_THREADS} threads", lambda c: tiles(c).threads >= 2 * MIN_THREADS)
    k.search_only(
        "all threads' registers fit",
        lambda c: (tiles(c).accumulators + OWN_REGISTERS) * ceil_div(tiles(c).threads, WARP) * WARP <= REGISTERS,
    )
    k.search_only(
        "the products of a step are few enough to be unrolled",
        lambda c: tiles(c).accumulators * c["taps"] <= MAX_PRODUCTS,
    )
    k.search_only(
        "a block's part is less than twice what there is",
        lambda c: (tiles(c).channels < 2 * w.O) & (tiles(c).tiles < 2 * tiles(c).grid.count),
    )
    return tile


def usage(w: Conv2d, c: Columns) -> Usage:
    """What configs use of a device, but for the transform of the filters."""
    tile = Tile.of_columns(w, c)
    down, across = tile.blocks
    steps = tile.depth // tile.taps
    staged, products = tile.taps * (tile.channels + tile.tiles), tile.taps * tile.channels * tile.tiles
    return Usage(
        threads=tile.threads,
        shared_bytes=tile.shared_bytes,
        accumulators=tile.accumulators,
        blocks=down * across,
        steps=steps,
        products=tile.all_places * products // tile.threads,
        intensity=products / staged,
        traffic=down * across * steps * tile.all_places * staged,
        all_threads=down * across * tile.threads,
    )
