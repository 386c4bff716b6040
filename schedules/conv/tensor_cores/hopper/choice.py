"""The tiles of `hopper` from knobs: what is worth searching, and what they use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tvmconv.knobs import Columns, Knobs
from tvmconv.knobs.space import Usage
from tvmconv.workloads import Conv

from ..product import Product
from .estimate import estimate, preferred, preferred_estimate
from .rules import Rule, fitting, legal
from .tiles import CHOICES, MULTIPROCESSORS, STAGES, TILES, HopperTiles
from .workload import WGMMA_M, can_share_taps, reach, tap_choices

SEARCHED = 2.5  # times the best estimate


def usage(w: Conv, c: Columns) -> Usage:
    """What configs use of a device."""
    t, p = HopperTiles.of_columns(c, w), Product.of(w)
    steps, tiles = t.steps(p), t.tiles(p)
    shared = t.shared_bytes(w)
    pixels = np.where(t.taps > 1, t.block_m // WGMMA_M * (WGMMA_M + t.reach), t.block_m)
    fetched = (pixels / t.sharers_n + t.block_n * t.taps / t.sharers_m) * t.row_bytes
    return Usage(
        threads=t.all_threads(w),
        shared_bytes=0 * shared,
        dynamic_shared_bytes=shared,
        cluster=t.cluster,
        accumulators=t.accumulators,
        blocks=t.blocks(w),
        steps=steps,
        registers=t.registers(),
        rounds=tiles * t.split_k / t.at_a_time,
        products=t.block_m * t.block_n * t.block_k(p.itemsize) * t.taps * steps,
        intensity=t.block_m * t.block_n / (t.block_m + t.block_n),
        traffic=tiles * t.split_k * steps * fetched,
        waste=tiles * t.block_m * t.block_n / (p.groups * p.m * p.n),
        in_flight=t.ring_bytes(),
        estimate=estimate(t, w),
        tick=1e-6,
    )


def ask(w: Conv, k: Knobs) -> HopperTiles:
    """The tiles from knobs; the defaults suit the workload."""
    default = preferred(w)
    choices = dict(zip(TILES, CHOICES, strict=True))
    chosen = {name: k.choice(name, choices[name], getattr(default, name)) for name in TILES}
    taps = k.choice("taps", tap_choices(w), default.taps) if can_share_taps(w) else 1
    tiles = HopperTiles(**chosen, taps=taps, reach=reach(w))
    _demand(k, w)
    return tiles


def _demand(k: Knobs, w: Conv) -> None:
    """State what the choices have to fulfil together, and what is worth searching."""

    def of_columns(holds: Callable[[HopperTiles], Any]) -> Callable[[Columns], Any]:
        return lambda c: holds(HopperTiles.of_columns(c, w))

    for text, holds in (*legal(w), *fitting(w)):
        k.condition(text, of_columns(holds))
    for text, holds in promising(w):
        k.search_only(text, of_columns(holds))


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
        (f"estimated to take at most {SEARCHED} times the best", lambda t: estimate(t, w) <= SEARCHED * best),
    ]
