"""The knob of `hopper` that chooses how a channels-first X is loaded where TMA cannot copy boxes of 64 pixels.

| value | meaning |
| --- | --- |
| "converted" | a launch of its own transposes X to channels last |
| "tma" | TMA copies boxes of 16 to 64 pixels to an MN-major tile, for filters of one tap |
| "halo" | threads load halo rows, which all taps of a filter share, and transpose them in registers |
| "halo_smem" | pixels are copied to shared memory as they lie, where warps transpose them to halo rows |
| "cp_async" | threads copy vectors of pixels to an MN-major tile, for filters of one tap |
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tvmconv.space import Columns, Knobs
from tvmconv.space.search_space import ResourceUsage
from tvmconv.workloads import Conv
from tvmconv.workloads.dtypes import get_itemsize
from tvmconv.workloads.layout import CHANNELS_FIRST

from ...layout_conversion import estimate_input_conversion_us
from ...tile_config import Rule, add_rules
from ..gemm.halo_boxes import can_transpose
from ..gemm.plane_gather import count_vector_pixels
from .candidates import list_best
from .constraints import isa_constraints, resource_constraints
from .halo_latency import list_best_halo_tiles
from .halo_tile import HaloTile, can_use_halo, halo_constraints
from .input_loader_latency import estimate_by_input_loader_us
from .knobs import can_compute_several_tiles
from .latency import estimate_latency_us, select_default_config, select_kernel_schedule
from .tile_config import (
    CONVERTED,
    COOPERATIVE,
    CP_ASYNC,
    HALO,
    HALO_LOADERS,
    HALO_SMEM,
    KNOB_OPTIONS,
    PINGPONG,
    PRODUCER_WARPGROUPS_CHOICES,
    TMA,
    HopperTileConfig,
)
from .tma_requirements import WGMMA_M, choose_box_pixels, find_tma_residual, is_pixel_matrix, pad_planes

INPUT_LOADER, PRODUCER_WARPGROUPS = "input_loader", "producer_warpgroups"
MN_MAJOR_LOADERS = CP_ASYNC, TMA
NUM_STARTING_TILES = 3  # configs of each loader, and of each kernel schedule, that a search tries first
STARTING_KERNEL_SCHEDULES = (COOPERATIVE, PINGPONG)
NARROW_TILE_ACCUMULATORS = 64  # per thread


def list_input_loaders(w: Conv, viewed_workload: Conv) -> tuple[str, ...]:
    """Return the values of the knob, the one of configs without the knob first; none if there is no choice.

    Args:
        w: The workload.
        viewed_workload: The same arrays as TMA views them, channels last.
    """
    has_same_axes = w.input_layout == CHANNELS_FIRST and viewed_workload == w.to_channels_last()
    box_pixels, is_uniform = choose_box_pixels(viewed_workload), w.output_layout == CHANNELS_FIRST
    if not has_same_axes or box_pixels == WGMMA_M:
        return ()
    loaders = [TMA if box_pixels else CONVERTED]
    if is_uniform and not box_pixels and can_use_halo(viewed_workload):
        loaders += [HALO, HALO_SMEM] if can_transpose(viewed_workload) else [HALO]
    if can_gather(viewed_workload) and (is_uniform or not find_tma_residual(viewed_workload)):
        loaders.append(CP_ASYNC)
    if TMA not in loaders and is_uniform and pad_planes(viewed_workload):
        loaders.append(TMA)
    return tuple(loaders) if len(loaders) > 1 else ()


def can_gather(w: Conv) -> bool:
    """Return whether cp.async can copy pixels to an MN-major tile: one tap, 16 bits and an even number of pixels."""
    itemsize, pixels = get_itemsize(w.storage), math.prod(w.input_size)
    return is_pixel_matrix(w) and itemsize == 2 and count_vector_pixels(pixels, itemsize) > 0


def gather_constraints(w: Conv) -> list[Rule]:
    """Return the constraints on configs whose pixels are copied by cp.async; other configs meet them.

    Those on resources are repeated, because the knob that adds threads is declared after the others.
    """
    own_rules: list[Rule] = [
        ("CTAs of a cluster share only filters", lambda t: t.cluster_n == 1),
        ("CTAs compute whole tiles", lambda t: np.logical_not(t.divides_last_wave)),
    ]

    def limit_to_gather(predicate: Callable[[HopperTileConfig], Any]) -> Callable[[HopperTileConfig], Any]:
        return lambda t: np.not_equal(t.input_loader, CP_ASYNC) | predicate(t)

    return [
        (f"{description}, with threads that copy pixels", limit_to_gather(predicate))
        for description, predicate in (*own_rules, *resource_constraints(w))
    ]


def select_input_loader_default(viewed_workload: Conv, loaders: Sequence[str]) -> HopperTileConfig | None:
    """Return the config with another than the first loader that has the best estimate; None if the first is faster."""
    configs = [
        config
        for loader in HALO_LOADERS
        if loader in loaders
        for config in list_best_halo_tiles(viewed_workload, 1, loader=loader)
    ]
    kernel_schedule = COOPERATIVE
    if can_compute_several_tiles(viewed_workload):
        kernel_schedule = select_kernel_schedule(viewed_workload)
    for loader in MN_MAJOR_LOADERS:
        if loader in loaders[1:]:
            configs += list_mn_major_tiles(viewed_workload, loader, 1, kernel_schedule)

    def estimate(config: HopperTileConfig) -> float:
        return float(estimate_by_input_loader_us(config, viewed_workload))

    best = min(configs, key=estimate, default=None)
    default = replace(select_default_config(viewed_workload), input_loader=loaders[0])
    return best if best and estimate(best) < estimate(default) else None


def list_mn_major_tiles(w: Conv, loader: str, max_tiles: int, kernel_schedule: str) -> list[HopperTileConfig]:
    """Return the configs of a loader of MN-major tiles with the best estimates, one for each size of the tile."""
    rules = [*isa_constraints(w), *(gather_constraints(w) if loader == CP_ASYNC else resource_constraints(w))]
    rules.append(("CTAs read the input as it lies", lambda t: t.cluster_n == 1))
    tiles = list_best(
        *(KNOB_OPTIONS, rules, lambda t: estimate_by_input_loader_us(t, w), max_tiles),
        kernel_schedule=kernel_schedule,
        input_loader=loader,
    )
    return [config for config, _ in tiles]


def declare_input_loader(
    viewed_workload: Conv, k: Knobs, loaders: Sequence[str], default: HopperTileConfig | None
) -> dict[str, Any]:
    """Declare the knob, that of halo rows and their conditions, after those of the tile config; return the values."""
    loader = k.choice(INPUT_LOADER, loaders, default.input_loader if default else loaders[0], missing=loaders[0])
    values: dict[str, Any] = {INPUT_LOADER: loader}
    if HALO in loaders:
        producers = default.producer_warpgroups if default else PRODUCER_WARPGROUPS_CHOICES[0]
        missing = PRODUCER_WARPGROUPS_CHOICES[0]
        values[PRODUCER_WARPGROUPS] = k.choice(
            PRODUCER_WARPGROUPS, PRODUCER_WARPGROUPS_CHOICES, producers, missing=missing
        )
    rules = [*halo_constraints(viewed_workload), *gather_constraints(viewed_workload)]
    add_rules(k, lambda columns: HopperTileConfig.of_workload(columns, viewed_workload), rules)
    return values


def list_input_loader_starting_configs(w: Conv, viewed_workload: Conv) -> list[dict[str, Any]]:
    """Return the configs of all loaders with which a search starts: the best of each first."""
    loaders = list_input_loaders(w, viewed_workload)
    rankings = [_rank_tiles(viewed_workload, loader, is_first=loader == loaders[0]) for loader in loaders]
    tiles = [config for configs in itertools.zip_longest(*rankings) for config in configs if config]
    names = (INPUT_LOADER, PRODUCER_WARPGROUPS, *KNOB_OPTIONS, "taps_per_copy")
    names += ("kernel_schedule", "raster_order", "decomposition")
    return [{name: getattr(config, name) for name in names} for config in dict.fromkeys(tiles)]


def _rank_tiles(w: Conv, loader: str, *, is_first: bool) -> list[HopperTileConfig]:
    """Return the configs of a loader with which a search starts, those with the best estimates first."""
    if loader in HALO_LOADERS:
        return list(list_best_halo_tiles(w, NUM_STARTING_TILES, loader=loader))
    schedules = (
        (select_kernel_schedule(w), *STARTING_KERNEL_SCHEDULES) if can_compute_several_tiles(w) else (COOPERATIVE,)
    )
    if is_first:
        best, *others = [select_default_config(w, kernel_schedule) for kernel_schedule in schedules]
        configs = [best, *_list_narrow_tiles(w), *others]
        return [replace(config, input_loader=loader) for config in dict.fromkeys(configs)]
    rankings = [list_mn_major_tiles(w, loader, NUM_STARTING_TILES, name) for name in dict.fromkeys(schedules)]
    return [config for configs in itertools.zip_longest(*rankings) for config in configs if config]


def _list_narrow_tiles(w: Conv) -> list[HopperTileConfig]:
    """Return the best config of whole tiles with few accumulators, for 1×1 filters and planes of odd numbers of pixels.

    Threads store the outputs of such planes one by one. The estimates do not know what that costs.
    """
    if not is_pixel_matrix(w) or math.prod(w.output_size) % 2 == 0:
        return []
    rules = [*isa_constraints(w), *resource_constraints(w)]
    rules += [
        ("threads have few accumulators", lambda t: t.num_accumulators <= NARROW_TILE_ACCUMULATORS),
        ("the channels of a tile divide those of a group", lambda t: w.O // w.groups % t.block_n == 0),
    ]
    tiles = list_best(
        *(KNOB_OPTIONS, rules, lambda t: estimate_latency_us(t, w), 1),
        kernel_schedule=COOPERATIVE,
    )
    return [config for config, _ in tiles]


def add_input_loader_usage(usage: ResourceUsage, w: Conv, viewed_workload: Conv, columns: Columns) -> ResourceUsage:
    """Replace the resources of configs with halo rows, and add what loading X costs to the estimates."""
    channels_last_us: Any = usage.estimate
    if INPUT_LOADER not in columns:
        is_read_as_it_lies = np.equal(columns["cluster_n"], 1) & bool(choose_box_pixels(viewed_workload))
        layout_us = np.where(is_read_as_it_lies, 0.0, estimate_input_conversion_us(w))
        usage.estimate, usage.layout_seconds = channels_last_us + layout_us, layout_us * 1e-6
        return usage
    config = HopperTileConfig.of_workload(columns, viewed_workload)
    halo, has_halo = HaloTile(viewed_workload, config), np.isin(columns[INPUT_LOADER], HALO_LOADERS)
    usage.threads = np.where(has_halo, halo.num_threads, usage.threads)
    smem_bytes: Any = usage.dynamic_shared_bytes
    usage.dynamic_shared_bytes = np.where(has_halo, halo.smem_bytes, smem_bytes)
    usage.blocks = np.where(has_halo, halo.num_ctas, usage.blocks)
    if w.output_layout == CHANNELS_FIRST and (padded := pad_planes(viewed_workload)):
        reads_boxes = np.equal(columns[INPUT_LOADER], TMA) & np.equal(columns["cluster_n"], 1)
        usage.blocks = np.where(reads_boxes, config.num_ctas(padded), usage.blocks)
    usage.estimate = estimate_by_input_loader_us(config, viewed_workload)
    usage.layout_seconds = np.maximum(usage.estimate - channels_last_us, 0.0) * 1e-6
    return usage
