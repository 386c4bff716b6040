"""How long tiles of `mma_sync` take, about, and those that take the least: the defaults."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from tvmconv.arithmetic import ceil_div, round_up
from tvmconv.gpu import MAX_REGISTERS, REGISTERS, WARP
from tvmconv.workloads import Conv

from ..overlap import overlapped
from ..product import CHUNK, SUM_BYTES, Product
from .parts import of_channels, staged_itemsize
from .tiles import (
    BLOCK_K_BYTES,
    BLOCK_M,
    BLOCK_N,
    MAX_ACCUMULATORS,
    MMA_BYTES,
    MMA_M,
    MMA_N,
    SLICES,
    SPLITS,
    STAGES,
    TILES,
    WARPS,
    WarpTiles,
)

PORTABLE_SHARED_BYTES = 99 << 10  # that a block may have on every GPU since sm_80
SHARED_BYTES, RESERVED_BYTES = 228 << 10, 1 << 10  # of a multiprocessor of sm_90, and of it the driver's for each block
RESIDENT_THREADS = 2048  # of a multiprocessor


class Rates(NamedTuple):
    """What `estimate` takes a GPU to be able to do; times in microseconds, traffic in bytes a microsecond.

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


def estimate(t: WarpTiles, p: Product, gpu: Rates | None = None) -> Any:
    """Microseconds that a launch takes, about: to begin with, and to leave out what cannot be good.

    Rounds of blocks run one after another. A block takes its end, and for each step what limits it most: the tensor
    cores, shared memory, the L2 cache, its latency, or what one warp waits for.
    """
    gpu = gpu or H200
    load = t.tiles(p) * t.split_k / gpu.multiprocessors  # blocks of a multiprocessor
    together = _at_a_time(t, p, gpu)
    rounds = np.floor(load / together)
    left = np.ceil(load - rounds * together)
    total = gpu.launch + rounds * _round(t, p, gpu, together) + (left > 0) * _round(t, p, gpu, left)
    total = overlapped(total, gpu.launch + p.least_bytes / gpu.memory)
    sums = p.groups * p.m * p.n * SUM_BYTES * t.split_k
    total = total + t.in_scratch * (gpu.scratch + 2 * sums / gpu.memory)
    return total + t.in_cluster * (gpu.cluster * t.split_k + sums / gpu.l2)


def _at_a_time(t: WarpTiles, p: Product, gpu: Rates) -> Any:
    """Blocks that a multiprocessor runs at a time, if there are as many: of Hopper's shared memory and threads."""
    shared = t.stages * t.stage_bytes(p) + RESERVED_BYTES
    registers = round_up(t.registers(p.itemsize, p.rank), 8)
    occupancy = np.minimum(SHARED_BYTES // shared, REGISTERS // (registers * t.threads))
    occupancy = np.minimum(occupancy, RESIDENT_THREADS // t.threads)
    return np.clip(np.minimum(occupancy, ceil_div(t.tiles(p) * t.split_k, gpu.multiprocessors)), 1, None)


def _round(t: WarpTiles, p: Product, gpu: Rates, together: Any) -> Any:
    """Microseconds of blocks that run together."""
    together = np.maximum(together, 1)
    products = t.block_m * t.block_n * t.block_k
    warps_m_n = t.warps_m * t.warps_n
    staged = t.stage_bytes(p)
    read = (t.block_m * t.warps_n + t.block_n * t.warps_m) * t.block_k * p.itemsize
    mmas = products * p.itemsize // (MMA_M * MMA_N * MMA_BYTES) / (warps_m_n * t.warps_k)
    step = overlapped(
        together * products * (p.itemsize / 2) / gpu.products,
        together * (read + staged) / gpu.shared,
        together * gpu.multiprocessors * staged / gpu.l2,
        gpu.l2_latency / np.clip(np.minimum(t.stages - 1, t.steps(p)), 1, None),
        gpu.step + gpu.mma * mmas,
    )
    return t.steps(p) * step + gpu.end * t.accumulators * together


def preferred(w: Conv) -> WarpTiles:
    """The default tiles: those of the best estimate, among those that every GPU since sm_80 can run."""
    p = Product.of(w)
    candidates = _candidates(p.itemsize, p.rank)
    shared = candidates.shared_bytes(p, staged_itemsize(w, candidates), of_channels(w, candidates))
    possible = candidates.steps(p) * (candidates.split_k - 1) < candidates.all_steps(p)
    possible &= shared <= PORTABLE_SHARED_BYTES
    best = int(np.argmin(np.where(possible, estimate(candidates, p), np.inf)))
    return WarpTiles(**{name: getattr(candidates, name)[best].item() for name in TILES})


def preferred_estimate(p: Product) -> float:
    """The best estimate of all tiles that promise something."""
    return float(np.min(estimate(_candidates(p.itemsize, p.rank), p)))


@functools.cache
def _candidates(itemsize: int, rank: int) -> WarpTiles:
    """Tiles that promise something for some workload, for elements of a size and axes of space, as columns."""
    ks = [nbytes // itemsize for nbytes in BLOCK_K_BYTES]
    choices = (BLOCK_M, BLOCK_N, ks, WARPS, WARPS, SLICES, STAGES, SPLITS)
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
