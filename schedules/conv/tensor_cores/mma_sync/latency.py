"""Analytic latency of `mma_sync` configs, and the default config with the lowest latency."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from tvmconv.fitted_latency import H200_FIT
from tvmconv.target import H200, PORTABLE_SHARED_BYTES, WARP_SIZE
from tvmconv.workloads import Conv

from ..implicit_gemm_shape import ACCUMULATOR_BYTES, VECTOR_BYTES, ImplicitGemmShape
from ..latency_model import bound_by_memory, count_ctas_per_sm, estimate_k_tile_us
from ..promotion import MAX_PRODUCTS, has_float8_sums, has_integer_output, list_intervals
from .epilogue_split import compute_smem_bytes
from .tile_config import MAX_ACCUMULATORS, MMA_K_BYTES, MMA_M, MMA_N, MmaSyncTileConfig, list_options


def estimate_latency_us(config: MmaSyncTileConfig, gemm: ImplicitGemmShape) -> Any:
    """Return the estimated latency of a launch in microseconds, which selects defaults and prunes searches.

    Waves of blocks run one after another. A block takes the time of its epilogue, plus for each k-tile the time of its
    bottleneck: tensor cores, shared memory, the L2 cache, latency, or the dependent instructions of one warp.
    """
    params, num_blocks = H200_FIT.mma_sync, config.num_tiles(gemm) * config.split_k
    blocks_per_sm = num_blocks / H200.multiprocessors
    resident_blocks_per_sm = count_ctas_per_sm(
        num_blocks,
        H200.multiprocessors,
        config.mainloop_bytes(gemm),
        config.estimate_registers(gemm.itemsize, gemm.spatial_ndim),
        config.num_threads,
    )
    full_waves = np.floor(blocks_per_sm / resident_blocks_per_sm)
    tail_blocks = np.ceil(blocks_per_sm - full_waves * resident_blocks_per_sm)
    total_us = (
        params.launch_us
        + full_waves * _estimate_wave_us(config, gemm, resident_blocks_per_sm)
        + (tail_blocks > 0) * _estimate_wave_us(config, gemm, tail_blocks)
    )
    total_us = bound_by_memory(total_us, gemm, params)
    partial_bytes = gemm.num_products * gemm.m * gemm.n * ACCUMULATOR_BYTES * config.split_k
    total_us = total_us + config.uses_workspace_reduction * (
        params.workspace_launch_us + 2 * partial_bytes / params.dram_bytes_per_us
    )
    return total_us + config.uses_cluster_reduction * (
        params.cluster_us_per_block * config.split_k + partial_bytes / params.l2_bytes_per_us
    )


def _estimate_wave_us(config: MmaSyncTileConfig, gemm: ImplicitGemmShape, resident_blocks: Any) -> Any:
    """Return the latency in microseconds of blocks that are resident together."""
    params, resident_blocks = H200_FIT.mma_sync, np.maximum(resident_blocks, 1)
    macs_per_k_tile = config.block_m * config.block_n * config.block_k
    num_output_warps = config.warps_m * config.warps_n
    copied_bytes = config.copied_bytes(gemm)
    smem_read_bytes = (
        (config.block_m * config.warps_n + config.block_n * config.warps_m) * config.block_k * gemm.itemsize
    )
    num_mmas = macs_per_k_tile * gemm.itemsize // (MMA_M * MMA_N * MMA_K_BYTES) / (num_output_warps * config.warps_k)
    k_tiles_in_flight = np.clip(np.minimum(config.stages - 1, config.k_tiles_per_block(gemm)), 1, None)
    k_tile_us = estimate_k_tile_us(
        *(resident_blocks, macs_per_k_tile, smem_read_bytes + config.moved_bytes(gemm), gemm.itemsize, params),
        resident_blocks * H200.multiprocessors * copied_bytes / params.l2_bytes_per_us,
        params.l2_latency_us / k_tiles_in_flight,
        params.k_tile_us + params.mma_issue_us * num_mmas,
    )
    return (
        config.k_tiles_per_block(gemm) * k_tile_us
        + (params.epilogue_us_per_accumulator * config.num_accumulators + config.transpose_us(gemm)) * resident_blocks
    )


def select_default_config(
    w: Conv, *, splits_reduction: bool = True, stores_channels_first: bool = False
) -> MmaSyncTileConfig:
    """Return the config with the best estimate among those that every GPU since sm_80 can run.

    Args:
        w: The convolution, or a product that is no convolution.
        splits_reduction: Whether CTAs may split the reduction.
        stores_channels_first: Whether the kernel stores its output channels first.
    """
    gemm = ImplicitGemmShape.from_workload(w)
    candidates = list_candidates(gemm.itemsize, gemm.spatial_ndim)
    candidates = dataclasses.replace(candidates, stores_channels_first=stores_channels_first)
    if not splits_reduction:
        candidates = candidates.filter(candidates.split_k == 1)
    if has_integer_output(w):
        candidates = candidates.filter(candidates.warps_k == 1)
    if has_float8_sums(w):
        candidates = dataclasses.replace(candidates, promotion_interval=list_intervals(w)[0])
        fits = candidates.fits_registers(gemm.itemsize, gemm.spatial_ndim)
        candidates = candidates.filter(fits & (candidates.promoted_products <= MAX_PRODUCTS))
    fits = compute_smem_bytes(w, candidates) <= PORTABLE_SHARED_BYTES
    is_allowed = candidates.has_k_tile_in_each_part(gemm) & fits
    return candidates.row(int(np.argmin(np.where(is_allowed, estimate_latency_us(candidates, gemm), np.inf))))


def min_latency_us(gemm: ImplicitGemmShape) -> float:
    """Return the best latency estimate of all candidates in microseconds."""
    return float(np.min(estimate_latency_us(list_candidates(gemm.itemsize, gemm.spatial_ndim), gemm)))


@functools.cache
def list_candidates(itemsize: int, spatial_ndim: int) -> MmaSyncTileConfig:
    """Return the candidate configs for an element size and a number of spatial axes, as columns."""
    fixed_options = {"split_k_reduction": ("workspace",), "tiles_per_block": (1,)}
    tiles = MmaSyncTileConfig.from_options(list_options(itemsize) | fixed_options)
    block_k_bytes = tiles.block_k * itemsize
    is_allowed = (
        tiles.is_warp_tile_exact
        & (block_k_bytes % (2 * MMA_K_BYTES * tiles.warps_k) == 0)
        & (tiles.num_threads * VECTOR_BYTES >= 8 * block_k_bytes)
        & (tiles.num_threads >= 2 * WARP_SIZE)
        & (tiles.num_threads <= 8 * WARP_SIZE)
        & (tiles.num_accumulators <= MAX_ACCUMULATORS)
        & tiles.fits_registers(itemsize, spatial_ndim)
        & (tiles.stages * (tiles.block_m + tiles.block_n) * block_k_bytes <= PORTABLE_SHARED_BYTES)
        & (tiles.block_m * tiles.pitch_bytes(ACCUMULATOR_BYTES) <= PORTABLE_SHARED_BYTES)
        & (tiles.block_m * tiles.block_n * ACCUMULATOR_BYTES * (tiles.warps_k - 1) <= PORTABLE_SHARED_BYTES)
    )
    return tiles.filter(is_allowed)
