"""Knobs of the NHWC direct schedules, with the defaults of the lowest estimated latency.

Small images have few strips: threads then need fewer channels and pixels until there are enough of them for a large
GPU; large images need the opposite. The estimate weighs the two.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tvmconv.arithmetic import ceil_div, round_up
from tvmconv.space import Knobs, Tile
from tvmconv.target import REGISTERS_PER_MULTIPROCESSOR, SECTOR_BYTES, STATIC_SHARED_BYTES
from tvmconv.workloads import Conv
from tvmconv.workloads.dtypes import INT8, get_itemsize
from tvmconv.workloads.layout import CHANNELS_FIRST

from ..direct_config import select_max_overhang
from ..plane_shape import PlaneShape
from ..tile_config import Rule, add_rules, prune_by_estimate
from ..transposed_view import TransposedView
from .strip_config import LEVELS, MAX_PRODUCTS, WORD_BYTES, StripConfig

LOCAL_CHOICES = (1, 2, 4, 7, 8)  # rows or columns per thread
WIDE_LOCAL_CHOICES = (14, 28)  # columns per thread that are also tried if filters are wide
WIDE_FILTER = 13  # columns of a filter whose windows are much wider than the strip
SPATIAL_THREADS_CHOICES = (1, 2, 3, 4, 7, 8, 14, 16, 28, 32)  # threads per block along rows or columns
MAX_DEFAULT_THREADS = 256  # per block
MAX_ACCUMULATORS = 64
MIN_THREADS = 32
MAX_OVERHANG_RATIO = 1.25  # maximum ratio of the channels that threads cover to the channels that exist
MAX_LIVE_REGISTERS = 176  # estimated registers per thread for accumulators, windows and weights
# Integers of 8 bits are widened in registers of their own, and kernels beyond this spill.
FEW_REGISTERS: list[Rule] = [
    (
        "the registers of all threads fit",
        lambda t: (t.live_registers + OVERHEAD_REGISTERS) * t.num_threads <= REGISTERS_PER_MULTIPROCESSOR,
    )
]
OVERHEAD_REGISTERS = 24  # per thread, for addresses and guards


def declare_knobs(kind: type[StripConfig], k: Knobs, w: Conv | TransposedView) -> StripConfig:
    """Declare the knobs of a kind of strips, with the defaults of the lowest estimate, and return their values."""
    defaults = select_default(kind, w)
    k.choice("vector", kind.list_vector_choices(w), defaults["vector"])
    k.choice("threads_c", kind.list_threads_c_choices(w), defaults["threads_c"])
    shape = PlaneShape.from_workload(w)
    _, *plane = shape.output_size
    for name, extent, step in zip("yx", plane, shape.upsampling[1:], strict=True):
        # A tile of a gradient begins at a multiple of the stride, so its knob counts steps of the stride.
        num_steps, default = ceil_div(extent, step), {"thread": defaults[f"threads_{name}"]}
        default["local"] = defaults[name] // step
        k.tile(f"tile_{name}", num_steps, LEVELS, default, overhang=select_max_overhang(num_steps))
    for name, choices in kind.list_own_choices(w).items():
        k.choice(name, choices, defaults[name], missing=choices[0] if name == "input_scope" else None)

    # Small planes have few outputs.
    min_threads = min(MIN_THREADS, ceil_div(w.O * math.prod(plane), 4 * math.prod(shape.upsampling)))
    required: list[Rule] = [
        (f"at most {MAX_PRODUCTS} unrolled products per thread", lambda t: t.num_products <= MAX_PRODUCTS),
        (
            f"at most {STATIC_SHARED_BYTES} bytes of shared memory for a block's filters and input planes",
            lambda t: t.fits_shared_memory,
        ),
        kind.LIMIT_OF_THREADS_Z,
    ]
    pruned: list[Rule] = [
        (f"at most {MAX_LIVE_REGISTERS} registers per thread", lambda t: t.live_registers <= MAX_LIVE_REGISTERS),
        (f"at least {min_threads} threads", lambda t: t.num_threads >= min_threads),
        *FEW_REGISTERS * (w.storage == INT8.storage),
        (
            "threads overhang the channels by at most a quarter",
            lambda t: t.channels.size * t.channels.block <= MAX_OVERHANG_RATIO * t.channels.extent,
        ),
    ]
    make_config = functools.partial(kind.from_columns, w)
    add_rules(k, make_config, required, pruned)
    add_rules(k, make_config, kind.REQUIREMENTS.items())
    if shape.is_transposed:
        sizes = zip("yx", plane, strict=True)
        rows, columns = (make_default_tile(extent, defaults, name) for name, extent in sizes)
        best = kind.from_tiles(w, defaults, rows, columns).estimated_cycles
        prune_by_estimate(k, make_config, float(best))
    return kind.from_columns(w, k.values)


@functools.lru_cache(maxsize=64)
def select_default(kind: Any, w: Conv | TransposedView) -> dict[str, Any]:
    """Return the knobs with the lowest estimate, among strips of all sizes, of a subclass of `StripConfig`."""
    itemsize, (_, num_rows, num_columns) = get_itemsize(w.storage), PlaneShape.from_workload(w).output_size
    vector_choices = kind.list_vector_choices(w)
    # Loading half a word takes as long as a whole word.
    wide_vectors = [v for v in vector_choices if v * itemsize >= WORD_BYTES] or vector_choices
    if w.layout == CHANNELS_FIRST:
        wide_vectors = vector_choices
    options: dict[str, Sequence[int]] = {"vector": wide_vectors, "threads_c": kind.list_threads_c_choices(w)}
    shape = PlaneShape.from_workload(w)
    for axis, step in zip("yx", shape.upsampling[1:], strict=True):
        is_wide = shape.is_transposed and axis == "x" and w.kernel[-1] >= WIDE_FILTER
        local_choices = (*LOCAL_CHOICES, *WIDE_LOCAL_CHOICES) if is_wide else LOCAL_CHOICES
        options |= {axis: [step * n for n in local_choices], f"threads_{axis}": SPATIAL_THREADS_CHOICES}
    grid = np.meshgrid(*map(np.array, options.values()), indexing="ij")
    candidates = {name: column.ravel() for name, column in zip(options, grid, strict=True)}

    def filter_candidates(mask: np.ndarray) -> None:
        candidates.update({name: column[mask] for name, column in candidates.items()})

    threads = candidates["threads_c"] * candidates["threads_y"] * candidates["threads_x"]
    accumulators = candidates["vector"] * candidates["y"] * candidates["x"]
    filter_candidates((threads <= MAX_DEFAULT_THREADS) & (accumulators <= MAX_ACCUMULATORS))
    num_vectors, threads_c = w.O // candidates["vector"], candidates["threads_c"]
    fills_sectors = threads_c * candidates["vector"] * itemsize >= SECTOR_BYTES
    is_exact = num_vectors % threads_c == 0
    is_acceptable_overhang = fills_sectors & (round_up(num_vectors, threads_c) <= MAX_OVERHANG_RATIO * num_vectors)
    # If channels have a large prime factor, no exact tile may fill sectors: some threads then overhang, or read less.
    masks = [is_exact & (fills_sectors | (num_vectors == threads_c)), is_acceptable_overhang, is_exact]
    if w.layout == CHANNELS_FIRST:  # columns fill sectors
        masks = [is_exact]
    filter_candidates(next(mask for mask in masks if mask.any()))
    for name, extent in (("y", num_rows), ("x", num_columns)):  # no thread lies outside of a small image
        filter_candidates((candidates[f"threads_{name}"] - 1) * candidates[name] < extent)
    tiles = [make_default_tile(extent, candidates, name) for name, extent in (("y", num_rows), ("x", num_columns))]
    best_of_variants: list[tuple[float, int, dict[str, Any]]] = []
    own_choices = kind.list_own_choices(w)
    for variant in itertools.product(*own_choices.values()):
        own_values = dict(zip(own_choices, variant, strict=True))
        configs = kind.from_tiles(w, candidates | own_values, *tiles)
        cycles = np.where(configs.is_default_allowed, configs.estimated_cycles, np.inf)
        best_index = int(np.argmin(cycles))
        best_of_variants.append((float(cycles[best_index]), best_index, own_values))
    _, best_index, own_values = min(best_of_variants, key=lambda variant: variant[0])
    return {**{name: int(column[best_index]) for name, column in candidates.items()}, **own_values}


def make_default_tile(extent: int, values: Mapping[str, Any], axis: str) -> Tile:
    """Return the tile of an axis from the number of threads and the elements of each."""
    threads, size = values[f"threads_{axis}"], values[axis]
    return Tile(extent, {"block": ceil_div(extent, threads * size), "thread": threads, "local": size})
