"""Analytic latency of `hopper` configs, and the default config with the lowest latency."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from tvmconv.arithmetic import ceil_div
from tvmconv.fitted_latency import H200_FIT
from tvmconv.workloads import Conv

from ..implicit_gemm_shape import ImplicitGemmShape
from ..latency_model import bound_by_memory, combine_overlapping_times, estimate_k_tile_us
from .constraints import isa_constraints, resource_constraints
from .tile_config import KNOB_NAMES, KNOB_OPTIONS, HopperTileConfig
from .tma_requirements import WGMMA_K_BYTES, WGMMA_M, compute_halo_width, list_taps_per_copy


def estimate_latency_us(config: HopperTileConfig, w: Conv, k_tiles: Any = None) -> Any:
    """Return the estimated latency of a launch in microseconds, which selects defaults and prunes searches.

    CTAs run in waves, and an epilogue follows each mainloop except in ping-pong. Each k-tile takes the time of its
    bottleneck: tensor cores, shared memory, TMA (which processes row by row) or the fixed cost. A stage is full again
    `stage_reuse_k_tiles` k-tiles after its use; with fewer stages the CTA waits.

    Args:
        config: The configs.
        w: The convolution.
        k_tiles: Mean number of k-tiles per tile of the slowest CTA; None if all tiles have the same number.
    """
    params, gemm = H200_FIT.hopper, ImplicitGemmShape.from_workload(w)
    k_tiles = config.k_tiles_per_cta(gemm) if k_tiles is None else k_tiles
    ctas_per_sm = config.ctas_per_sm(w)
    num_ctas = config.num_tiles(gemm) * config.split_k
    waves = ceil_div(num_ctas, np.minimum(num_ctas, config.max_active_ctas * ctas_per_sm))
    macs_per_k_tile = config.block_m * config.block_n * config.block_k(gemm.itemsize)
    tma_rows = (
        config.smem_rows_per_wgmma * (config.block_m / WGMMA_M) / config.cluster_n
        + config.block_n * config.taps_per_copy / config.cluster_m
    )
    wgmmas_m = config.wgmma_m_tiles * config.warpgroups_per_tile
    num_wgmmas = config.block_k_bytes // WGMMA_K_BYTES * wgmmas_m * config.taps_per_copy
    smem_bytes = num_wgmmas * (WGMMA_M + config.block_n) * WGMMA_K_BYTES + config.stage_bytes()
    tma_us, macs = ctas_per_sm * tma_rows / params.tma_rows_per_us, macs_per_k_tile * config.taps_per_copy
    k_tile_us = estimate_k_tile_us(ctas_per_sm, macs, smem_bytes, gemm.itemsize, params, tma_us, params.k_tile_us)
    stage_wait_us = (
        params.stage_reuse_k_tiles * k_tile_us + (config.multicast_size > 1) * params.cluster_wait_us
    ) / np.minimum(config.stages, k_tiles)
    epilogue_us = (
        params.epilogue_us_per_accumulator * config.num_accumulators
        + config.uses_smem_reduction(w) * params.reduction_us_per_element * config.block_m * config.block_n
    )
    mainloop_us = k_tiles * combine_overlapping_times(k_tile_us, stage_wait_us)
    total_us = params.launch_us + waves * (mainloop_us + ctas_per_sm * epilogue_us)
    total_us = total_us + (waves > 1) * waves * params.tile_start_us + (config.split_k > 1) * params.split_k_cluster_us
    pingpong_us = params.launch_us + _pingpong_latency_us(waves, mainloop_us, epilogue_us, params.tile_start_us)
    return bound_by_memory(np.where(config.is_pingpong, pingpong_us, total_us), gemm, params)


def _pingpong_latency_us(waves: Any, mainloop_us: Any, epilogue_us: Any, tile_start_us: float) -> Any:
    """Return the latency of a CTA whose two warpgroups compute tiles in turn.

    The mainloops follow one another. A warpgroup stores and starts a tile during the mainloop of the other one, which
    hides this time unless it is longer than the mainloop. The last tile is stored alone.
    """
    other_us = epilogue_us + tile_start_us
    return waves * np.maximum(mainloop_us, (mainloop_us + other_us) / 2) + other_us


@functools.lru_cache(maxsize=256)
def select_default_config(w: Conv) -> HopperTileConfig:
    """Return the config with the best estimate."""
    tiles, latencies_us = _list_candidates(w)
    return tiles.row(int(np.argmin(latencies_us)))


def min_latency_us(w: Conv) -> float:
    """Return the best latency estimate in microseconds."""
    return float(np.min(_list_candidates(w)[1]))


@functools.lru_cache(maxsize=16)
def _list_candidates(w: Conv) -> tuple[HopperTileConfig, Any]:
    """Return all legal configs of a workload, as columns, and their estimates."""
    options = dict(zip(KNOB_NAMES, KNOB_OPTIONS, strict=True)) | {"taps_per_copy": list_taps_per_copy(w)}
    tiles = HopperTileConfig.from_options(options, halo_width=compute_halo_width(w))
    is_allowed = functools.reduce(
        np.logical_and, (predicate(tiles) for _, predicate in (*isa_constraints(w), *resource_constraints(w)))
    )
    tiles = tiles.filter(is_allowed)
    return tiles, estimate_latency_us(tiles, w)
