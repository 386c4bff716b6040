"""The knob of `hopper` that chooses how a channels-first X is loaded: converted, or as tiles of halo rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from tvmconv.space import Columns, Knobs
from tvmconv.space.search_space import ResourceUsage
from tvmconv.workloads import Conv
from tvmconv.workloads.layout import CHANNELS_FIRST

from ...layout_conversion import estimate_input_conversion_us
from ...tile_config import add_rules
from .halo_latency import estimate_by_input_loader_us, list_best_halo_tiles
from .halo_tile import HaloTile, can_use_halo, halo_constraints
from .latency import select_default_config
from .tile_config import CONVERTED, HALO, INPUT_LOADERS, KNOB_OPTIONS, MAX_SWIZZLE_BYTES, HopperTileConfig
from .tma_requirements import choose_box_pixels

INPUT_LOADER = "input_loader"
NUM_STARTING_TILES = 3  # configs with halo rows that a search tries first


def offers_halo(w: Conv, viewed_workload: Conv) -> bool:
    """Return whether halo rows are a choice: X is channels first, and TMA cannot read it as it is.

    Args:
        w: The workload.
        viewed_workload: The same arrays as TMA views them, channels last.
    """
    has_same_axes = w.layout == CHANNELS_FIRST and viewed_workload == w.to_channels_last()
    return has_same_axes and not choose_box_pixels(viewed_workload) and can_use_halo(viewed_workload)


def select_halo_default(viewed_workload: Conv) -> HopperTileConfig | None:
    """Return the config with halo rows that has the best estimate; None if a conversion of X is estimated faster."""
    for config in list_best_halo_tiles(viewed_workload, 1):
        converted = select_default_config(viewed_workload)
        halo_us, converted_us = (float(estimate_by_input_loader_us(c, viewed_workload)) for c in (config, converted))
        return config if halo_us < converted_us else None
    return None


def declare_input_loader(viewed_workload: Conv, k: Knobs, *, prefers_halo: bool) -> str:
    """Declare the knob and its conditions, after those of the tile config, and return its value."""
    loader = k.choice(INPUT_LOADER, INPUT_LOADERS, HALO if prefers_halo else CONVERTED, missing=CONVERTED)
    add_rules(
        k, lambda columns: HopperTileConfig.of_workload(columns, viewed_workload), halo_constraints(viewed_workload)
    )
    return loader


def list_halo_starting_configs(w: Conv, viewed_workload: Conv) -> list[dict[str, Any]]:
    """Return the configs with halo rows with which a search starts."""
    if not offers_halo(w, viewed_workload):
        return []
    names = (INPUT_LOADER, *KNOB_OPTIONS, "taps_per_copy", "kernel_schedule", "raster_order", "decomposition")
    tiles = list_best_halo_tiles(viewed_workload, NUM_STARTING_TILES)
    wide_tiles = list_best_halo_tiles(viewed_workload, 1, MAX_SWIZZLE_BYTES)  # fewer barriers than the estimate counts
    return [{name: getattr(config, name) for name in names} for config in dict.fromkeys((*tiles, *wide_tiles))]


def add_halo_usage(usage: ResourceUsage, w: Conv, viewed_workload: Conv, columns: Columns) -> ResourceUsage:
    """Replace the resources of configs with halo rows, and add the conversion of X to the estimates of the others."""
    channels_last_us: Any = usage.estimate
    if INPUT_LOADER not in columns:
        is_read_as_it_lies = np.equal(columns["cluster_n"], 1) & bool(choose_box_pixels(viewed_workload))
        layout_us = np.where(is_read_as_it_lies, 0.0, estimate_input_conversion_us(w))
        usage.estimate, usage.layout_seconds = channels_last_us + layout_us, layout_us * 1e-6
        return usage
    config = HopperTileConfig.of_workload(columns, viewed_workload)
    halo, has_halo = HaloTile(viewed_workload, config), np.equal(columns[INPUT_LOADER], HALO)
    usage.threads = np.where(has_halo, halo.num_threads, usage.threads)
    smem_bytes: Any = usage.dynamic_shared_bytes
    usage.dynamic_shared_bytes = np.where(has_halo, halo.smem_bytes, smem_bytes)
    usage.blocks = np.where(has_halo, halo.num_ctas, usage.blocks)
    usage.estimate = estimate_by_input_loader_us(config, viewed_workload)
    usage.layout_seconds = np.maximum(usage.estimate - channels_last_us, 0.0) * 1e-6
    return usage
