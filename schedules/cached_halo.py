"""Filters with the halo left to the caches: what the `caching` schedules of signals and images have in common.

Each block copies its own tile to shared memory, and no more than that: as many elements as it has threads, in a single
step. A tap that falls into the tile reads shared memory, and one beside it global memory: the neighbouring block copies
the same element, so that it is likely to be in the L2 cache.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import te, tirx
from tvm.s_tir import Schedule

from tvmconv.workloads.filters import Filter
from tvmconv.workloads.filters_te import correlation

from .filters import accumulate, compute_tiles
from .vocabulary import place

Index = Sequence[tirx.Expr]


def read_tile_and_global(w: Filter, threads: Sequence[int]) -> Schedule:
    """Let each thread compute an output from its block's tile in shared memory and, around it, from global memory.

    Args:
        w: the workload.
        threads: threads of a block, for each axis that the mask slides along; a tile has as many places.
    """
    s = Schedule(te.create_prim_func(list(_declare(w, threads))))
    sums = accumulate(s, w)
    copy = s.get_sblock("tiles")
    s.set_scope(copy, 0, "shared")
    compute_tiles(s, sums, threads, threads, copy)
    place(s, K="constant")
    return s


def _declare(w: Filter, tile: Sequence[int]) -> tuple[te.Tensor, te.Tensor, te.Tensor]:
    """`Filter.declare` with a stage `tiles` in the place of `padded`: X as tiles of places, (blocks, places, channels).

    The last tile of an axis is filled up with zeros.
    """
    X = te.placeholder(w.signal_shape, w.dtype, name="X")
    K = te.placeholder(w.mask_shape, w.dtype, name="K")
    axes = len(tile)
    radius = w.radius[-axes:]
    blocks = [-(-n // size) for n, size in zip(w.signal_shape, tile, strict=False)]

    def signal(places: Index, channel: Index) -> tirx.Expr:
        at = (*places, *channel)
        return te.if_then_else(_inside(places, w.signal_shape[:axes]), X[at], tirx.const(0.0, w.dtype))

    def element(*at: tirx.Var) -> tirx.Expr:
        block, place, channel = at[:axes], at[axes : 2 * axes], at[2 * axes :]
        return signal([b * size + i for b, size, i in zip(block, tile, place, strict=True)], channel)

    tiles = te.compute((*blocks, *tile, *w.signal_shape[axes:]), element, name="tiles")

    def read(at: Index, tap: Index) -> tirx.Expr:
        away = [j - r for j, r in zip(tap, radius, strict=True)]
        block = [i // size for i, size in zip(at, tile, strict=False)]
        place = [i % size + d for i, size, d in zip(at, tile, away, strict=False)]
        own = (*block, *place, *at[axes:])
        beside = signal([i + d for i, d in zip(at, away, strict=False)], at[axes:])
        return te.if_then_else(_inside(place, tile), tiles[own], beside)

    return X, K, correlation(w, K, read)


def _inside(places: Index, extents: Sequence[int]) -> tirx.Expr:
    return te.all(*(te.all(i >= 0, i < extent) for i, extent in zip(places, extents, strict=True)))
