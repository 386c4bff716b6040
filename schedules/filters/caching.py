"""Only the tile itself in shared memory: the halo is read where it is needed, through the L2 cache.

From `halo_threads`: the block is as large as the tile of the output and copies that tile alone, in a single step, an
element a thread without a guard; of an image, a channel at a time. The halo is some other block's tile, so that its
elements are likely to have been read into the L2 cache; they are read from there as often as taps meet them. The code
to copy is the simplest, but each tap asks where its element lies, and warps at the tile's edge take both ways.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import te, tirx
from tvm.s_tir import Schedule

from tvmconv.arithmetic import ceil_div
from tvmconv.knobs import Knobs
from tvmconv.library import schedule
from tvmconv.workloads.filters import Filter
from tvmconv.workloads.filters_te import correlation

from ..vocabulary import place
from .tiles import accumulate, ask_block, compute_tiles, mask_is_constant

Index = Sequence[tirx.Expr]


@schedule("filter1d", "filter2d", condition=mask_is_constant)
def caching(s: Schedule, w: Filter, k: Knobs) -> Schedule:
    """A block computes as many samples or pixels as it has threads."""
    threads = ask_block(k, w)
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
    blocks = [ceil_div(n, size) for n, size in zip(w.signal_shape, tile, strict=False)]

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
