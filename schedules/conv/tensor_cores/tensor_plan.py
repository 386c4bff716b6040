"""What there is to choose in `tensor_core`, what choices go together, what they use of a GPU, and the defaults.

A `Plan` holds one config as numbers, or many as columns, as in `plan`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from tvmconv import gpu
from tvmconv.arithmetic import ceil_div, round_up
from tvmconv.gpu import WARP
from tvmconv.knobs import Columns, Knobs
from tvmconv.knobs.space import Usage
from tvmconv.workloads import Conv

from ..plan import FEW_BLOCKS, SPLITS, SUM_BYTES
from ..tiles import element_bytes
from .intrinsics import DEPTH_BYTES, SIDE

COPIED = 16  # bytes, by one cp.async
SUM_ROW = 8  # words by which a row of sums begins behind a multiple of all banks: pairs of sums meet in none

SIZES = (16, 32, 64, 128, 256)  # of a block's tile
WARPS = (1, 2, 4, 8)
STAGES = (2, 3, 4, 5, 6)
NOW, AHEAD = "now", "ahead"

MAX_ACCUMULATORS = 128
OWN_REGISTERS = 40  # of a thread besides its accumulators, at least
MIN_THREADS = 64

# Default tiles, the largest first: pixels, channels, warps along each. Chosen is the first that makes enough blocks to
# occupy a GPU; where none does, the third, with the reduction split.
TILES = ((128, 128, 2, 4), (128, 64, 2, 2), (64, 64, 2, 2), (64, 32, 2, 2), (32, 32, 2, 2))
SPLIT_TILE = TILES[2]
ENOUGH_BLOCKS = 96
LEAST_SHARED_BYTES = 99 << 10  # that a launch may ask for, of the architectures since sm_80


def channels_last(w: Conv) -> bool:
    """Whether neighbouring outputs are of neighbouring channels, which then are the columns of the product."""
    return w.layout == "nhwc"


def copies_16_bytes(w: Conv) -> bool:
    """Whether 16 bytes of an operand are neighbouring input channels of one tap."""
    return channels_last(w) and w.C // w.groups * element_bytes(w) % COPIED == 0


def summed(w: Conv) -> tuple[int, int]:
    """The extents of the two axes of the reduction: taps and input channels, or 1 and all of them as one axis."""
    taps, channels = math.prod(w.kernel), w.C // w.groups
    return (taps, channels) if copies_16_bytes(w) else (1, taps * channels)


class Plan(NamedTuple):
    """One config, or many as columns.

    Attributes:
        block_m: pixels of a block.
        block_n: output channels of a block.
        block_k: input channels of a step; where taps and channels are one axis, elements of that.
        warps_m: warps along the pixels.
        warps_n: warps along the output channels.
        stages: steps whose operands are in shared memory or on their way there.
        fragments: whether registers are loaded just `now`, or one slice `ahead`.
        split_k: blocks that share the sums of a tile.
    """

    block_m: Any
    block_n: Any
    block_k: Any
    warps_m: Any
    warps_n: Any
    stages: Any
    fragments: Any
    split_k: Any

    @property
    def warps(self) -> Any:
        """Warps of a block."""
        return self.warps_m * self.warps_n

    @property
    def accumulators(self) -> Any:
        """Sums of a thread."""
        return self.block_m * self.block_n // (self.warps * WARP)

    def sides(self, w: Conv) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
        """Rows and columns of a block's tile, each with the warps along them."""
        pixels, channels = (self.block_m, self.warps_m), (self.block_n, self.warps_n)
        return (pixels, channels) if channels_last(w) else (channels, pixels)

    def steps(self, w: Conv) -> Any:
        """Steps of a block."""
        taps, depth = summed(w)
        return taps * ceil_div(depth, self.block_k * self.split_k)

    def dynamic_shared_bytes(self, w: Conv) -> Any:
        """Shared memory of a block: what is staged of both operands, whose place the sums take in the end."""
        element = element_bytes(w)
        row = self.block_k * element + COPIED
        staged = [self.stages * size * row for size in (self.block_m, self.block_n)]
        (rows, _), (columns, _) = self.sides(w)
        sums = SUM_BYTES * rows * (columns + (SUM_ROW - columns) % gpu.BANKS)
        if element < SUM_BYTES:
            return np.maximum(sum(staged), sums)
        # Of the operands' own type, they take the place of one operand alone, which grows if it has to: of the larger
        # one (tirx.transform.StorageRewrite).
        return np.minimum(*staged) + np.maximum(np.maximum(*staged), sums)


def ask(k: Knobs, w: Conv) -> Plan:
    """Ask for the knobs, with defaults that fit the workload."""
    default, depth = default_plan(w), DEPTH_BYTES // element_bytes(w)
    plan = Plan(
        block_m=k.choice("block_m", SIZES, default.block_m),
        block_n=k.choice("block_n", SIZES, default.block_n),
        block_k=k.choice("block_k", tuple(depth * pieces for pieces in (1, 2, 4, 8)), default.block_k),
        warps_m=k.choice("warps_m", WARPS, default.warps_m),
        warps_n=k.choice("warps_n", WARPS, default.warps_n),
        stages=k.choice("stages", STAGES, default.stages),
        fragments=k.choice("fragments", (NOW, AHEAD), default.fragments),
        split_k=k.choice("split_k", SPLITS, default.split_k),
    )
    k.condition(
        "warps have whole tiles of 16 pixels and 16 channels",
        lambda c: (c["block_m"] % (SIDE * c["warps_m"]) == 0) & (c["block_n"] % (SIDE * c["warps_n"]) == 0),
    )
    k.condition(
        "fragments are loaded ahead where a step has two slices, and there are three stages and steps for them",
        lambda c: (c["fragments"] == NOW) | can_load_ahead(w, of_columns(c)),
    )
    _, extent = summed(w)
    k.search_only("a step is not mostly padding", lambda c: c["block_k"] * c["split_k"] < 2 * extent)
    k.search_only(
        "a reduction is split where blocks are few",
        lambda c: (c["split_k"] == 1) | (tile_count(w, of_columns(c)) <= FEW_BLOCKS),
    )
    k.search_only(
        "as many stages as steps at most", lambda c: c["stages"] <= np.maximum(of_columns(c).steps(w), STAGES[0])
    )
    k.search_only("few enough accumulators", lambda c: of_columns(c).accumulators <= MAX_ACCUMULATORS)
    k.search_only(f"at least {MIN_THREADS} threads", lambda c: of_columns(c).warps * WARP >= MIN_THREADS)
    k.search_only(
        "all threads' registers fit",
        lambda c: (of_columns(c).accumulators + OWN_REGISTERS) * of_columns(c).warps * WARP <= gpu.REGISTERS,
    )
    return plan


def of_columns(c: Columns) -> Plan:
    """The plans of many configs."""
    return Plan(**{name: c[name] for name in Plan._fields})


def can_load_ahead(w: Conv, plan: Plan) -> Any:
    """Whether registers can be loaded a slice ahead: TVM's pipeline has no constant to wait for otherwise."""
    slices = plan.block_k * element_bytes(w) // DEPTH_BYTES
    return (slices >= 2) & (plan.stages >= 3) & (plan.steps(w) >= plan.stages - 1)


def tile_count(w: Conv, plan: Plan) -> Any:
    """Tiles of the output, of all groups."""
    pixels, channels = w.N * math.prod(w.out), w.O // w.groups
    return w.groups * ceil_div(pixels, plan.block_m) * ceil_div(channels, plan.block_n)


def usage(w: Conv, c: Columns) -> Usage:
    """What configs use of a device."""
    plan = of_columns(c)
    blocks, steps = plan.split_k * tile_count(w, plan), plan.steps(w)
    staged, products = (plan.block_m + plan.block_n) * plan.block_k, plan.block_m * plan.block_n * plan.block_k
    return Usage(
        threads=plan.warps * WARP,
        shared_bytes=0 * plan.warps,
        accumulators=plan.accumulators,
        blocks=blocks,
        dynamic_shared_bytes=plan.dynamic_shared_bytes(w),
        steps=steps,
        products=products // (plan.warps * WARP),
        intensity=products / staged,
        traffic=blocks * steps * staged,
        all_threads=blocks * plan.warps * WARP,
    )


def default_plan(w: Conv) -> Plan:
    """Tiles that fit the shape, in the shared memory of every architecture."""
    pixels, channels = w.N * math.prod(w.out), w.O // w.groups
    _, extent = summed(w)
    depth = DEPTH_BYTES // element_bytes(w)

    def plan(tile: tuple[int, int, int, int], stages: int = 4, split_k: int = 1) -> Plan:
        block_m, warps_m = narrowed(pixels, tile[0], tile[2])
        block_n, warps_n = narrowed(channels, tile[1], tile[3])
        pieces = (2, 1) if block_m * block_n > SPLIT_TILE[0] * SPLIT_TILE[1] else (4, 2, 1)
        block_k = min((depth * n for n in pieces), key=lambda size: round_up(extent, size))  # with the fewest zeros
        return Plan(block_m, block_n, block_k, warps_m, warps_n, stages, NOW, split_k)

    candidates = [plan(tile) for tile in TILES]
    chosen = next((each for each in candidates if tile_count(w, each) >= ENOUGH_BLOCKS), None)
    if chosen is None:
        chosen = plan(SPLIT_TILE)
        fitting = (n for n in SPLITS if n * tile_count(w, chosen) >= ENOUGH_BLOCKS or 2 * n * chosen.block_k > extent)
        chosen = chosen._replace(split_k=next(fitting, SPLITS[-1]))
    for stages in (4, 3, 2):
        chosen = chosen._replace(stages=stages)
        if stages <= chosen.steps(w) and chosen.dynamic_shared_bytes(w) <= LEAST_SHARED_BYTES:
            break
    return chosen._replace(fragments=AHEAD if can_load_ahead(w, chosen) else NOW)


def narrowed(extent: int, size: int, warps: int) -> tuple[int, int]:
    """A side of a tile, and the warps along it, halved while half of it covers the extent."""
    while size > SIDE and size // 2 >= extent:
        size, warps = size // 2, max(warps // 2, 1) if size // 2 < SIDE * warps else warps
    return size, warps
