"""How `mma_sync` cuts up a product of matrices, pixels × channels × taps.

A `WarpTiles` holds one config as numbers, or many configs as columns: each formula is written once, and serves the
program, the limits of a search and the cost model.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from tvmconv.arithmetic import ceil_div
from tvmconv.gpu import WARP
from tvmconv.knobs import Columns

from ..product import CHUNK, SUM_BYTES, Product

MMA_M = 16  # pixels of an mma
MMA_N = 8  # channels of an mma
MMA_BYTES = 32  # of the reduction, of an mma

BLOCK_M = (16, 32, 48, 64, 96, 128, 256)
BLOCK_N = (16, 32, 64, 96, 128, 256)
BLOCK_K_BYTES = (64, 128, 256)
WARPS = (1, 2, 4)  # along an axis of the tile
SLICES = (1, 2, 4)  # of a step's reduction, for as many warps
STAGES = (2, 3, 4, 6)
SPLITS = (1, 2, 4, 8)
TURNS = (1, 2, 4)

MAX_ACCUMULATORS = 128  # of a thread
OWN_REGISTERS = 26  # of a thread, besides those that there is a formula for


@dataclass(frozen=True)
class WarpTiles:
    """The tile of a block, and how its warps share it.

    Attributes:
        block_m: pixels of a block.
        block_n: output channels of a block.
        block_k: elements of the reduction that a step stages.
        warps_m: warps along the pixels.
        warps_n: warps along the channels.
        warps_k: warps that share the sums of one output, each over a part of every step.
        stages: steps that are in shared memory at a time: being multiplied, or on their way.
        split_k: blocks that share the sums of one output, each over a part of the steps.
        meet: where these blocks' sums meet: in the shared memory of a "cluster", or in "scratch" memory.
        tiles_per_block: tiles that a block computes, one after another.
        residual: where a residual is added: at the "begin" of a sum, or at its "end"; "none" where there is none that a
            sum could begin with.
    """

    block_m: Any
    block_n: Any
    block_k: Any
    warps_m: Any
    warps_n: Any
    warps_k: Any
    stages: Any
    split_k: Any
    meet: Any
    tiles_per_block: Any
    residual: Any = "none"

    @classmethod
    def of_columns(cls, c: Columns) -> WarpTiles:
        """The tiles of many configs."""
        return cls(**{field.name: c[field.name] for field in fields(cls) if field.name in c})

    @property
    def warps_fit(self) -> Any:
        """Whether the tile falls into whole tiles of warps."""
        return (self.block_m % (self.warps_m * MMA_M) == 0) & (self.block_n % (self.warps_n * 2 * MMA_N) == 0)

    @property
    def threads(self) -> Any:
        """Threads of a block."""
        return self.warps_m * self.warps_n * self.warps_k * WARP

    @property
    def accumulators(self) -> Any:
        """Sums of a thread."""
        return self.block_m * self.block_n // (self.warps_m * self.warps_n * WARP)

    def registers(self, itemsize: int, rank: int) -> Any:
        """Registers of a thread, about: sums, two sets of fragments, where the rows are that it copies, and others."""
        fragments = self.block_m // self.warps_m // MMA_M * 4 + self.block_n // self.warps_n // MMA_N * 2
        rows = self.rows(itemsize)
        places = ceil_div(self.block_m, rows) * (1 + rank) + ceil_div(self.block_n, rows)
        return self.accumulators + 2 * fragments + places + OWN_REGISTERS

    @property
    def in_cluster(self) -> Any:
        """Whether blocks of a cluster add up their sums."""
        return (self.split_k > 1) & (self.meet == "cluster")

    @property
    def in_scratch(self) -> Any:
        """Whether a step of its own adds up sums in scratch memory."""
        return (self.split_k > 1) & (self.meet == "scratch")

    def rows(self, itemsize: int) -> Any:
        """Rows of an operand that the threads copy at a time."""
        return self.threads * CHUNK // (self.block_k * itemsize)

    def tiles(self, p: Product) -> Any:
        """Tiles of the output."""
        return p.groups * ceil_div(p.m, self.block_m) * ceil_div(p.n, self.block_n)

    def blocks(self, p: Product) -> Any:
        """Blocks of the grid."""
        return ceil_div(self.tiles(p), self.tiles_per_block) * self.split_k

    def all_steps(self, p: Product) -> Any:
        """Steps of the whole reduction."""
        return ceil_div(p.k, self.block_k)

    def steps(self, p: Product) -> Any:
        """Steps of a block."""
        return ceil_div(self.all_steps(p), self.split_k)

    def stage_bytes(self, p: Product) -> Any:
        """Shared memory of one stage: both operands."""
        return (self.block_m + self.block_n) * self.block_k * p.itemsize

    def pitch(self, itemsize: Any) -> Any:
        """Bytes from one pixel to the next of the tile in shared memory, for elements of a size.

        A warp stores 8 rows of 4 pairs at a time: of 16-bit elements a word each, of floats two, half a warp at a time.
        These lie in distinct banks where rows are apart by 4 words, or by 8, beside a multiple of the banks.
        """
        return self.block_n * itemsize + 8 * itemsize

    def shared_bytes(self, p: Product, staged_itemsize: Any, of_channels: Any) -> Any:
        """Dynamic shared memory of a block: what `tile_bytes` tells, and behind it what there is for each channel.

        Args:
            p: the product.
            staged_itemsize: bytes of an element of the tile in shared memory.
            of_channels: how many numbers each channel has there, of the epilogue.
        """
        return self.tile_bytes(p, staged_itemsize) + of_channels * self.block_n * SUM_BYTES

    def tile_bytes(self, p: Product, staged_itemsize: Any) -> Any:
        """Shared memory for the stages; after the last step, the warps' sums, and then the tile.

        The tile has room of its own where the stages are already filled for the next one.
        """
        ring = self.stages * self.stage_bytes(p)
        meeting = self.block_m * self.block_n * SUM_BYTES * (self.warps_k - 1)
        out = self.block_m * self.pitch(staged_itemsize) * (1 - self.in_scratch)
        return np.where(self.tiles_per_block > 1, ring + out, np.maximum(np.maximum(ring, meeting), out))


TILES = [field.name for field in fields(WarpTiles) if field.name != "residual"]  # the knobs of every workload
