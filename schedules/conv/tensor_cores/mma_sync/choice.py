"""The tiles of `mma_sync` from knobs: what choices have to fulfil, what is worth searching, and what they use."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from tvmconv.gpu import MAX_REGISTERS, MAX_THREADS, REGISTERS
from tvmconv.knobs import Columns, Knobs
from tvmconv.knobs.space import Usage
from tvmconv.workloads import Conv, epilogue

from ..product import CHUNK, Product
from .estimate import estimate, preferred, preferred_estimate
from .parts import of_channels, staged_itemsize
from .tiles import (
    BLOCK_K_BYTES,
    BLOCK_M,
    BLOCK_N,
    MAX_ACCUMULATORS,
    MMA_BYTES,
    SLICES,
    SPLITS,
    STAGES,
    TURNS,
    WARPS,
    WarpTiles,
)

SEARCHED = 2.0  # times the best estimate: of the 40 searches that it was fitted to, the best was within 1.5 times
GOOD_BLOCKS = 100  # at least, of blocks that compute several tiles
FEW_BLOCKS = 140  # about as many as large GPUs have multiprocessors: with more, a split reduction gains nothing


def usage(w: Conv, c: Columns) -> Usage:
    """What configs use of a device."""
    p, t = Product.of(w), WarpTiles.of_columns(c)
    steps, tiles = t.steps(p), t.tiles(p)
    products = t.block_m * t.block_n * t.block_k
    blocks = t.blocks(p)
    shared = t.shared_bytes(p, staged_itemsize(w, t), of_channels(w, t))
    return Usage(
        threads=t.threads,
        shared_bytes=0 * shared,
        dynamic_shared_bytes=shared,
        cluster=np.where(t.in_cluster, t.split_k, 1),
        accumulators=t.accumulators,
        blocks=blocks,
        steps=steps,
        registers=t.registers(p.itemsize, p.rank),
        products=products * steps,
        intensity=t.block_m * t.block_n / (t.block_m + t.block_n),
        traffic=tiles * t.split_k * steps * t.stage_bytes(p),
        waste=tiles * t.block_m * t.block_n / (p.groups * p.m * p.n),
        in_flight=(t.stages - 1) * t.stage_bytes(p),
        estimate=estimate(t, p),
        tick=1e-6,
        all_threads=blocks * t.threads,
    )


def ask(w: Conv, k: Knobs) -> WarpTiles:
    """The tiles from knobs; the defaults suit the workload."""
    p, default = Product.of(w), preferred(w)
    ks = tuple(n // p.itemsize for n in BLOCK_K_BYTES)
    tiles = WarpTiles(
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
    _demand(k, p)
    return tiles


def _demand(k: Knobs, p: Product) -> None:
    """State what the choices have to fulfil together, and what is worth searching."""

    def demand(text: str, holds: Callable[[WarpTiles], Any]) -> None:
        k.condition(text, lambda c: holds(WarpTiles.of_columns(c)))

    def search_only(text: str, holds: Callable[[WarpTiles], Any]) -> None:
        k.search_only(text, lambda c: holds(WarpTiles.of_columns(c)))

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
    search_only("steps are not twice the reduction", lambda t: t.block_k < 2 * max(p.k, BLOCK_K_BYTES[0] // p.itemsize))
    search_only("no more stages than steps", lambda t: (t.stages <= t.steps(p) + 1) | (t.stages == STAGES[0]))
    search_only("few enough accumulators", lambda t: t.accumulators <= MAX_ACCUMULATORS)
    search_only(
        "all threads' registers fit",
        lambda t: (
            (t.registers(p.itemsize, p.rank) <= MAX_REGISTERS)
            & (t.registers(p.itemsize, p.rank) * t.threads <= REGISTERS)
        ),
    )
    search_only("a reduction is split where blocks are few", lambda t: (t.split_k == 1) | (t.tiles(p) <= FEW_BLOCKS))
    best = preferred_estimate(p)
    search_only(f"estimated to take at most {SEARCHED} times the best", lambda t: estimate(t, p) <= SEARCHED * best)
    search_only("one of several equal configs", lambda t: (t.split_k > 1) | (t.meet == "scratch"))


def _may_begin_with_residual(w: Conv) -> bool:
    """Whether a tensor like the output is among the operations that add and come first in the epilogue."""
    adding = itertools.takewhile(lambda operation: operation.adds, epilogue.steps(w.epilogue))
    return any(operation.takes == "output" for operation in adding)
