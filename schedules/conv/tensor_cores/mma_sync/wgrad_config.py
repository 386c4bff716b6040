"""Configs of `mma_sync` for gradients of weights: tiles of filters × (tap, channel), and CTAs that share the pixels.

The estimate is that of the forward kernel on the product of the wgrad: its k-tiles are pixels.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from tvmconv.space import Columns, Knobs
from tvmconv.space.search_space import ResourceUsage
from tvmconv.target import PORTABLE_SHARED_BYTES, WARP_SIZE
from tvmconv.workloads.conv_gradient import WeightGradient

from ...tile_config import Rule, add_rules, declare_choices
from ..implicit_gemm_shape import ACCUMULATOR_BYTES, ImplicitGemmShape
from ..wgrad_sums import make_wgrad_shape
from .knobs import MAX_LATENCY_RATIO, compute_product_usage, list_tile_prunings, require_even_steps
from .latency import estimate_latency_us
from .tile_config import MAX_ACCUMULATORS, MMA_K_BYTES, MmaSyncTileConfig, list_options

BLOCK_CHOICES = (16, 32, 64, 128, 256)  # powers of two, so that threads copy whole rows at a time
PARTS_CHOICES = (1, 2, 3, 4, 6, 8, 11, 16, 22, 29, 33, 44, 66, 88, 132, 264)
MAX_DEFAULT_WARPS = 8
# A CTA has one output tile, and its sums go to a workspace.
STARTING_TILES = 4  # tiles of the configs with which a search starts, besides that of the default
FIXED_KNOBS: dict[str, Any] = {"split_k_reduction": "workspace", "tiles_per_block": 1}


def make_wgrad_config(columns: Mapping[str, Any]) -> MmaSyncTileConfig:
    """Return the config of the knobs' values, or the configs of many."""
    return MmaSyncTileConfig.from_columns({**columns, **FIXED_KNOBS})


def list_wgrad_options(itemsize: int) -> dict[str, tuple[int, ...]]:
    """Return the options of the knobs."""
    options = {name: choices for name, choices in list_options(itemsize).items() if name not in FIXED_KNOBS}
    return options | {"block_m": BLOCK_CHOICES, "block_n": BLOCK_CHOICES, "split_k": PARTS_CHOICES}


def compute_wgrad_smem_bytes(config: MmaSyncTileConfig, shape: ImplicitGemmShape) -> Any:
    """Return the dynamic shared memory of a CTA in bytes: the stages, or the sums of warps along the reduction."""
    sums = config.block_m * config.block_n * ACCUMULATOR_BYTES * (config.warps_k - 1)
    return np.maximum(config.stages * config.stage_bytes(shape), sums)


def list_wgrad_requirements(shape: ImplicitGemmShape) -> list[Rule]:
    """Return the conditions that every config meets."""
    return [
        ("a warp computes whole mma tiles of 16 filters and 16 columns", lambda t: t.is_warp_tile_exact),
        require_even_steps(shape),
        (
            "the threads copy the rows that a swizzle permutes, 8 of 16 bits or 4 of 32 bits, at a time",
            lambda t: t.num_threads >= np.maximum(t.block_m, t.block_n),
        ),
        ("each part of the reduction has a k-tile", lambda t: t.has_k_tile_in_each_part(shape)),
    ]


def list_wgrad_prunings(shape: ImplicitGemmShape) -> list[Rule]:
    """Return the conditions under which a config is worth searching."""
    _, best_us = select_wgrad_default(shape)
    return [
        *list_tile_prunings(shape),
        (
            f"the estimated latency is at most {MAX_LATENCY_RATIO} times the best estimate",
            lambda t: estimate_latency_us(t, shape) <= MAX_LATENCY_RATIO * best_us,
        ),
    ]


def select_wgrad_default(shape: ImplicitGemmShape) -> tuple[MmaSyncTileConfig, float]:
    """Return the config with the best estimate among those that every GPU since sm_80 can run, and the estimate."""
    return list_best_wgrad_configs(shape)[0]


@functools.lru_cache(maxsize=64)
def list_best_wgrad_configs(shape: ImplicitGemmShape) -> list[tuple[MmaSyncTileConfig, float]]:
    """Return the configs with the best estimates, one for each size of the tile, and the estimates in microseconds."""
    configs = _list_wgrad_candidates(shape.itemsize, shape.spatial_ndim)
    is_allowed = configs.has_k_tile_in_each_part(shape)
    is_tight = (configs.block_m < 2 * max(shape.m, 16)) & (configs.block_n < 2 * max(shape.n, 16))
    estimates = np.where(is_allowed & is_tight, estimate_latency_us(configs, shape), np.inf)
    order = np.argsort(estimates, kind="stable")
    _, first_of_tile = np.unique((configs.block_m << 16 | configs.block_n)[order], return_index=True)
    best = order[np.sort(first_of_tile)[: STARTING_TILES + 1]].tolist()
    return [(configs.row(index), float(estimates[index])) for index in best if np.isfinite(estimates[index])]


def list_wgrad_starting_configs(w: WeightGradient) -> list[dict[str, Any]]:
    """Return the configs with which a search starts besides the default: the best estimates of other tiles."""
    shape = make_wgrad_shape(w)
    return [
        {name: getattr(config, name) for name in list_wgrad_options(shape.itemsize)}
        for config, _ in list_best_wgrad_configs(shape)[1:]
    ]


@functools.cache
def _list_wgrad_candidates(itemsize: int, spatial_ndim: int) -> MmaSyncTileConfig:
    """Return the candidate configs for an element size and a number of spatial axes, as columns."""
    configs = MmaSyncTileConfig.from_options(list_wgrad_options(itemsize), **FIXED_KNOBS)
    block_k_bytes = configs.block_k * itemsize
    smem_bytes = configs.stages * (configs.block_m + configs.block_n) * block_k_bytes
    sliced_k_bytes = configs.block_m * configs.block_n * ACCUMULATOR_BYTES * (configs.warps_k - 1)
    return configs.filter(
        configs.is_warp_tile_exact
        & (block_k_bytes % (2 * MMA_K_BYTES * configs.warps_k) == 0)
        & (configs.num_threads >= np.maximum(configs.block_m, configs.block_n))
        & (configs.num_threads >= 2 * WARP_SIZE)
        & (configs.num_threads <= MAX_DEFAULT_WARPS * WARP_SIZE)
        & (configs.num_accumulators <= MAX_ACCUMULATORS)
        & configs.fits_registers(itemsize, spatial_ndim)
        & (np.maximum(smem_bytes, sliced_k_bytes) <= PORTABLE_SHARED_BYTES)
    )


def compute_wgrad_usage(w: WeightGradient, columns: Columns) -> ResourceUsage:
    """Return the resources that configs use."""
    shape, config = make_wgrad_shape(w), make_wgrad_config(columns)
    return compute_product_usage(config, shape, compute_wgrad_smem_bytes(config, shape))


def declare_wgrad_knobs(w: WeightGradient, k: Knobs) -> MmaSyncTileConfig:
    """Declare the knobs, with defaults that suit the workload, and return their values."""
    shape = make_wgrad_shape(w)
    declare_choices(k, list_wgrad_options(shape.itemsize), select_wgrad_default(shape)[0])
    add_rules(k, make_wgrad_config, list_wgrad_requirements(shape), list_wgrad_prunings(shape))
    return make_wgrad_config(k.values)
