"""Tile scheduler: which output tiles and K tiles a CTA computes, and the cluster that it belongs to.

Source: CUTLASS, `include/cutlass/gemm/kernel/sm90_tile_scheduler.hpp` (static persistent scheduler).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import ClassVar

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.arithmetic import ceil_div

from ....tir_builder import Expr, Register, if_, serial_loop, to_uint32


@dataclass(frozen=True)
class Cluster:
    """The m × n CTAs of a cluster, which compute neighbouring tiles and multicast operands to each other.

    CTAs with the same rank along M share operand A, and those with the same rank along N share operand B.
    """

    m: int = 1  # CTAs along M
    n: int = 1  # CTAs along N
    rank: Expr = 0  # rank of this CTA in the cluster

    @property
    def size(self) -> int:
        """Number of CTAs."""
        return self.m * self.n

    @property
    def rank_m(self) -> Expr:
        """Rank of this CTA along M."""
        return self.rank // self.n

    @property
    def rank_n(self) -> Expr:
        """Rank of this CTA along N."""
        return self.rank % self.n

    @property
    def num_writers(self) -> int:
        """CTAs that copy into a stage of this CTA, itself included."""
        return self.m + self.n - 1

    def writer_ranks(self) -> list[Expr]:
        """Return the ranks of the CTAs that copy into a stage of this CTA, each of them once."""
        along_m = [m * self.n + self.rank_n for m in range(self.m)]
        return along_m + [self.rank_m * self.n + (self.rank_n + n) % self.n for n in range(1, self.n)]

    def a_multicast_mask(self) -> Expr:
        """Return the multicast mask of the CTAs that share operand A; None if there is only this one."""
        return _multicast_mask([self.rank_m * self.n + n for n in range(self.n)])

    def b_multicast_mask(self) -> Expr:
        """Return the multicast mask of the CTAs that share operand B; None if there is only this one."""
        return _multicast_mask([m * self.n + self.rank_n for m in range(self.m)])


SINGLE_CTA = Cluster()


def _multicast_mask(ranks: list[Expr]) -> Expr:
    if len(ranks) == 1:
        return None
    mask: Expr = T.uint32(0)
    for rank in ranks:
        mask = mask | T.shift_left(T.uint32(1), to_uint32(rank))
    return T.Cast("uint16", mask)


@dataclass(frozen=True)
class WorkTile:
    """What a CTA computes at a time."""

    m: Expr  # first row of the output tile
    n: Expr  # first column of the output tile, within its group
    group: Expr  # group of the convolution, each with a product of its own
    residue: Expr = 0  # residue class or frame of its rows, each with a product of its own, if there are several
    next_residue: Expr = 0  # that of the next tile of the CTA


@dataclass(frozen=True)
class KRange:
    """The K tiles of a CTA: a part of all K tiles if several CTAs split the reduction."""

    split: Expr  # index of the part
    tiles_per_split: int  # K tiles per part; the last part may have fewer
    total: int  # K tiles of the whole reduction

    may_be_empty: ClassVar[bool] = False

    @property
    def first(self) -> Expr:
        """First K tile."""
        return self.split * self.tiles_per_split

    @property
    def count(self) -> Expr:
        """Number of K tiles."""
        if self.total % self.tiles_per_split == 0:
            return self.tiles_per_split
        return T.min(self.tiles_per_split, self.total - self.split * self.tiles_per_split)


@dataclass(frozen=True)
class SlicedKRange:
    """The K tiles of a CTA that one of its slices multiplies: every `num_slices`-th one from that of the slice on."""

    whole: KRange  # K tiles of the CTA
    k_slice: Expr  # index of the slice
    num_slices: int  # number of slices

    may_be_empty: ClassVar[bool] = True

    @property
    def count(self) -> Expr:
        """Number of K tiles."""
        return (self.whole.count + (self.num_slices - 1) - self.k_slice) // self.num_slices


@dataclass(frozen=True)
class ResidueKRange:
    """The K tiles of a CTA in a work tile of a residue class, of which some have fewer than others."""

    split: Expr  # index of the part
    num_splits: int  # number of parts
    total: Expr  # K tiles of the whole reduction of the class
    may_be_empty: bool  # whether there may be no K tiles

    @property
    def first(self) -> Expr:
        """First K tile."""
        return 0 if self.num_splits == 1 else self.split * self._tiles_per_split

    @property
    def count(self) -> Expr:
        """Number of K tiles."""
        if self.num_splits == 1:
            return self.total
        return T.max(0, T.min(self._tiles_per_split, self.total - self.first))

    @property
    def _tiles_per_split(self) -> Expr:
        return (self.total + (self.num_splits - 1)) // self.num_splits


@dataclass(frozen=True)
class TileScheduler:
    """Static persistent scheduler: CTA i computes the tiles i, i + num_ctas and so on.

    Tiles are ordered along N, then M, then groups, then residue classes, or along M first. The CTAs of a cluster
    compute neighbouring tiles. If the first residue classes have longer reductions, CTAs take tiles in the opposite
    order in every second round, so that their sums of work are similar.
    """

    tile_m: int  # rows per tile
    tile_n: int  # columns per tile
    tiles_m: int  # tiles along M, a multiple of the cluster's CTAs along M
    tiles_n: int  # tiles along N, a multiple of the cluster's CTAs along N
    groups: int  # number of groups
    num_ctas: int  # CTAs that share the tiles
    tiles_per_cta: int  # maximum number of tiles per CTA
    cluster: Cluster = SINGLE_CTA  # the cluster of this CTA
    raster_order: str = "n"  # mode along which consecutive tiles are neighbours, "n" or "m"; they share operands in L2
    residues: int = 1  # number of residue classes or frames
    alternates: bool = False  # whether CTAs take tiles in the opposite order in every second round

    @property
    def num_tiles(self) -> int:
        """Number of output tiles."""
        return self.residues * self.groups * self.tiles_m * self.tiles_n

    @property
    def num_scheduled_tiles(self) -> int:
        """Number of tiles that CTAs compute in their loops, all unless `tiles_per_cta` is less than needed."""
        return min(self.num_tiles, self.num_ctas * self.tiles_per_cta)

    def is_valid(self, tile_idx: Expr) -> Expr:
        """Return whether there is a tile of this index; in the last round some CTAs have none."""
        is_exact = self.num_ctas * self.tiles_per_cta == self.num_scheduled_tiles
        return True if is_exact else tile_idx < self.num_scheduled_tiles

    def tile_at(self, tile_idx: Expr) -> WorkTile:
        """Return the tile of this CTA, where `tile_idx` counts tiles of all CTAs."""
        cluster = self.cluster
        clusters_m, clusters_n, index = self.tiles_m // cluster.m, self.tiles_n // cluster.n, tile_idx // cluster.size
        row, column = index // clusters_n % clusters_m, index % clusters_n
        if self.raster_order == "m":
            row, column = index % clusters_m, index // clusters_m % clusters_n
        product = index // (clusters_n * clusters_m)
        residue, group = 0, product
        if self.residues > 1:
            residue, group = (product, 0) if self.groups == 1 else (product // self.groups, product % self.groups)
        return WorkTile(
            m=(row * cluster.m + cluster.rank_m) * self.tile_m,
            n=(column * cluster.n + cluster.rank_n) * self.tile_n,
            group=group,
            residue=residue,
        )

    def tile_of_round(self, cta_idx: Expr, tile_round: Expr) -> tuple[Expr, WorkTile]:
        """Return the index and the tile of a CTA in a round."""
        position = cta_idx
        if self.alternates:
            position = T.Select(tile_round % 2 == 0, cta_idx, self.num_ctas - 1 - cta_idx)
        tile_idx = position + tile_round * self.num_ctas
        return tile_idx, self.tile_at(tile_idx)

    @contextmanager
    def work_tiles(self, cta_idx: Expr, first: Expr = 0, step: int = 1) -> Iterator[WorkTile]:
        """Open the loop of a CTA over its tiles; each role of a CTA opens its own.

        Args:
            cta_idx: Index of the CTA.
            first: First of the CTA's tiles that this role computes.
            step: Distance of the CTA's tiles that this role computes.
        """
        if self.tiles_per_cta == 1 and step == 1:
            yield self._in_registers(self.tile_at(cta_idx))
            return
        with serial_loop(ceil_div(self.tiles_per_cta, step), "round") as tile_round:
            cta_round = tile_round if step == 1 else tile_round * step + first
            tile_idx, tile = self.tile_of_round(cta_idx, cta_round)
            is_last_exact = self.tiles_per_cta % step == 0
            is_valid = self.is_valid(tile_idx) if is_last_exact else tile_idx < self.num_scheduled_tiles
            with if_(is_valid):
                if self.residues > 1:
                    tile = replace(tile, next_residue=self.tile_of_round(cta_idx, cta_round + 1)[1].residue)
                yield self._in_registers(tile)

    def _in_registers(self, tile: WorkTile) -> WorkTile:
        """Return a tile whose coordinates are in registers if it belongs to one of several residue classes.

        Addresses, taps and conditions depend on the class, and TVM would take seconds to simplify them as expressions
        of the tile's index. It knows nothing of a register's value.
        """
        if self.residues == 1:
            return tile
        names = [field.name for field in fields(WorkTile)]
        values = {name: getattr(tile, name) for name in names}
        return WorkTile(
            **{
                name: value if isinstance(value, int) else Register(f"tile_{name}", value=value).value
                for name, value in values.items()
            }
        )

    @classmethod
    def of_product(
        cls,
        extents: tuple[int, int],
        tile: tuple[int, int],
        groups: int,
        num_ctas: int,
        cluster: Cluster = SINGLE_CTA,
        raster_order: str = "n",
        residues: int = 1,
        alternates: bool = False,
    ) -> TileScheduler:
        """Return the scheduler of products of M × N elements, in tiles of m × n elements that overhang at the ends."""
        tiles_m = ceil_div(extents[0], tile[0] * cluster.m) * cluster.m
        tiles_n = ceil_div(extents[1], tile[1] * cluster.n) * cluster.n
        tiles_per_cta = ceil_div(residues * groups * tiles_m * tiles_n, num_ctas)
        rounds = num_ctas, tiles_per_cta
        return cls(*tile, tiles_m, tiles_n, groups, *rounds, cluster, raster_order, residues, alternates)
