"""How long tiles of `hopper` take, about, and those that take the least: the defaults."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from tvmconv.arithmetic import ceil_div
from tvmconv.workloads import Conv

from ..overlap import overlapped
from ..product import Product
from .rules import fitting, legal
from .tiles import CHOICES, TILES, HopperTiles
from .workload import WGMMA_BYTES, WGMMA_M, reach, tap_choices


class Rates(NamedTuple):
    """What `estimate` takes a GPU to be able to do; times in microseconds, traffic in bytes a microsecond.

    The numbers were fitted to 8,792 timings in float16 and bfloat16 on H200s: 363 layers of ResNet-50, d2l-tvm's,
    YOLOv8s, EfficientNet-B0, ConvNeXt-T, Stable Diffusion 1.5, fifteen networks of torchvision's and others, at batch 1
    to 32. Half of all estimates are within 8 % of what was measured. Of what was measured of a layer, the config with
    the best estimate takes 1.05 times the fastest one's time (geometric mean; more than 1.15 times for 24 of the 278
    layers of which twelve configs or more were measured).
    """

    products: float = 5.24e6  # 16-bit multiply-adds of a multiprocessor
    shared: float = 2.53e5  # shared memory of a multiprocessor
    rows: float = 1.21e3  # pixels and channels that are copied, of a multiprocessor
    memory: float = 3.73e6  # global memory, for what has to be moved
    step: float = 0.129  # of a step whatever is in it
    turn: float = 3.03  # steps after which a stage can be multiplied again
    sharing: float = 0.788  # more until then, where blocks of a cluster wait for each other
    end: float = 0.00751  # of a tile, for each accumulator of a thread
    meet: float = 1.04e-4  # of a tile whose sums meet, for each of them
    begin: float = 0.158  # of a tile, where a block has several
    cluster: float = 0.654  # of a cluster that shares sums
    launch: float = 1.49


H200 = Rates()


def estimate(t: HopperTiles, w: Conv, gpu: Rates | None = None) -> Any:
    """Microseconds that a launch takes, about: to begin with, and to leave out what cannot be good.

    Blocks run in rounds. Each step of a block takes what limits it most: the tensor cores, shared memory, the copy
    engine, which takes row by row, or what every step takes. A stage is at hand again when it has been multiplied
    and filled, `turn` steps later: with fewer stages the block waits.
    """
    gpu, p = gpu or H200, Product.of(w)
    together = t.together(w)
    blocks = t.tiles(p) * t.split_k
    rounds = ceil_div(blocks, np.minimum(blocks, t.at_a_time * together))
    products = t.block_m * t.block_n * t.block_k(p.itemsize)
    rows = t.pixel_rows * (t.block_m / WGMMA_M) / t.sharers_n + t.block_n * t.taps / t.sharers_m
    wgmmas = t.row_bytes // WGMMA_BYTES * t.rows * t.warpgroups * t.taps
    shared = wgmmas * (WGMMA_M + t.block_n) * WGMMA_BYTES + t.stage_bytes()
    step = overlapped(
        together * products * t.taps * (p.itemsize / 2) / gpu.products,
        together * shared / gpu.shared,
        together * rows / gpu.rows,
        gpu.step,
    )
    turn = (gpu.turn * step + (t.sharers > 1) * gpu.sharing) / np.minimum(t.stages, t.steps(p))
    end = gpu.end * t.accumulators + t.meets(w) * gpu.meet * t.block_m * t.block_n
    total = gpu.launch + rounds * (t.steps(p) * overlapped(step, turn) + together * end)
    total = total + (rounds > 1) * rounds * gpu.begin + (t.split_k > 1) * gpu.cluster
    return overlapped(total, gpu.launch + p.least_bytes / gpu.memory)


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
    return tiles, estimate(tiles, w)
