"""Which strips schedules of images with channels last take by default: those of the least estimated time.

Small images have few strips: threads then have to take fewer channels and pixels, until there are enough of them for a
large GPU; large images want the opposite. What is gained and lost is weighed by an estimate in clock cycles, which
knows instructions, loads and bytes, and nothing of how they overlap. A search finds better, from there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tvmconv.arithmetic import ceil_div, round_up
from tvmconv.gpu import MAX_THREADS_Z, STATIC_SHARED_BYTES, WARP
from tvmconv.knobs import Columns, Knobs, Tile
from tvmconv.knobs.space import Usage
from tvmconv.workloads import Conv

from ..plan import searched_overhang
from ..planes import Planes
from ..tiles import element_bytes
from .strip import LEVELS, Strip, reach, threads_across

# Of an H200.
MULTIPROCESSORS = 132
SCHEDULERS = 4  # of a multiprocessor
BYTES_A_CYCLE = 24  # between a multiprocessor and the L2 cache
LINES_A_CYCLE = 2  # that the L1 cache finds for a warp, about
OVERHEAD = 60  # instructions of a thread before its first load, and behind its last
LINE, SECTOR, WORD = 128, 32, 4  # bytes

LOCAL = (1, 2, 4, 7, 8)  # rows or columns of a strip to choose from
ALONG = (1, 2, 3, 4, 7, 8, 14, 16, 28, 32)  # threads of a block along rows or columns
MOST_THREADS = 256  # of a block
MAX_SUMS = 64
MAX_PRODUCTS = 2048  # of a thread, unrolled: NVRTC takes two seconds for them
MAX_HELD = 176  # registers of a thread for sums, windows and weights, by estimate
MIN_THREADS = 32
MAX_OVERHANG = 1.25  # times the channels that the threads along them are for


class Candidates(NamedTuple):
    """Ways to compute these strips, as columns.

    Attributes:
        knobs: what they set besides the strips, all alike.
        fits: which of them keep to their limits.
        time: the estimate of each.
    """

    knobs: dict[str, Any]
    fits: np.ndarray
    time: np.ndarray


def halo(w: Conv, strip: Strip) -> Any:
    """Inputs that a block reads for each that it would if its windows did not overlap those of others."""
    shares = (
        ((tile.size - 1) * stride + taps) / (tile.size * stride)
        for tile, stride, taps in zip((strip.rows, strip.columns), Planes.of(w).steps[1:], reach(w)[1:], strict=True)
    )
    return math.prod(shares)


def usage_of(w: Conv, plan: Any) -> Usage:
    """What plans use of a device, one or columns of many; `issued` is an estimate of a thread's for each output."""
    strip = plan.strip
    blocks = strip.blocks(w)
    return Usage(
        threads=strip.threads,
        shared_bytes=np.where(plan.weight == "shared", plan.shared_bytes(w), 0),
        accumulators=strip.sums,
        blocks=blocks,
        all_threads=blocks * strip.threads,
        held=plan.held(w),
        issued=plan.issued(w) / strip.sums,
        halo=halo(w, strip),
        estimate=plan.time(w),
    )


def cycles(w: Conv, strip: Strip, *, issued: Any, loads: Any, shared: Any, scattered: Any, filters: Any) -> Any:
    """The estimate: clock cycles of the multiprocessor that has the most blocks.

    It issues instructions, each warp's in no less than its own time; it reads through the L1 cache and shared memory;
    and it gets and puts the tiles of its blocks. The longest of these counts, and the others a bit.

    Args:
        w: the workload.
        strip: the strips.
        issued: instructions of a thread.
        loads: vectors of the input that a thread reads.
        shared: vectors that it reads in shared memory.
        scattered: vectors that it reads elsewhere than its neighbours along the channels.
        filters: bytes of the filters that a block reads.
    """
    size, steps, planes = element_bytes(w), Planes.of(w).steps, Planes.of(w).taps[0]
    blocks = ceil_div(strip.blocks(w), MULTIPROCESSORS)
    warps = ceil_div(strip.threads, WARP) * blocks
    issuing = (issued + OVERHEAD) * (np.maximum(1, warps / SCHEDULERS) + 0.5)
    lanes = np.minimum(WARP, strip.channels.thread)
    wavefronts = np.maximum(1, strip.vector * size * WARP / LINE)
    lines = np.maximum(wavefronts, WARP / lanes / LINES_A_CYCLE)
    reading = warps * (loads * lines + shared * wavefronts + scattered * np.maximum(wavefronts, lanes / LINES_A_CYCLE))
    run = np.maximum(strip.channels.thread * strip.vector * size, SECTOR)  # bytes side by side
    images = strip.rows.size * strip.columns.size * (1 + halo(w, strip) * planes * math.prod(steps[1:]) * w.C / w.O)
    moving = blocks * (images * run + filters) / BYTES_A_CYCLE
    terms = np.stack(np.broadcast_arrays(issuing, reading, moving))
    return 0.75 * terms.max(axis=0) + 0.25 * terms.sum(axis=0)


def least(w: Conv, widths: Sequence[int], ways: Callable[[Strip], Iterable[Candidates]]) -> dict[str, Any]:
    """The knobs of the least estimate, among strips of all sizes in blocks of all shapes that promise something.

    Args:
        w: the workload.
        widths: the numbers of channels that a thread may have.
        ways: from strips, as columns, to the ways to compute them, one at least that fits the smallest strip.
    """
    size, (_, rows, columns) = element_bytes(w), Planes.of(w).out
    wide = [v for v in widths if v * size >= WORD] or widths  # half a word takes as long as a whole one
    pixels = {"y": LOCAL, "threads_y": ALONG, "x": LOCAL, "threads_x": ALONG}
    options = {"vector": wide, "threads_c": threads_across(w), **pixels}
    grid = np.meshgrid(*map(np.array, options.values()), indexing="ij")
    c = {name: column.ravel() for name, column in zip(options, grid, strict=True)}

    def keep(mask: np.ndarray) -> None:
        c.update({name: column[mask] for name, column in c.items()})

    threads = c["threads_c"] * c["threads_y"] * c["threads_x"]
    keep((threads <= MOST_THREADS) & (c["vector"] * c["y"] * c["x"] <= MAX_SUMS))
    across = w.O // c["vector"]
    sectors = c["threads_c"] * c["vector"] * size >= SECTOR
    whole = across % c["threads_c"] == 0
    overhanging = sectors & (round_up(across, c["threads_c"]) <= MAX_OVERHANG * across)
    # of channels with a large prime factor no whole part need be a sector: some threads have none, or read too little
    keep(next(each for each in (whole & (sectors | (across == c["threads_c"])), overhanging, whole) if each.any()))
    for name, extent in (("y", rows), ("x", columns)):  # a block has no thread that lies outside of a small image
        keep((c[f"threads_{name}"] - 1) * c[name] < extent)
    tiles = [_tile(extent, c[f"threads_{name}"], c[name]) for name, extent in (("y", rows), ("x", columns))]
    found: list[tuple[float, int, dict[str, Any]]] = []
    for way in ways(Strip.of(w, c["vector"], c["threads_c"], *tiles)):
        time = np.where(way.fits, way.time, np.inf)
        place = int(np.argmin(time))
        found.append((float(time[place]), place, way.knobs))
    _, place, knobs = min(found, key=lambda one: one[0])
    return {**{name: int(column[place]) for name, column in c.items()}, **knobs}


def _tile(extent: int, threads: Any, size: Any) -> Tile:
    """A tile of rows or columns."""
    return Tile(extent, {"block": ceil_div(extent, threads * size), "thread": threads, "local": size})


def ask_strip(k: Knobs, w: Conv, widths: Sequence[int], best: dict[str, Any]) -> Strip:
    """Ask for the strips; `best` are the defaults, as `least` finds them."""
    vector = k.choice("vector", widths, best["vector"])
    threads = k.choice("threads_c", threads_across(w), best["threads_c"])
    _, rows, columns = Planes.of(w).out
    tiles = [
        k.tile(
            f"tile_{name}",
            extent,
            LEVELS,
            {"thread": best[f"threads_{name}"], "local": best[name]},
            overhang=searched_overhang(extent),
        )
        for name, extent in (("y", rows), ("x", columns))
    ]
    return Strip.of(w, vector, threads, *tiles)


def demand(k: Knobs, w: Conv, plan: Callable[[Columns], Any]) -> None:
    """What all plans have to fulfil, and what a search leaves out; `plan` makes those of many configs."""
    k.condition(
        f"at most {MAX_PRODUCTS} products of a thread are unrolled", lambda c: plan(c).products(w) <= MAX_PRODUCTS
    )
    k.condition(
        f"the filters of a block have at most {STATIC_SHARED_BYTES} bytes in shared memory",
        lambda c: (c["weight"] != "shared") | (plan(c).shared_bytes(w) <= STATIC_SHARED_BYTES),
    )
    k.condition(f"at most {MAX_THREADS_Z} threads along the rows", lambda c: c["tile_y"][:, 1] <= MAX_THREADS_Z)
    k.search_only(f"a thread holds at most {MAX_HELD} registers", lambda c: plan(c).held(w) <= MAX_HELD)
    outputs = w.O * math.prod(Planes.of(w).out[1:])
    fewest = min(MIN_THREADS, ceil_div(outputs, 4))  # a plane may have few
    k.search_only(f"at least {fewest} threads", lambda c: plan(c).strip.threads >= fewest)
    k.search_only(
        "threads along the channels overhang them by a quarter at most",
        lambda c: plan(c).strip.channels.block * c["threads_c"] <= MAX_OVERHANG * plan(c).strip.channels.extent,
    )
