"""How `mma_sync` cuts up a product of matrices, pixels × channels × taps, and what that takes of a GPU.

A `WarpTiles` holds one config as numbers, or many configs as columns: each formula is written once, and serves the
program, the limits of a search and the cost model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from tvmconv.gpu import MAX_REGISTERS, MAX_THREADS, REGISTERS, WARP
from tvmconv.knobs import Columns, Knobs
from tvmconv.knobs.space import Usage
from tvmconv.workloads import Conv
from tvmconv.workloads.dtypes import numpy_dtype

CHUNK = 16  # bytes that an asynchronous copy and a row of `ldmatrix` have at most
MMA_M = 16  # pixels of an mma
MMA_N = 8  # channels of an mma
MMA_BYTES = 32  # of the reduction, of an mma
SUM_BYTES = 4  # of a float32

BLOCK_M = (16, 32, 64, 128, 256)
BLOCK_N = (16, 32, 48, 64, 96, 128, 192, 256)
BLOCK_K_BYTES = (64, 128, 256)
WARPS = (1, 2, 4, 8)
STAGES = (2, 3, 4, 5, 6, 8)
SPLITS = (1, 2, 4, 8)

FEW_BLOCKS = 140  # about as many as large GPUs have multiprocessors: with more, a split reduction gains nothing
MAX_ACCUMULATORS = 128  # of a thread
OWN_REGISTERS = 40  # of a thread, besides accumulators and fragments
PORTABLE_SHARED_BYTES = 99 << 10  # that a block may have on every GPU since sm_80
GOOD_BLOCKS = 120  # that the default tiles make at least, where the workload has them


class Product(NamedTuple):
    """The product of matrices that a convolution is, once for each group.

    Attributes:
        m: pixels of the whole batch.
        n: output channels of a group.
        k: input channels of a group × taps.
        depth: input channels of a group.
        groups: how many products there are.
        itemsize: bytes of an element of the operands.
    """

    m: int
    n: int
    k: int
    depth: int
    groups: int
    itemsize: int

    @classmethod
    def of(cls, w: Conv) -> Product:
        """The product of a convolution."""
        depth = w.C // w.groups
        k = depth * math.prod(w.kernel)
        return cls(w.N * math.prod(w.out), w.O // w.groups, k, depth, w.groups, numpy_dtype(w.storage).itemsize)


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
            warps_k=k.choice("warps_k", WARPS, default.warps_k),
            stages=k.choice("stages", STAGES, default.stages),
            split_k=k.choice("split_k", SPLITS, default.split_k),
            meet=k.choice("meet", ("scratch", "cluster"), default.meet),
        )
        tiles._demand(k, p)
        return tiles

    @classmethod
    def of_columns(cls, c: Columns) -> WarpTiles:
        """The tiles of many configs."""
        return cls(**{field.name: c[field.name] for field in fields(cls)})

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
            lambda t: (t.registers <= MAX_REGISTERS) & (t.registers * t.threads <= REGISTERS),
        )
        search_only(
            "a reduction is split where blocks are few", lambda t: (t.split_k == 1) | (t.tiles(p) <= FEW_BLOCKS)
        )
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

    @property
    def registers(self) -> Any:
        """Registers of a thread, about: sums, two sets of fragments, and its own."""
        fragments = self.block_m // self.warps_m // MMA_M * 4 + self.block_n // self.warps_n // MMA_N * 2
        return self.accumulators + 2 * fragments + OWN_REGISTERS

    @property
    def in_cluster(self) -> Any:
        """Whether blocks of a cluster add up their sums."""
        return (self.split_k > 1) & (self.meet == "cluster")

    @property
    def in_scratch(self) -> Any:
        """Whether a step of its own adds up sums in scratch memory."""
        return (self.split_k > 1) & (self.meet == "scratch")

    def rows(self, p: Product) -> Any:
        """Rows of an operand that the threads copy at a time."""
        return self.threads * CHUNK // (self.block_k * p.itemsize)

    def tiles(self, p: Product) -> Any:
        """Tiles of the output."""
        return p.groups * -(-p.m // self.block_m) * -(-p.n // self.block_n)

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

    def shared_bytes(self, p: Product, staged_itemsize: Any) -> Any:
        """Dynamic shared memory of a block: the stages; after the last step, the warps' sums, and then the tile."""
        ring = self.stages * self.stage_bytes(p)
        meeting = self.block_m * self.block_n * SUM_BYTES * (self.warps_k - 1)
        out = self.block_m * self.pitch(staged_itemsize) * (1 - self.in_scratch)
        return np.maximum(np.maximum(ring, meeting), out)

    def usage(self, p: Product, staged_itemsize: Any) -> Usage:
        """What configs use of a device."""
        steps, tiles = self.steps(p), self.tiles(p)
        products = self.block_m * self.block_n * self.block_k
        blocks = tiles * self.split_k
        shared = self.shared_bytes(p, staged_itemsize)
        return Usage(
            threads=self.threads,
            shared_bytes=0 * shared,
            dynamic_shared_bytes=shared,
            cluster=np.where(self.in_cluster, self.split_k, 1),
            accumulators=self.accumulators,
            blocks=blocks,
            steps=steps,
            registers=self.registers,
            products=products * steps,
            intensity=self.block_m * self.block_n / (self.block_m + self.block_n),
            traffic=blocks * steps * self.stage_bytes(p),
            waste=tiles * self.block_m * self.block_n / (p.groups * p.m * p.n),
            in_flight=(self.stages - 1) * self.stage_bytes(p),
            all_threads=blocks * self.threads,
        )


def preferred(w: Conv) -> WarpTiles:
    """The default tiles: as large as leaves enough blocks, for shared memory that every GPU since sm_80 has."""
    p = Product.of(w)
    n = min((size for size in BLOCK_N if size >= min(p.n, 128)), default=128)
    shapes = [(m, size) for m in (128, 64, 32, 16) for size in (n, 64, 32) if size <= n]
    shapes.sort(key=lambda shape: (-shape[0] * shape[1], shape[0] < shape[1]))

    def blocks(shape: tuple[int, int]) -> int:
        return p.groups * -(-p.m // shape[0]) * -(-p.n // shape[1])

    useful = [shape for shape in shapes if shape[0] < 2 * max(p.m, MMA_M)]
    block_m, block_n = next((shape for shape in useful if blocks(shape) >= GOOD_BLOCKS), useful[-1])
    warps_m = min(block_m // (2 * MMA_M) or 1, 4)
    warps_n = max(1, min(block_n // (4 * MMA_N), 8 // warps_m, 2))
    while block_n % (warps_n * 2 * MMA_N):
        warps_n //= 2
    k_bytes = next(n for n in (128, 64) if n < 2 * p.k * p.itemsize or n == 64)
    warps_k = 1
    if warps_m * warps_n < 4 and k_bytes == 128:
        warps_k = 2
    tiles = WarpTiles(block_m, block_n, k_bytes // p.itemsize, warps_m, warps_n, warps_k, 2, 1, "scratch")
    fitting = [
        s for s in STAGES if s * tiles.stage_bytes(p) <= PORTABLE_SHARED_BYTES and s <= max(tiles.steps(p) + 1, 2)
    ]
    stages = max((s for s in fitting if s <= 4), default=2)
    return WarpTiles(block_m, block_n, k_bytes // p.itemsize, warps_m, warps_n, warps_k, stages, 1, "scratch")
