"""The last wave of a persistent grid, whose tiles several CTAs divide along K or along their columns.

A grid of 132 CTAs computes 400 tiles in three whole waves and four tiles more, for which 128 CTAs would wait. With
eight parts along K, 32 CTAs compute these four in an eighth of the time. The sums of the parts pass through a
workspace, and a second kernel adds them in order, so that results are the same bits in every run.

Source: Osama et al., "Stream-K: Work-Centric Parallel Decomposition for Dense Matrix-Matrix Multiplication on the GPU",
2023, section 5 (data-parallel hybrids). Here each part of a tile has equally many K tiles, as in fixed split.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tvmconv.arithmetic import ceil_div
from tvmconv.target import WARP_SIZE

from ....tir_builder import Buffer, Expr, allocate, emit_ptx, if_, is_below, logical_and, store
from ..implicit_gemm_shape import ImplicitGemmShape
from .atoms import ThreadPosition, WgmmaAtom
from .epilogue_ops import EpilogueOps
from .tile_scheduler import KRange, TileScheduler, WorkTile
from .workspace_reduction import OutputVector, WorkspaceReduction

REDUCTION_THREADS = 128  # threads per CTA of the second kernel


@dataclass(frozen=True)
class NarrowLastWave:
    """The tiles of the last wave in parts of their columns; CTA i computes part i % parts of tile i // parts.

    No sums are added, so that a part needs neither a workspace nor another kernel. It reads all rows of the tile.
    """

    tiles: TileScheduler  # all tiles; those of the last wave follow the whole waves
    tile_n: int  # columns of a part

    @property
    def num_tiles(self) -> int:
        """Tiles of the last wave."""
        return self.tiles.num_tiles % self.tiles.num_ctas

    @property
    def whole_waves(self) -> TileScheduler:
        """The tiles before the last wave."""
        return dataclasses.replace(self.tiles, tiles_per_cta=self.tiles.num_tiles // self.tiles.num_ctas)

    @contextmanager
    def open_tile(self, cta_idx: Expr) -> Iterator[WorkTile]:
        """Open the branch of CTAs that have a part; the value is its place."""
        parts, first_tile = self.tiles.tile_n // self.tile_n, self.tiles.num_tiles - self.num_tiles
        with if_(cta_idx < self.num_tiles * parts):
            tile = self.tiles.tile_at(first_tile + cta_idx // parts)
            yield dataclasses.replace(tile, n=tile.n + cta_idx % parts * self.tile_n)


@dataclass(frozen=True)
class SplitLastWave:
    """The tiles of the last wave and their parts; CTA i computes part i % parts of the i // parts-th tile."""

    tiles: TileScheduler  # all tiles; those of the last wave follow the whole waves
    num_tiles: int  # tiles of the last wave
    parts: int  # parts of each tile
    total_k_tiles: int  # K tiles of a whole tile
    workspace: Buffer  # partial sums (tiles, parts, rows, columns)

    @classmethod
    def with_workspace(cls, tiles: TileScheduler, parts: int, total_k_tiles: int) -> SplitLastWave:
        """Return the last wave of a grid, and allocate its workspace.

        Args:
            tiles: All tiles; those that do not fill a wave are the last wave.
            parts: Parts of each tile.
            total_k_tiles: K tiles of a whole tile.
        """
        num_tiles = tiles.num_tiles % tiles.num_ctas
        num_elements = num_tiles * parts * tiles.tile_m * tiles.tile_n
        return cls(tiles, num_tiles, parts, total_k_tiles, allocate("last_wave", num_elements, "float32", "global"))

    @property
    def whole_waves(self) -> TileScheduler:
        """The tiles before the last wave."""
        return dataclasses.replace(self.tiles, tiles_per_cta=self.tiles.num_tiles // self.tiles.num_ctas)

    @property
    def first_tile(self) -> int:
        """Index of the first tile."""
        return self.tiles.num_tiles - self.num_tiles

    @contextmanager
    def open_part(self, cta_idx: Expr) -> Iterator[tuple[WorkTile, KRange]]:
        """Open the branch of CTAs that have a part; the value is its tile and its K tiles."""
        with if_(cta_idx < self.num_tiles * self.parts):
            k_range = KRange(cta_idx % self.parts, ceil_div(self.total_k_tiles, self.parts), self.total_k_tiles)
            yield self.tiles.tile_at(self.first_tile + cta_idx // self.parts), k_range

    def store_partial_sums(
        self,
        sums: Sequence[Expr],
        atom: WgmmaAtom,
        m_atoms: int,
        cta_idx: Expr,
        thread: ThreadPosition,
        warpgroup: Expr,
    ) -> None:
        """Store the sums of a part to the workspace; run by all threads of a warpgroup."""
        pair = allocate("partial_pair", 2, "float32")
        warp_row = thread.warpgroup_thread // WARP_SIZE * 16 + thread.lane // 4
        first_row = cta_idx * self.tiles.tile_m + warpgroup * (m_atoms * atom.m) + warp_row
        for m_atom in range(m_atoms):
            for half in range(2):
                row = first_row + (m_atom * atom.m + half * 8)
                for columns in range(atom.n // 8):
                    first = m_atom * atom.num_accumulators + columns * 4 + half * 2
                    for e in range(2):
                        store(pair, e, sums[first + e])
                    index = row * self.tiles.tile_n + columns * 8 + thread.lane % 4 * 2
                    emit_ptx("st.global.v2.b32", self.workspace.access_ptr("w", offset=index), pair[0], pair[1])

    def emit_reduction(self, shape: ImplicitGemmShape, ops: EpilogueOps, arguments: Mapping[str, Buffer]) -> None:
        """Emit the kernel that adds the parts of the tiles, applies the epilogue and stores vectors of channels."""
        tile_m, tile_n = self.tiles.tile_m, self.tiles.tile_n
        vector = math.gcd(math.gcd(shape.n, tile_n), shape.output_vector)
        vectors_per_tile = tile_m * tile_n // vector

        def locate(item: Expr) -> OutputVector:
            number, element = item // vectors_per_tile, item % vectors_per_tile * vector
            tile = self.tiles.tile_at(self.first_tile + number)
            m, channel = tile.m + element // tile_n, tile.n + element % tile_n
            is_inside = logical_and(is_below(m, shape.m, tile_m), is_below(channel, shape.n, tile_n))
            channel = tile.group * shape.n + channel
            return OutputVector(
                channel,
                m * (shape.groups * shape.n) + channel,
                lambda part: (number * self.parts + part) * (tile_m * tile_n) + element,
                is_inside,
            )

        num_vectors = self.num_tiles * vectors_per_tile
        reduction = WorkspaceReduction(num_vectors, vector, self.parts, locate, REDUCTION_THREADS)
        reduction.emit(self.workspace, ops, arguments, "Y")
