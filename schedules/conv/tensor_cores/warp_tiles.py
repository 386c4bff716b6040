"""How `mma_sync` cuts up a product of matrices, pixels × channels × taps, and what that takes of a GPU.

A `WarpTiles` holds one config as numbers, or many configs as columns: each formula is written once, and serves the
program, the limits of a search and the cost model.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from tvmconv.gpu import MAX_REGISTERS, MAX_THREADS, REGISTERS, WARP
from tvmconv.knobs import Columns, Knobs
from tvmconv.knobs.space import Usage
from tvmconv.workloads import Conv, epilogue
from tvmconv.workloads.dtypes import numpy_dtype

CHUNK = 16  # bytes that an asynchronous copy and a row of `ldmatrix` have at most
MMA_M = 16  # pixels of an mma
MMA_N = 8  # channels of an mma
MMA_BYTES = 32  # of the reduction, of an mma
SUM_BYTES = 4  # of a float32

BLOCK_M = (16, 32, 48, 64, 96, 128, 256)
BLOCK_N = (16, 32, 64, 96, 128, 256)
BLOCK_K_BYTES = (64, 128, 256)
WARPS = (1, 2, 4)  # along an axis of the tile
SLICES = (1, 2, 4)  # of a step's reduction, for as many warps
STAGES = (2, 3, 4, 6)
SPLITS = (1, 2, 4, 8)
TURNS = (1, 2, 4)

SEARCHED = 2.0  # times the best estimate: of the 40 searches that it was fitted to, the best was within 1.5 times
GOOD_BLOCKS = 100  # at least, of blocks that compute several tiles
FEW_BLOCKS = 140  # about as many as large GPUs have multiprocessors: with more, a split reduction gains nothing
MAX_ACCUMULATORS = 128  # of a thread
OWN_REGISTERS = 26  # of a thread, besides those that there is a formula for
PORTABLE_SHARED_BYTES = 99 << 10  # that a block may have on every GPU since sm_80
SHARED_BYTES, RESERVED_BYTES = 228 << 10, 1 << 10  # of a multiprocessor of sm_90, and of it the driver's for each block
RESIDENT_THREADS = 2048  # of a multiprocessor


class Product(NamedTuple):
    """The product of matrices that a convolution is, once for each group.

    Attributes:
        m: pixels of the whole batch.
        n: output channels of a group.
        k: input channels of a group × taps.
        depth: input channels of a group.
        groups: how many products there are.
        itemsize: bytes of an element of the operands.
        least_bytes: that are moved from and to memory at least.
        rank: axes of space, of which each has a coordinate.
    """

    m: int
    n: int
    k: int
    depth: int
    groups: int
    itemsize: int
    least_bytes: int
    rank: int

    @classmethod
    def of(cls, w: Conv) -> Product:
        """The product of a convolution."""
        depth = w.C // w.groups
        k = depth * math.prod(w.kernel)
        return cls(
            w.N * math.prod(w.out),
            w.O // w.groups,
            k,
            depth,
            w.groups,
            numpy_dtype(w.storage).itemsize,
            w.min_bytes,
            w.rank,
        )


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
    def ask(cls, k: Knobs, w: Conv) -> WarpTiles:
        """The tiles from knobs; the defaults suit the workload."""
        p, default = Product.of(w), preferred(w)
        ks = tuple(n // p.itemsize for n in BLOCK_K_BYTES)
        tiles = cls(
            block_m=k.choice("block_m", BLOCK_M, default.block_m),
            block_n=k.choice("block_n", BLOCK_N, default.block_n),
            block_k=k.choice("block_k", ks, default.block_k),
            warps_m=k.choice("warps_m", WARPS, default.warps_m),
            warps_n=k.choice("warps_n", WARPS, default.warps_n),
            warps_k=k.choice("warps_k", SLICES, default.warps_k),
            stages=k.choice("stages", STAGES, default.stages),
            split_k=k.choice("split_k", SPLITS, default.split_k),
            meet=k.choice("meet", ("scratch", "cluster"), default.meet),
            tiles_per_block=k.choice("tiles_per_block", TURNS, default.tiles_per_block),
            residual=k.choice("residual", ("end", "begin"), "end") if _may_begin_with_residual(w) else "none",
        )
        tiles._demand(k, p)
        return tiles

    @classmethod
    def of_columns(cls, c: Columns) -> WarpTiles:
        """The tiles of many configs."""
        return cls(**{field.name: c[field.name] for field in fields(cls) if field.name in c})

    def _demand(self, k: Knobs, p: Product) -> None:
        """State what the choices have to fulfil together, and what is worth searching."""

        def demand(text: str, holds: Callable[[WarpTiles], Any]) -> None:
            k.condition(text, lambda c: holds(self.of_columns(c)))

        def search_only(text: str, holds: Callable[[WarpTiles], Any]) -> None:
            k.search_only(text, lambda c: holds(self.of_columns(c)))

        demand("a warp has whole mmas: 16 pixels, 16 channels", lambda t: t.warps_fit)
        demand(
            "a warp has an even number of mmas in a step",
            lambda t: t.block_k * p.itemsize % (2 * MMA_BYTES * t.warps_k) == 0,
        )
        demand("the threads copy at least 8 rows at a time", lambda t: t.threads * CHUNK >= 8 * t.block_k * p.itemsize)
        demand(f"at most {MAX_THREADS} threads", lambda t: t.threads <= MAX_THREADS)
        demand("each block of a split reduction has a step", lambda t: t.steps(p) * (t.split_k - 1) < t.all_steps(p))
        demand("blocks that meet in a cluster share out the pixels of their tile", lambda t: t.block_m % t.split_k == 0)
        demand(
            "only whole sums are computed in turn, and by one warp each",
            lambda t: (t.tiles_per_block == 1) | ((t.split_k == 1) & (t.warps_k == 1)),
        )
        demand(
            "a tile in turn has as many steps as are on their way",
            lambda t: (t.tiles_per_block == 1) | (t.stages - 1 <= t.all_steps(p)),
        )
        search_only(
            "tiles are in turn where they are many",
            lambda t: (t.tiles_per_block == 1) | (t.blocks(p) >= GOOD_BLOCKS),
        )
        search_only(
            "tiles are not twice the product", lambda t: (t.block_m < 2 * max(p.m, 16)) & (t.block_n < 2 * max(p.n, 16))
        )
        search_only(
            "steps are not twice the reduction", lambda t: t.block_k < 2 * max(p.k, BLOCK_K_BYTES[0] // p.itemsize)
        )
        search_only("no more stages than steps", lambda t: (t.stages <= t.steps(p) + 1) | (t.stages == STAGES[0]))
        search_only("few enough accumulators", lambda t: t.accumulators <= MAX_ACCUMULATORS)
        search_only(
            "all threads' registers fit",
            lambda t: (
                (t.registers(p.itemsize, p.rank) <= MAX_REGISTERS)
                & (t.registers(p.itemsize, p.rank) * t.threads <= REGISTERS)
            ),
        )
        search_only(
            "a reduction is split where blocks are few", lambda t: (t.split_k == 1) | (t.tiles(p) <= FEW_BLOCKS)
        )
        best = preferred_estimate(p)
        search_only(f"estimated to take at most {SEARCHED} times the best", lambda t: t.estimate(p) <= SEARCHED * best)
        search_only("one of several equal configs", lambda t: (t.split_k > 1) | (t.meet == "scratch"))

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
        places = -(-self.block_m // rows) * (1 + rank) + -(-self.block_n // rows)
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
        return p.groups * -(-p.m // self.block_m) * -(-p.n // self.block_n)

    def blocks(self, p: Product) -> Any:
        """Blocks of the grid."""
        return -(-self.tiles(p) // self.tiles_per_block) * self.split_k

    def all_steps(self, p: Product) -> Any:
        """Steps of the whole reduction."""
        return -(-p.k // self.block_k)

    def steps(self, p: Product) -> Any:
        """Steps of a block."""
        return -(-self.all_steps(p) // self.split_k)

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

    def at_a_time(self, p: Product, gpu: Rates) -> Any:
        """Blocks that a multiprocessor runs at a time, if there are as many: of Hopper's shared memory and threads."""
        shared = self.stages * self.stage_bytes(p) + RESERVED_BYTES
        registers = -(-self.registers(p.itemsize, p.rank) // 8) * 8
        occupancy = np.minimum(SHARED_BYTES // shared, REGISTERS // (registers * self.threads))
        occupancy = np.minimum(occupancy, RESIDENT_THREADS // self.threads)
        return np.clip(np.minimum(occupancy, -(-self.tiles(p) * self.split_k // gpu.multiprocessors)), 1, None)

    def estimate(self, p: Product, gpu: Rates | None = None) -> Any:
        """Microseconds that a launch takes, about: to begin with, and to leave out what cannot be good.

        Rounds of blocks run one after another. A block takes its end, and for each step what limits it most: the tensor
        cores, shared memory, the L2 cache, its latency, or what one warp waits for.
        """
        gpu = gpu or H200
        load = self.tiles(p) * self.split_k / gpu.multiprocessors  # blocks of a multiprocessor
        together = self.at_a_time(p, gpu)
        rounds = np.floor(load / together)
        left = np.ceil(load - rounds * together)
        total = gpu.launch + rounds * self._round(p, gpu, together) + (left > 0) * self._round(p, gpu, left)
        total = _norm(total, gpu.launch + p.least_bytes / gpu.memory)
        sums = p.groups * p.m * p.n * SUM_BYTES * self.split_k
        total = total + self.in_scratch * (gpu.scratch + 2 * sums / gpu.memory)
        return total + self.in_cluster * (gpu.cluster * self.split_k + sums / gpu.l2)

    def _round(self, p: Product, gpu: Rates, together: Any) -> Any:
        """Microseconds of blocks that run together."""
        together = np.maximum(together, 1)
        products = self.block_m * self.block_n * self.block_k
        warps_m_n = self.warps_m * self.warps_n
        staged = self.stage_bytes(p)
        read = (self.block_m * self.warps_n + self.block_n * self.warps_m) * self.block_k * p.itemsize
        mmas = products * p.itemsize // (MMA_M * MMA_N * MMA_BYTES) / (warps_m_n * self.warps_k)
        step = _norm(
            together * products * (p.itemsize / 2) / gpu.products,
            together * (read + staged) / gpu.shared,
            together * gpu.multiprocessors * staged / gpu.l2,
            gpu.l2_latency / np.clip(np.minimum(self.stages - 1, self.steps(p)), 1, None),
            gpu.step + gpu.mma * mmas,
        )
        return self.steps(p) * step + gpu.end * self.accumulators * together

    def usage(self, p: Product, staged_itemsize: Any, of_channels: Any) -> Usage:
        """What configs use of a device; the arguments are those of `shared_bytes`."""
        steps, tiles = self.steps(p), self.tiles(p)
        products = self.block_m * self.block_n * self.block_k
        blocks = self.blocks(p)
        shared = self.shared_bytes(p, staged_itemsize, of_channels)
        return Usage(
            threads=self.threads,
            shared_bytes=0 * shared,
            dynamic_shared_bytes=shared,
            cluster=np.where(self.in_cluster, self.split_k, 1),
            accumulators=self.accumulators,
            blocks=blocks,
            steps=steps,
            registers=self.registers(p.itemsize, p.rank),
            products=products * steps,
            intensity=self.block_m * self.block_n / (self.block_m + self.block_n),
            traffic=tiles * self.split_k * steps * self.stage_bytes(p),
            waste=tiles * self.block_m * self.block_n / (p.groups * p.m * p.n),
            in_flight=(self.stages - 1) * self.stage_bytes(p),
            estimate=self.estimate(p),
            all_threads=blocks * self.threads,
        )


TILES = [field.name for field in fields(WarpTiles) if field.name != "residual"]  # the knobs of every workload


def _may_begin_with_residual(w: Conv) -> bool:
    """Whether a tensor like the output is among the operations that add and come first in the epilogue."""
    adding = itertools.takewhile(lambda operation: operation.adds, epilogue.steps(w.epilogue))
    return any(operation.takes == "output" for operation in adding)


class Rates(NamedTuple):
    """What `WarpTiles.estimate` takes a GPU to be able to do; times in microseconds, traffic in bytes a microsecond.

    The numbers were fitted to 3,824 timings in float16 on one H200: layers of ResNet-50, YOLOv8s and ConvNeXt-T, and
    d2l-tvm's, at batch 1 and 32. Half of all estimates are within 10 % of what was measured. Of what was measured of a
    layer, the config with the best estimate takes 1.09 times the fastest one's time, and the fastest of the twelve with
    the best estimates 1.01 times (geometric means).
    """

    multiprocessors: int = 132
    products: float = 1.77e6  # 16-bit multiply-adds of a multiprocessor
    shared: float = 1.97e5  # shared memory of a multiprocessor
    l2: float = 1.28e7  # the L2 cache, for the operands of all blocks
    memory: float = 2.68e6  # global memory, for what has to be moved
    l2_latency: float = 0.56  # of a step's operands, shared by the steps that are in flight
    step: float = 0.116  # of a step whatever is in it: its barrier, and fragments that are waited for
    mma: float = 0.0034  # of a warp's mma behind another
    end: float = 0.0054  # of a block, for each accumulator of a thread
    scratch: float = 0.70  # of a second launch
    cluster: float = 0.68  # of a cluster, for each of its blocks
    launch: float = 1.83


H200 = Rates()
SHARPNESS = 4  # of the maximum of what limits a step: its p-norm


def preferred(w: Conv) -> WarpTiles:
    """The default tiles: those of the best estimate, among those that every GPU since sm_80 can run."""
    p = Product.of(w)
    candidates = _candidates(p.itemsize, p.rank)
    possible = candidates.steps(p) * (candidates.split_k - 1) < candidates.all_steps(p)
    best = int(np.argmin(np.where(possible, candidates.estimate(p), np.inf)))
    return WarpTiles(**{name: getattr(candidates, name)[best].item() for name in TILES})


@functools.cache
def _candidates(itemsize: int, rank: int) -> WarpTiles:
    """Tiles that promise something for some workload, for elements of a size and axes of space, as columns."""
    ks = [nbytes // itemsize for nbytes in BLOCK_K_BYTES]
    choices = (BLOCK_M, BLOCK_N, ks, WARPS, WARPS, SLICES, STAGES[:4], SPLITS)
    columns = [column.ravel() for column in np.meshgrid(*choices, indexing="ij")]
    scratch = np.full(len(columns[0]), "scratch")
    names = TILES[: len(columns)]
    tiles = WarpTiles(**dict(zip(names, columns, strict=True)), meet=scratch, tiles_per_block=np.ones_like(columns[0]))
    k_bytes = tiles.block_k * itemsize
    good = (
        tiles.warps_fit
        & (k_bytes % (2 * MMA_BYTES * tiles.warps_k) == 0)
        & (tiles.threads * CHUNK >= 8 * k_bytes)
        & (tiles.threads >= 2 * WARP)
        & (tiles.threads <= 8 * WARP)
        & (tiles.accumulators <= MAX_ACCUMULATORS)
        & (tiles.registers(itemsize, rank) <= MAX_REGISTERS)
        & (tiles.registers(itemsize, rank) * tiles.threads <= REGISTERS)
        & (tiles.stages * (tiles.block_m + tiles.block_n) * k_bytes <= PORTABLE_SHARED_BYTES)
        & (tiles.block_m * tiles.pitch(SUM_BYTES) <= PORTABLE_SHARED_BYTES)
        & (tiles.block_m * tiles.block_n * SUM_BYTES * (tiles.warps_k - 1) <= PORTABLE_SHARED_BYTES)
    )
    return WarpTiles(**{name: getattr(tiles, name)[good] for name in TILES})


def preferred_estimate(p: Product) -> float:
    """The best estimate of all tiles that promise something."""
    return float(np.min(_candidates(p.itemsize, p.rank).estimate(p)))


def _norm(*quantities: Any) -> Any:
    """The largest of several quantities, smoothed: more where others come near to it."""
    return sum(quantity**SHARPNESS for quantity in quantities) ** (1 / SHARPNESS)
