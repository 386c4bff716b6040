"""Knobs of direct gradients of weights: their choices, rules, default and starting configs, and the resource usage."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tvmconv.arithmetic import ceil_div
from tvmconv.space import Columns, Knobs
from tvmconv.space.factors import list_divisors
from tvmconv.space.search_space import ResourceUsage
from tvmconv.target import (
    MAX_THREADS_Z,
    SECTOR_BYTES,
)
from tvmconv.workloads.conv_gradient import WeightGradient
from tvmconv.workloads.dtypes import get_itemsize
from tvmconv.workloads.layout import CHANNELS_FIRST

from ..plane_shape import PlaneShape
from ..tile_config import Rule, add_rules, declare_choices, prune_by_estimate
from .strip_config import MAX_LOAD_BYTES, MAX_PRODUCTS, VECTOR_CHOICES, WORD_BYTES
from .strip_knobs import MAX_DEFAULT_THREADS, MAX_LIVE_REGISTERS, MAX_OVERHANG_RATIO, MIN_THREADS
from .wgrad_config import ClusterWgradConfig, WgradConfig

THREADS_C_CHOICES = (1, 2, 4, 8, 16, 32)
THREADS_PIXELS_CHOICES = (1, 2, 4, 7, 8, 14, 16, 32)
ROW_THREADS_CHOICES = (4, 8, 16, 32, 64)  # if channels are first
DEFAULT_THREADS_PIXELS_CHOICES = (1, 4, 8, 16, 32)
PIXELS_Y_CHOICES = (1, 2, 4)
PIXELS_X_CHOICES = (1, 2, 4, 7, 8, 14, 28)
NUM_STARTING_CONFIGS = 3  # with which a search starts after the default, without and with loads of the next tile
MAX_TAPS = 32  # columns of the filter per thread
MAX_DEFAULT_PRODUCTS = 1024
MAX_DEFAULT_REGISTERS = 172  # estimated registers per thread
MAX_CTA_THREADS = 512
MAX_OVERHANG = 1.5  # of the pixels of a default


def select_type(in_cluster: bool) -> type[WgradConfig]:
    """Return the type of configs; `in_cluster`: whether the parts are the CTAs of a cluster, as in all that follows."""
    return ClusterWgradConfig if in_cluster else WgradConfig


@functools.lru_cache(maxsize=64)
def list_options(w: WeightGradient, in_cluster: bool = False) -> dict[str, Sequence[int]]:
    """Return the options of all knobs."""
    shape, itemsize = PlaneShape.from_workload(w.forward), get_itemsize(w.storage)
    outputs, inputs = w.O // w.groups, w.C // w.groups

    def list_vectors(channels: int) -> tuple[int, ...]:
        if w.layout == CHANNELS_FIRST:
            return (1,)
        return tuple(v for v in VECTOR_CHOICES if v * itemsize <= MAX_LOAD_BYTES and channels % v == 0)

    vectors = list_vectors(outputs)
    if inputs == 1:  # a vector has the channels of whole input channels, or of a part of one
        vectors = tuple(v for v in list_vectors(w.O) if v % outputs == 0 or outputs % v == 0)
    _, rows, columns = shape.kernel_size
    taps_y = sorted({1, rows, *(n for n in list_divisors(rows) if n <= 8), *([2] if rows > 2 else [])})
    taps_x = sorted({min(columns, MAX_TAPS), *(n for n in (8, 4) if n < columns), *([1] if columns < 4 else [])})
    filter_rows = shape.kernel_size[0] * rows
    threads_taps = sorted({1, *(n for n in list_divisors(filter_rows) if n <= 32)})
    threads_c = {*THREADS_C_CHOICES, *(n for n in list_divisors(w.O) if n <= THREADS_C_CHOICES[-1])}
    _, *plane = shape.output_size
    pixels = [
        tuple(n for n in choices if n < 2 * size)
        for choices, size in zip((PIXELS_Y_CHOICES, PIXELS_X_CHOICES), plane, strict=True)
    ]
    return {
        "vector": vectors,
        "vector_in": list_vectors(inputs),
        "threads_c": (1,) if w.layout == CHANNELS_FIRST else sorted(threads_c),
        "threads_taps": threads_taps,
        "threads_pixels": ROW_THREADS_CHOICES if w.layout == CHANNELS_FIRST else THREADS_PIXELS_CHOICES,
        "taps_y": taps_y,
        "taps_x": taps_x,
        "pixels_y": pixels[0],
        "pixels_x": pixels[1],
        "prefetch_tile": (0, 1),
        "parts": select_type(in_cluster).PARTS_CHOICES,
    }


def list_required(w: WeightGradient) -> list[Rule]:
    """Return the conditions on every config."""
    return [
        (f"at most {MAX_PRODUCTS} unrolled products per thread", lambda t: t.num_products <= MAX_PRODUCTS),
        (f"at most {MAX_CTA_THREADS} threads per CTA", lambda t: t.num_threads <= MAX_CTA_THREADS),
        (f"at most {MAX_THREADS_Z} threads along the pixels", lambda t: t.threads_pixels <= MAX_THREADS_Z),
    ]


def list_pruned(w: WeightGradient) -> list[Rule]:
    """Return the conditions on configs that are worth a search."""
    num_outputs = math.prod(PlaneShape.from_workload(w.forward).output_size) * w.N * w.O
    min_threads = min(MIN_THREADS, ceil_div(num_outputs, 256))

    def fits_channels(t: WgradConfig) -> Any:
        return t.unit_blocks * t.threads_c <= MAX_OVERHANG_RATIO * t.num_units

    return [
        (f"at most {MAX_LIVE_REGISTERS} registers per thread", lambda t: t.live_registers <= MAX_LIVE_REGISTERS),
        (f"at least {min_threads} threads", lambda t: t.num_threads >= min_threads),
        ("threads overhang the channels by at most a quarter", fits_channels),
        ("threads along the filter have a tile each", lambda t: t.threads_taps <= t.num_filter_tiles),
        (
            "there are at most as many parts as tiles of pixels",
            lambda t: t.threads_pixels * t.parts <= t.num_pixel_tiles,
        ),
        ("a thread that loads the next tile has several", lambda t: (t.prefetch_tile == 0) | (t.iterations > 1)),
    ]


def select_default(w: WeightGradient, in_cluster: bool = False) -> WgradConfig:
    """Return the config with the lowest estimate."""
    best_configs = [configs[0] for ahead in (0, 1) if (configs := list_best_configs(w, ahead, in_cluster))]
    return min(best_configs, key=lambda config: float(config.estimated_cycles))


def list_starting_configs(w: WeightGradient, in_cluster: bool = False) -> list[dict[str, Any]]:
    """Return the configs with which a search starts after the default.

    Estimates of kernels that memory bounds are alike, so each config has another width of the channels of a CTA. Half
    of them load the next tile ahead.
    """
    names = [name for name in list_options(w, in_cluster) if name != "vector_in" or w.groups != w.C]
    default = select_default(w, in_cluster)
    without, ahead = (
        [config for config in list_best_configs(w, prefetch_tile, in_cluster) if config != default]
        for prefetch_tile in (0, 1)
    )
    pairs = itertools.zip_longest(ahead[:NUM_STARTING_CONFIGS], without[:NUM_STARTING_CONFIGS])
    configs = [config for pair in pairs for config in pair if config is not None]
    return [{name: getattr(config, name) for name in names} for config in configs]


@functools.lru_cache(maxsize=64)
def list_best_configs(w: WeightGradient, prefetch_tile: int, in_cluster: bool = False) -> list[WgradConfig]:
    """Return the configs with the lowest estimates, one for each width of the channels of a CTA, the best first."""
    options = dict(list_options(w, in_cluster))
    itemsize, wanted = get_itemsize(w.storage), options["vector"]
    # Loading half a word takes as long as a whole word.
    options["vector"] = [v for v in wanted if v * itemsize >= WORD_BYTES] or wanted
    if w.layout != CHANNELS_FIRST:
        options["threads_pixels"] = DEFAULT_THREADS_PIXELS_CHOICES
    config_type = select_type(in_cluster)
    parts_choices = config_type.DEFAULT_PARTS_CHOICES
    options["parts"], options["prefetch_tile"] = parts_choices[:1], (prefetch_tile,)
    _, rows, columns = PlaneShape.from_workload(w.forward).output_size
    rules = [predicate for _, predicate in (*list_required(w), *list_pruned(w))]
    preferences: list[Callable[[WgradConfig], Any]] = [
        lambda t: t.num_threads <= MAX_DEFAULT_THREADS,
        lambda t: t.num_products <= MAX_DEFAULT_PRODUCTS,
        lambda t: t.live_registers <= MAX_DEFAULT_REGISTERS,
        # CTAs that share sectors take up to half as long again.
        lambda t: (t.threads_c * t.vector * itemsize % SECTOR_BYTES == 0) | (t.threads_c == t.num_units),
        lambda t: math.prod(t.pixel_tiles) * t.pixels_y * t.pixels_x <= MAX_OVERHANG * rows * columns,
    ]
    candidates = config_type.from_options(options, w=w)
    if prefetch_tile:  # no preference replaces a rule
        is_legal = functools.reduce(np.logical_and, (predicate(candidates) for predicate in rules))
        if not np.any(is_legal):
            return []
    for predicate in (*rules, *preferences):
        is_kept = predicate(candidates)
        candidates = candidates.filter(is_kept) if np.any(is_kept) else candidates
    cycles = np.stack([_estimate_legal(candidates, rules, parts) for parts in parts_choices])
    best_parts = np.argmin(cycles, axis=0)
    best_cycles = np.min(cycles, axis=0)
    order = np.lexsort((best_parts, best_cycles))
    _, first_of_width = np.unique((candidates.threads_c * candidates.vector)[order], return_index=True)
    best = order[np.sort(first_of_width)[: 1 + NUM_STARTING_CONFIGS]].tolist()
    return [
        dataclasses.replace(candidates.row(index), parts=parts_choices[best_parts[index]])
        for index in best
        if np.isfinite(best_cycles[index]) or index == best[0]
    ]


def _estimate_legal(candidates: WgradConfig, rules: Sequence[Callable[[WgradConfig], Any]], parts: int) -> np.ndarray:
    """Return the estimates of configs with a number of parts, infinite for those that violate a rule."""
    configs = dataclasses.replace(candidates, parts=np.full_like(candidates.parts, parts))
    is_legal = functools.reduce(np.logical_and, (predicate(configs) for predicate in rules))
    return np.where(is_legal, configs.estimated_cycles, np.inf)


def compute_usage(w: WeightGradient, columns: Columns, in_cluster: bool = False) -> ResourceUsage:
    """Return the resources that configs use; instructions are estimated numbers per product."""
    config = make_config(w, columns, in_cluster)
    return ResourceUsage(
        threads=config.num_threads,
        shared_bytes=config.shared_bytes,
        dynamic_shared_bytes=config.dynamic_shared_bytes,
        accumulators=config.num_sums,
        blocks=config.num_blocks,
        all_threads=config.num_blocks * config.num_threads,
        live_registers=config.live_registers,
        issued_instructions=config.issued_instructions / config.num_products,
        estimate=config.estimated_cycles,
    )


def make_config(w: WeightGradient, values: Mapping[str, Any], in_cluster: bool = False) -> WgradConfig:
    """Return the config of the knobs' values, or the configs of many; depthwise filters have one input channel."""
    return select_type(in_cluster)(w=w, **{"vector_in": 1, **values})


def declare_knobs(w: WeightGradient, k: Knobs, in_cluster: bool = False) -> WgradConfig:
    """Declare the knobs, with the defaults of the lowest estimate, and return their values."""
    options = list_options(w, in_cluster)
    if w.groups == w.C:
        options = {name: choices for name, choices in options.items() if name != "vector_in"}
    default, make = select_default(w, in_cluster), functools.partial(make_config, w, in_cluster=in_cluster)
    declare_choices(k, options, default)
    add_rules(k, make, list_required(w), list_pruned(w))
    prune_by_estimate(k, make, float(default.estimated_cycles))
    return make(k.values)
