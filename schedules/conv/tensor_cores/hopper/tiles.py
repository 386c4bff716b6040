"""How `hopper` cuts up a convolution, pixels × channels × taps, and what that takes of a GPU.

A `HopperTiles` holds one config as numbers, or many configs as columns: each formula is written once, and serves the
program, the limits of a search and the choice of the defaults.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from tvmconv import tensor_map
from tvmconv.gpu import MAX_REGISTERS, REGISTERS, WARP
from tvmconv.knobs import Columns, Knobs
from tvmconv.knobs.space import Usage
from tvmconv.workloads import Conv, epilogue

from ..product import CHUNK, SUM_BYTES, Product

WARPGROUP = 4 * WARP  # threads that a wgmma is of
WGMMA_M = 64  # pixels of a wgmma
WGMMA_BYTES = 32  # of the reduction, of a wgmma
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

# Blocks at a time, one on a multiprocessor, of an H100 SXM or an H200. Where clusters have more than two blocks some
# multiprocessors are left over, as a cluster stays in one group of 16 or 18 (cuOccupancyMaxActiveClusters). Elsewhere
# some blocks wait for others.
MULTIPROCESSORS, IN_CLUSTERS = 132, 120
MAX_ACCUMULATORS = 128  # of a thread
OWN_REGISTERS = 28  # of a thread, besides its accumulators
PARTITIONS = 4  # of a multiprocessor, each with a part of the registers, among which a block's warps are dealt out
SHARED_BYTES = 227 << 10  # of a block
ALL_SHARED_BYTES, RESERVED_BYTES = 228 << 10, 1 << 10  # of a multiprocessor, and of it the driver's for each block
RESIDENT_THREADS = 2048  # of a multiprocessor
SLAB_BYTES = 128  # of channels that are stored at a time, at most
SEARCHED = 2.5  # times the best estimate


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
    def ask(cls, k: Knobs, w: Conv) -> HopperTiles:
        """The tiles from knobs; the defaults suit the workload."""
        default = preferred(w)
        choices = dict(zip(TILES, CHOICES, strict=True))
        chosen = {name: k.choice(name, choices[name], getattr(default, name)) for name in TILES}
        taps = k.choice("taps", tap_choices(w), default.taps) if can_share_taps(w) else 1
        tiles = cls(**chosen, taps=taps, reach=reach(w))
        tiles._demand(k, w)
        return tiles

    @classmethod
    def of_columns(cls, c: Columns, w: Conv) -> HopperTiles:
        """The tiles of many configs."""
        return cls(**{name: c[name] for name in TILES}, taps=c.get("taps", 1), reach=reach(w))

    def _demand(self, k: Knobs, w: Conv) -> None:
        """State what the choices have to fulfil together, and what is worth searching."""

        def of_columns(holds: Callable[[HopperTiles], Any]) -> Callable[[Columns], Any]:
            return lambda c: holds(self.of_columns(c, w))

        for text, holds in (*legal(w), *fitting(w)):
            k.condition(text, of_columns(holds))
        for text, holds in promising(w):
            k.search_only(text, of_columns(holds))

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
        return np.where(self.cluster > 2, IN_CLUSTERS, MULTIPROCESSORS)

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
        return -(-p.m // (self.block_m * self.sharers_m)) * self.sharers_m

    def tiles_n(self, p: Product) -> Any:
        """Tiles along the channels of a group, of whole clusters."""
        return -(-p.n // (self.block_n * self.sharers_n)) * self.sharers_n

    def tiles(self, p: Product) -> Any:
        """Tiles of the output."""
        return p.groups * self.tiles_m(p) * self.tiles_n(p)

    def steps_of_tap(self, p: Product) -> Any:
        """Steps that the channels under one tap take."""
        return -(-p.depth // self.block_k(p.itemsize))

    def all_steps(self, p: Product) -> Any:
        """Steps of the whole reduction."""
        return p.k // p.depth // self.taps * self.steps_of_tap(p)

    def steps(self, p: Product) -> Any:
        """Steps of a block, for one tile."""
        return -(-self.all_steps(p) // self.split_k)

    def stage_bytes(self) -> Any:
        """Shared memory of one stage: both operands."""
        return (self.pixel_rows * (self.block_m // WGMMA_M) + self.block_n * self.taps) * self.row_bytes

    @property
    def pixel_rows(self) -> Any:
        """Rows in shared memory of the 64 pixels of a wgmma, with those that further taps reach: whole swizzles."""
        return np.where(self.taps > 1, -(-(WGMMA_M + self.reach) // 8) * 8, WGMMA_M)

    def slab_bytes(self, itemsize: int) -> Any:
        """Bytes of channels that are stored at a time: those that divide the block's, of a whole swizzle."""
        return np.gcd(self.block_n * itemsize, SLAB_BYTES)

    def slabs(self, itemsize: int) -> Any:
        """What a warpgroup stores one after another of a tile: 64 pixels × a slab of channels each."""
        return self.rows * (self.block_n * itemsize // self.slab_bytes(itemsize))

    def pitch(self) -> Any:
        """Bytes from one pixel to the next of a tile of sums in shared memory.

        Half a warp stores four rows of four pairs at a time: in distinct banks where rows are apart by 8 words beside a
        multiple of the banks.
        """
        return self.block_n * SUM_BYTES + 8 * SUM_BYTES

    def blocks(self, w: Conv) -> Any:
        """Blocks of the grid: as many as run at a time, if each takes tiles in turn."""
        p = Product.of(w)
        in_turn = np.minimum(self.tiles(p), self.at_a_time)
        return np.where(self.meets(w), self.tiles(p) * self.split_k, in_turn)

    def meets(self, w: Conv) -> Any:
        """Whether sums meet in shared memory before they are stored: of several blocks, or where TMA cannot store."""
        return (self.split_k > 1) | np.asarray(not stores_by_tma(w))

    def buffers(self, w: Conv) -> Any:
        """Slabs of a warpgroup in shared memory on their way out; with a residual, also on their way in."""
        slabs = self.slabs(Product.of(w).itemsize)
        return np.minimum(slabs, 4) if residual(w) else np.minimum(slabs, 2)

    def out_bytes(self, w: Conv) -> Any:
        """Shared memory of the slabs."""
        slab = WGMMA_M * self.slab_bytes(Product.of(w).itemsize)
        return np.where(self.meets(w), 0, self.warpgroups * self.buffers(w) * -(-slab // LINE) * LINE)

    def bias_bytes(self, w: Conv) -> Any:
        """Shared memory of what the epilogue reads for each channel, of every warpgroup."""
        count = sum(operation.takes == "channel" for operation in epilogue.steps(w.epilogue))
        return np.where(self.meets(w), 0, self.warpgroups * count * self.block_n * SUM_BYTES)

    def barriers(self, w: Conv) -> Any:
        """mbarriers: two of each stage, and two of each slab that a residual comes in."""
        return 2 * self.stages + (2 * self.warpgroups * self.buffers(w) if residual(w) else 0)

    def ring_bytes(self) -> Any:
        """Shared memory of all stages, in whole lines: slabs lie behind them."""
        return -(-self.stages * self.stage_bytes() // LINE) * LINE

    def front_bytes(self, w: Conv) -> Any:
        """Shared memory before the barriers: the stages, and what is stored behind them or, when sums meet, in them."""
        meeting = np.maximum(self.ring_bytes(), self.block_m * self.pitch())
        return np.where(
            self.meets(w), -(-meeting // CHUNK) * CHUNK, self.ring_bytes() + self.out_bytes(w) + self.bias_bytes(w)
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
        occupancy = np.minimum(occupancy, REGISTERS // (-(-self.registers() // 8) * 8 * self.threads))
        wanted = -(-self.tiles(p) * self.split_k // self.at_a_time)
        return np.where(self.meets(w), np.clip(np.minimum(occupancy, wanted), 1, None), 1)

    def estimate(self, w: Conv, gpu: Rates | None = None) -> Any:
        """Microseconds that a launch takes, about: to begin with, and to leave out what cannot be good.

        Blocks run in rounds. Each step of a block takes what limits it most: the tensor cores, shared memory, the copy
        engine, which takes row by row, or what every step takes. A stage is at hand again when it has been multiplied
        and filled, `turn` steps later: with fewer stages the block waits.
        """
        gpu, p = gpu or H200, Product.of(w)
        together = self.together(w)
        blocks = self.tiles(p) * self.split_k
        rounds = -(-blocks // np.minimum(blocks, self.at_a_time * together))
        products = self.block_m * self.block_n * self.block_k(p.itemsize)
        rows = self.pixel_rows * (self.block_m / WGMMA_M) / self.sharers_n + self.block_n * self.taps / self.sharers_m
        wgmmas = self.row_bytes // WGMMA_BYTES * self.rows * self.warpgroups * self.taps
        shared = wgmmas * (WGMMA_M + self.block_n) * WGMMA_BYTES + self.stage_bytes()
        step = _norm(
            together * products * self.taps * (p.itemsize / 2) / gpu.products,
            together * shared / gpu.shared,
            together * rows / gpu.rows,
            gpu.step,
        )
        turn = (gpu.turn * step + (self.sharers > 1) * gpu.sharing) / np.minimum(self.stages, self.steps(p))
        end = gpu.end * self.accumulators + self.meets(w) * gpu.meet * self.block_m * self.block_n
        total = gpu.launch + rounds * (self.steps(p) * _norm(step, turn) + together * end)
        total = total + (rounds > 1) * rounds * gpu.begin + (self.split_k > 1) * gpu.cluster
        return _norm(total, gpu.launch + p.least_bytes / gpu.memory)

    def usage(self, w: Conv) -> Usage:
        """What configs use of a device."""
        p = Product.of(w)
        steps, tiles = self.steps(p), self.tiles(p)
        shared = self.shared_bytes(w)
        pixels = np.where(self.taps > 1, self.block_m // WGMMA_M * (WGMMA_M + self.reach), self.block_m)
        fetched = (pixels / self.sharers_n + self.block_n * self.taps / self.sharers_m) * self.row_bytes
        return Usage(
            threads=self.all_threads(w),
            shared_bytes=0 * shared,
            dynamic_shared_bytes=shared,
            cluster=self.cluster,
            accumulators=self.accumulators,
            blocks=self.blocks(w),
            steps=steps,
            registers=self.registers(),
            rounds=tiles * self.split_k / MULTIPROCESSORS,
            products=self.block_m * self.block_n * self.block_k(p.itemsize) * self.taps * steps,
            intensity=self.block_m * self.block_n / (self.block_m + self.block_n),
            traffic=tiles * self.split_k * steps * fetched,
            waste=tiles * self.block_m * self.block_n / (p.groups * p.m * p.n),
            in_flight=self.ring_bytes(),
            estimate=self.estimate(w),
        )


TILES = [field.name for field in fields(HopperTiles)][:-2]  # the knobs of every workload
CHOICES = (WARPGROUPS, ROWS, BLOCK_N, ROW_BYTES, STAGES, SPLITS, SHARERS_M, SHARERS_N)

Rule = tuple[str, Callable[[HopperTiles], Any]]


def legal(w: Conv) -> list[Rule]:
    """What the instructions demand."""
    p = Product.of(w)
    return [
        ("a wgmma's sums fit in its threads' registers", lambda t: t.accumulators <= MAX_ACCUMULATORS),
        ("channels of a group fill the steps", lambda t: (p.groups == 1) | (p.depth % t.block_k(p.itemsize) == 0)),
        ("a copy takes at most 1,024 pixels", lambda t: t.block_m // t.sharers_n <= tensor_map.MAX_PIXELS),
        ("a split reduction shares no operands", lambda t: (t.split_k == 1) | (t.sharers == 1)),
        ("blocks share operands where TMA stores", lambda t: (t.sharers == 1) | ~t.meets(w)),
        (
            "taps share the pixels that one block fetches, in one panel",
            lambda t: (t.taps == 1) | ((t.sharers_n == 1) & (t.row_bytes <= PANEL_BYTES)),
        ),
        ("the parts of a shared operand are whole swizzles", lambda t: t.block_n // t.sharers_m % 8 == 0),
        (
            "each block of a split reduction has a step",
            lambda t: t.steps(p) * (t.split_k - 1) < t.all_steps(p),
        ),
    ]


def fitting(w: Conv) -> list[Rule]:
    """What a block has room for."""

    def registers(t: HopperTiles) -> Any:
        warps = -(-t.all_threads(w) // (PARTITIONS * WARP))  # of a partition
        return t.registers() <= np.minimum(MAX_REGISTERS, REGISTERS // (PARTITIONS * WARP) // warps // 8 * 8)

    return [
        ("all threads' registers fit", registers),
        (f"at most {SHARED_BYTES} bytes of shared memory", lambda t: t.shared_bytes(w) <= SHARED_BYTES),
    ]


def promising(w: Conv) -> list[Rule]:
    """What is worth searching."""
    p = Product.of(w)
    best = preferred_estimate(w)
    return [
        ("tiles are not twice the product", lambda t: (t.block_m < 2 * max(p.m, 64)) & (t.block_n < 2 * max(p.n, 16))),
        ("rows are not twice the channels", lambda t: t.block_k(p.itemsize) < 2 * max(p.depth, 16)),
        ("no more stages than steps", lambda t: (t.stages <= t.steps(p) + 1) | (t.stages == STAGES[0])),
        ("a reduction is split where tiles are few", lambda t: (t.split_k == 1) | (t.tiles(p) <= MULTIPROCESSORS)),
        (
            "operands are shared where tiles are many",
            lambda t: (t.sharers == 1) | (2 * t.tiles(p) >= MULTIPROCESSORS),
        ),
        ("neighbouring channels are there to share the input", lambda t: (t.sharers_n == 1) | (p.n > t.block_n)),
        (f"estimated to take at most {SEARCHED} times the best", lambda t: t.estimate(w) <= SEARCHED * best),
    ]


def reach(w: Conv) -> int:
    """Pixels by which the last tap of a filter's line is further on than the first."""
    return w.dilation[-1] * (w.kernel[-1] - 1)


def tap_choices(w: Conv) -> tuple[int, ...]:
    """How many taps of a line may share a copy of the pixels."""
    return (1, w.kernel[-1]) if can_share_taps(w) else (1,)


def can_share_taps(w: Conv) -> bool:
    """Whether the taps of a line read neighbouring pixels, and the pixels of a wgmma lie in one line of the output."""
    lines = w.out[-1] % WGMMA_M == 0 and w.stride[-1] == 1
    return lines and w.kernel[-1] > 1 and WGMMA_M + reach(w) <= tensor_map.MAX_BOX


def residual(w: Conv) -> str | None:
    """The operation that reads a tensor like the output; None if none does, or several do."""
    reading = [operation.name for operation in epilogue.steps(w.epilogue) if operation.takes == "output"]
    return reading[0] if len(reading) == 1 else None


def stores_by_tma(w: Conv) -> bool:
    """Whether the output's rows are whole chunks, for each group, and at most one tensor like it is read."""
    p = Product.of(w)
    reading = [operation for operation in epilogue.steps(w.epilogue) if operation.takes == "output"]
    return p.n * p.itemsize % CHUNK == 0 and len(reading) <= 1


class Rates(NamedTuple):
    """What `HopperTiles.estimate` takes a GPU to be able to do; times in microseconds, traffic in bytes a microsecond.

    The numbers were fitted to 2,301 timings in float16 on one H200: 172 layers of ResNet-50, d2l-tvm's, YOLOv8s,
    EfficientNet-B0, ConvNeXt-T and Stable Diffusion 1.5, at batch 1, 2 and 32. Half of all estimates are within 8 % of
    what was measured. Of what was measured of a layer, the config with the best estimate takes 1.04 times the fastest
    one's time (geometric mean; more than 1.15 times for 11 of the layers).
    """

    products: float = 4.67e6  # 16-bit multiply-adds of a multiprocessor
    shared: float = 2.68e5  # shared memory of a multiprocessor
    rows: float = 1.08e3  # pixels and channels that are copied, of a multiprocessor
    memory: float = 3.93e6  # global memory, for what has to be moved
    step: float = 0.128  # of a step whatever is in it
    turn: float = 2.89  # steps after which a stage can be multiplied again
    sharing: float = 0.58  # more until then, where blocks of a cluster wait for each other
    end: float = 0.0037  # of a tile, for each accumulator of a thread
    meet: float = 1.8e-4  # of a tile whose sums meet, for each of them
    begin: float = 0.59  # of a tile, where a block has several
    cluster: float = 1.23  # of a cluster that shares sums
    launch: float = 1.53


H200 = Rates()
SHARPNESS = 4  # of the maximum of what limits a step: its p-norm


@functools.lru_cache(maxsize=256)
def preferred(w: Conv) -> HopperTiles:
    """The default tiles: those of the best estimate."""
    tiles, estimates = _candidates(w)
    best = int(np.argmin(estimates))
    return HopperTiles(**{name: getattr(tiles, name)[best].item() for name in (*TILES, "taps")}, reach=reach(w))


def preferred_estimate(w: Conv) -> float:
    """The best estimate."""
    return float(np.min(_candidates(w)[1]))


@functools.lru_cache(maxsize=16)
def _candidates(w: Conv) -> tuple[HopperTiles, Any]:
    """All tiles that are legal for a workload, as columns, and their estimates."""
    grid = np.meshgrid(*CHOICES, tap_choices(w), indexing="ij")
    columns = {name: column.ravel() for name, column in zip((*TILES, "taps"), grid, strict=True)}
    tiles = HopperTiles(**columns, reach=reach(w))
    good = functools.reduce(np.logical_and, (holds(tiles) for _, holds in (*legal(w), *fitting(w))))
    tiles = HopperTiles(**{name: column[good] for name, column in columns.items()}, reach=reach(w))
    return tiles, tiles.estimate(w)


def _norm(*quantities: Any) -> Any:
    """The largest of several quantities, smoothed: more where others come near to it."""
    return sum(np.asarray(quantity, float) ** SHARPNESS for quantity in quantities) ** (1 / SHARPNESS)
