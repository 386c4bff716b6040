"""How `hopper` cuts up a convolution, pixels × channels × taps, and what a block has of it.

A `HopperTiles` holds one config as numbers, or many configs as columns: each formula is written once, and serves the
program, the limits of a search and the choice of the defaults.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from tvmconv.arithmetic import ceil_div, round_up
from tvmconv.gpu import REGISTERS, WARP
from tvmconv.knobs import Columns
from tvmconv.workloads import Conv, epilogue

from ..product import CHUNK, SUM_BYTES, Product
from .workload import WARPGROUP, WGMMA_M, reach, residual, stores_by_tma

LINE = 1024  # bytes: 8 rows of 128, after which a swizzle repeats
BARRIER_BYTES = 8

WARPGROUPS = (1, 2, 3)
ROWS = (1, 2)
BLOCK_N = (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
ROW_BYTES = (32, 64, 128, 256)
PANEL_BYTES = 128  # of a row that lie together, at most: the widest swizzle
STAGES = (2, 3, 4, 5, 6, 8)
SPLITS = (1, 2, 3, 4, 5, 6, 8)
SHARERS_M, SHARERS_N = (1, 2, 4), (1, 2)

# Blocks at a time, one on a multiprocessor, of an H100 SXM or an H200, by how many a cluster has. A cluster stays in
# one group of 16 or 18 multiprocessors, of which some are left over. Elsewhere some blocks wait for others. Those of 2,
# 4 and 8 are cuOccupancyMaxActiveClusters'; with one cluster of 3, 5 or 6 more than here kernels took twice as long.
MULTIPROCESSORS = 132
IN_CLUSTERS = np.array([0, MULTIPROCESSORS, 66 * 2, 39 * 3, 30 * 4, 22 * 5, 17 * 6, 0, 15 * 8])
OWN_REGISTERS = 28  # of a thread, besides its accumulators
ALL_SHARED_BYTES, RESERVED_BYTES = 228 << 10, 1 << 10  # of a multiprocessor, and of it the driver's for each block
RESIDENT_THREADS = 2048  # of a multiprocessor
SLAB_BYTES = 128  # of channels that are stored at a time, at most
MEETING_M, MEETING_N = 4, 8  # pixels × channels whose sums lie together where sums meet


@dataclass(frozen=True)
class HopperTiles:
    """The tile of a block, and who works on it.

    Attributes:
        warpgroups: that multiply; each has 64 × `rows` pixels.
        rows: wgmmas of a warpgroup along the pixels.
        block_n: output channels of a block.
        row_bytes: of the reduction that a step stages for each pixel and channel, in panels as wide as a swizzle.
        stages: steps that are in shared memory at a time: being multiplied, or on their way.
        split_k: blocks of a cluster that share the sums of one output, each over a part of the steps.
        sharers_m: blocks of a cluster, of neighbouring pixels, that share the weights: each fetches a part for all.
        sharers_n: blocks of a cluster, of neighbouring channels, that share the input in the same way.
        taps: of a filter's line that read the same copy of the pixels, each a little further on: one, or all.
        reach: pixels by which the last of these taps is further on than the first.
    """

    warpgroups: Any
    rows: Any
    block_n: Any
    row_bytes: Any
    stages: Any
    split_k: Any
    sharers_m: Any
    sharers_n: Any
    taps: Any = 1
    reach: Any = 0

    @classmethod
    def of_columns(cls, c: Columns, w: Conv) -> HopperTiles:
        """The tiles of many configs."""
        return cls(**{name: c[name] for name in TILES}, taps=c.get("taps", 1), reach=reach(w))

    @property
    def block_m(self) -> Any:
        """Pixels of a block."""
        return self.warpgroups * self.rows * WGMMA_M

    @property
    def sharers(self) -> Any:
        """Blocks of a cluster that share operands."""
        return self.sharers_m * self.sharers_n

    @property
    def cluster(self) -> Any:
        """Blocks of a cluster."""
        return self.sharers * self.split_k

    @property
    def at_a_time(self) -> Any:
        """Blocks that run at a time, one on a multiprocessor."""
        return np.take(IN_CLUSTERS, self.cluster, mode="clip")  # no more than eight are legal

    @property
    def accumulators(self) -> Any:
        """Sums of a thread."""
        return self.rows * self.block_n // 2

    @property
    def threads(self) -> Any:
        """Threads of a block, but for those that fetch a residual: the warpgroups, and the warp that copies."""
        return self.warpgroups * WARPGROUP + WARP

    def all_threads(self, w: Conv) -> Any:
        """Threads of a block, with the warp that fetches a residual where that comes by TMA."""
        return self.threads + np.where(self.meets(w), 0, WARP if residual(w) else 0)

    def block_k(self, itemsize: int) -> Any:
        """Elements of the reduction that a step stages."""
        return self.row_bytes // itemsize

    @property
    def panel_bytes(self) -> Any:
        """Bytes of a row that lie together, and among which chunks are swizzled."""
        return np.minimum(self.row_bytes, PANEL_BYTES)

    def tiles_m(self, p: Product) -> Any:
        """Tiles along the pixels, of whole clusters."""
        return ceil_div(p.m, self.block_m * self.sharers_m) * self.sharers_m

    def tiles_n(self, p: Product) -> Any:
        """Tiles along the channels of a group, of whole clusters."""
        return ceil_div(p.n, self.block_n * self.sharers_n) * self.sharers_n

    def tiles(self, p: Product) -> Any:
        """Tiles of the output."""
        return p.groups * self.tiles_m(p) * self.tiles_n(p)

    def steps_of_tap(self, p: Product) -> Any:
        """Steps that the channels under one tap take."""
        return ceil_div(p.depth, self.block_k(p.itemsize))

    def all_steps(self, p: Product) -> Any:
        """Steps of the whole reduction."""
        return p.k // p.depth // self.taps * self.steps_of_tap(p)

    def steps(self, p: Product) -> Any:
        """Steps of a block, for one tile."""
        return ceil_div(self.all_steps(p), self.split_k)

    def stage_bytes(self) -> Any:
        """Shared memory of one stage: both operands."""
        return (self.pixel_rows * (self.block_m // WGMMA_M) + self.block_n * self.taps) * self.row_bytes

    @property
    def pixel_rows(self) -> Any:
        """Rows in shared memory of the 64 pixels of a wgmma, with those that further taps reach: whole swizzles."""
        return np.where(self.taps > 1, round_up(WGMMA_M + self.reach, 8), WGMMA_M)

    def slab_bytes(self, itemsize: int) -> Any:
        """Bytes of channels that are stored at a time: those that divide the block's, of a whole swizzle."""
        return np.gcd(self.block_n * itemsize, SLAB_BYTES)

    def slabs(self, itemsize: int) -> Any:
        """What a warpgroup stores one after another of a tile: 64 pixels × a slab of channels each."""
        return self.rows * (self.block_n * itemsize // self.slab_bytes(itemsize))

    def blocks(self, w: Conv) -> Any:
        """Blocks of the grid: as many as run at a time, if each takes tiles in turn."""
        p = Product.of(w)
        in_turn = np.minimum(self.tiles(p), self.at_a_time)
        return np.where(self.meets(w), self.tiles(p) * self.split_k, in_turn)

    def meets(self, w: Conv) -> Any:
        """Whether sums meet in shared memory before they are stored: of several blocks, or where TMA cannot store."""
        return (self.split_k > 1) | np.asarray(not stores_by_tma(w))

    @property
    def share_m(self) -> Any:
        """Pixels of a tile whose sums one block of its cluster adds up."""
        return ceil_div(self.block_m, self.split_k * MEETING_M) * MEETING_M

    def buffers(self, w: Conv) -> Any:
        """Slabs of a warpgroup in shared memory on their way out; with a residual, also on their way in."""
        slabs = self.slabs(Product.of(w).itemsize)
        return np.minimum(slabs, 4) if residual(w) else np.minimum(slabs, 2)

    def out_bytes(self, w: Conv) -> Any:
        """Shared memory of the slabs."""
        slab = WGMMA_M * self.slab_bytes(Product.of(w).itemsize)
        return np.where(self.meets(w), 0, self.warpgroups * self.buffers(w) * ceil_div(slab, LINE) * LINE)

    def bias_bytes(self, w: Conv) -> Any:
        """Shared memory of what the epilogue reads for each channel, of every warpgroup."""
        count = sum(operation.takes == "channel" for operation in epilogue.steps(w.epilogue))
        return np.where(self.meets(w), 0, self.warpgroups * count * self.block_n * SUM_BYTES)

    def barriers(self, w: Conv) -> Any:
        """mbarriers: two of each stage, and two of each slab that a residual comes in."""
        return 2 * self.stages + (2 * self.warpgroups * self.buffers(w) if residual(w) else 0)

    def ring_bytes(self) -> Any:
        """Shared memory of all stages, in whole lines: slabs lie behind them."""
        return round_up(self.stages * self.stage_bytes(), LINE)

    def front_bytes(self, w: Conv) -> Any:
        """Shared memory before the barriers: the stages, and what is stored behind them or, when sums meet, in them."""
        meeting = np.maximum(self.ring_bytes(), self.split_k * self.share_m * self.block_n * SUM_BYTES)
        return np.where(
            self.meets(w), round_up(meeting, CHUNK), self.ring_bytes() + self.out_bytes(w) + self.bias_bytes(w)
        )

    def shared_bytes(self, w: Conv) -> Any:
        """Dynamic shared memory of a block, with what it takes to begin at a whole line."""
        return LINE + self.front_bytes(w) + self.barriers(w) * BARRIER_BYTES

    def registers(self) -> Any:
        """Registers of a thread, about."""
        return self.accumulators + OWN_REGISTERS

    def together(self, w: Conv) -> Any:
        """Blocks that a multiprocessor runs at a time, if there are as many; of those that take tiles in turn, one."""
        p = Product.of(w)
        occupancy = np.minimum(
            ALL_SHARED_BYTES // (self.shared_bytes(w) + RESERVED_BYTES), RESIDENT_THREADS // self.threads
        )
        occupancy = np.minimum(occupancy, REGISTERS // (round_up(self.registers(), 8) * self.threads))
        wanted = ceil_div(self.tiles(p) * self.split_k, self.at_a_time)
        return np.where(self.meets(w), np.clip(np.minimum(occupancy, wanted), 1, None), 1)


TILES = [field.name for field in fields(HopperTiles)][:-2]  # the knobs of every workload
CHOICES = (WARPGROUPS, ROWS, BLOCK_N, ROW_BYTES, STAGES, SPLITS, SHARERS_M, SHARERS_N)
