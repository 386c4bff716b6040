"""Analytic latency of `mma_sync` configs, and the default config with the lowest latency."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from tvmconv.arithmetic import ceil_div, round_up
from tvmconv.target import REGISTERS_PER_MULTIPROCESSOR, WARP_SIZE
from tvmconv.workloads import Conv

from ..implicit_gemm_shape import ACCUMULATOR_BYTES, VECTOR_BYTES, ImplicitGemmShape
from ..overlap_model import combine_overlapping_times
from .epilogue_split import compute_staged_itemsize, count_channel_args
from .tile_config import MAX_ACCUMULATORS, MMA_K_BYTES, MMA_M, MMA_N, MmaSyncTileConfig, list_options

PORTABLE_SHARED_BYTES = 99 << 10  # dynamic shared memory per block that every GPU since sm_80 allows
# Shared memory of an SM of sm_90, and the part of it that the driver reserves for each block.
SM_SHARED_BYTES, RESERVED_SHARED_BYTES_PER_BLOCK = 228 << 10, 1 << 10
MAX_RESIDENT_THREADS = 2048  # per SM


class MmaSyncLatencyParams(NamedTuple):
    """Parameters of `estimate_latency_us` for one GPU; times in microseconds, traffic in bytes per microsecond.

    The numbers were fitted to 3,824 timings in float16 on one H200: layers of ResNet-50, YOLOv8s, ConvNeXt-T and
    d2l-tvm, at batch sizes 1 and 32. Half of all estimates are within 10 % of the measurement. Among the measured
    configs of a layer, the one with the best estimate takes 1.09 times the fastest time, and the fastest of the twelve
    with the best estimates 1.01 times (geometric means).

    Attributes:
        num_multiprocessors: Number of SMs.
        mma_per_us: 16-bit multiply-adds per SM.
        smem_bytes_per_us: Shared-memory traffic per SM.
        l2_bytes_per_us: L2 traffic of the operands of all blocks.
        dram_bytes_per_us: Compulsory traffic of global memory.
        l2_latency_us: Latency of a k-tile's operands, divided by the number of k-tiles in flight.
        k_tile_us: Fixed cost of a k-tile: its barrier and the wait for fragments.
        mma_issue_us: Cost of each mma of a warp.
        epilogue_us_per_accumulator: Cost of a block's epilogue per accumulator of a thread.
        workspace_launch_us: Cost of a second launch.
        cluster_us_per_block: Cost of a cluster reduction per block of the cluster.
        launch_us: Cost of a launch.
    """

    num_multiprocessors: int = 132
    mma_per_us: float = 1.77e6
    smem_bytes_per_us: float = 1.97e5
    l2_bytes_per_us: float = 1.28e7
    dram_bytes_per_us: float = 2.68e6
    l2_latency_us: float = 0.56
    k_tile_us: float = 0.116
    mma_issue_us: float = 0.0034
    epilogue_us_per_accumulator: float = 0.0054
    workspace_launch_us: float = 0.70
    cluster_us_per_block: float = 0.68
    launch_us: float = 1.83


H200_PARAMS = MmaSyncLatencyParams()


def estimate_latency_us(
    config: MmaSyncTileConfig, gemm: ImplicitGemmShape, params: MmaSyncLatencyParams | None = None
) -> Any:
    """Return the estimated latency of a launch in microseconds, which selects defaults and prunes searches.

    Waves of blocks run one after another. A block takes the time of its epilogue, plus for each k-tile the time of its
    bottleneck: tensor cores, shared memory, the L2 cache, latency, or the dependent instructions of one warp.
    """
    params = params or H200_PARAMS
    blocks_per_sm = config.num_tiles(gemm) * config.split_k / params.num_multiprocessors
    resident_blocks_per_sm = _compute_blocks_per_sm(config, gemm, params)
    full_waves = np.floor(blocks_per_sm / resident_blocks_per_sm)
    tail_blocks = np.ceil(blocks_per_sm - full_waves * resident_blocks_per_sm)
    total_us = (
        params.launch_us
        + full_waves * _estimate_wave_us(config, gemm, params, resident_blocks_per_sm)
        + (tail_blocks > 0) * _estimate_wave_us(config, gemm, params, tail_blocks)
    )
    total_us = combine_overlapping_times(total_us, params.launch_us + gemm.min_bytes / params.dram_bytes_per_us)
    partial_bytes = gemm.groups * gemm.m * gemm.n * ACCUMULATOR_BYTES * config.split_k
    total_us = total_us + config.uses_workspace_reduction * (
        params.workspace_launch_us + 2 * partial_bytes / params.dram_bytes_per_us
    )
    return total_us + config.uses_cluster_reduction * (
        params.cluster_us_per_block * config.split_k + partial_bytes / params.l2_bytes_per_us
    )


def _compute_blocks_per_sm(config: MmaSyncTileConfig, gemm: ImplicitGemmShape, params: MmaSyncLatencyParams) -> Any:
    """Return the number of resident blocks per SM, limited by shared memory, registers and threads of Hopper."""
    smem_bytes = config.stages * config.stage_bytes(gemm) + RESERVED_SHARED_BYTES_PER_BLOCK
    registers = round_up(config.estimate_registers(gemm.itemsize, gemm.spatial_ndim), 8)
    occupancy = np.minimum(
        SM_SHARED_BYTES // smem_bytes, REGISTERS_PER_MULTIPROCESSOR // (registers * config.num_threads)
    )
    occupancy = np.minimum(occupancy, MAX_RESIDENT_THREADS // config.num_threads)
    return np.clip(
        np.minimum(occupancy, ceil_div(config.num_tiles(gemm) * config.split_k, params.num_multiprocessors)), 1, None
    )


def _estimate_wave_us(
    config: MmaSyncTileConfig, gemm: ImplicitGemmShape, params: MmaSyncLatencyParams, resident_blocks: Any
) -> Any:
    """Return the latency in microseconds of blocks that are resident together."""
    resident_blocks = np.maximum(resident_blocks, 1)
    macs_per_k_tile = config.block_m * config.block_n * config.block_k
    num_output_warps = config.warps_m * config.warps_n
    stage_bytes = config.stage_bytes(gemm)
    smem_read_bytes = (
        (config.block_m * config.warps_n + config.block_n * config.warps_m) * config.block_k * gemm.itemsize
    )
    num_mmas = macs_per_k_tile * gemm.itemsize // (MMA_M * MMA_N * MMA_K_BYTES) / (num_output_warps * config.warps_k)
    k_tile_us = combine_overlapping_times(
        resident_blocks * macs_per_k_tile * (gemm.itemsize / 2) / params.mma_per_us,
        resident_blocks * (smem_read_bytes + stage_bytes) / params.smem_bytes_per_us,
        resident_blocks * params.num_multiprocessors * stage_bytes / params.l2_bytes_per_us,
        params.l2_latency_us / np.clip(np.minimum(config.stages - 1, config.k_tiles_per_block(gemm)), 1, None),
        params.k_tile_us + params.mma_issue_us * num_mmas,
    )
    return (
        config.k_tiles_per_block(gemm) * k_tile_us
        + params.epilogue_us_per_accumulator * config.num_accumulators * resident_blocks
    )


def select_default_config(w: Conv) -> MmaSyncTileConfig:
    """Return the config with the best estimate among those that every GPU since sm_80 can run."""
    gemm = ImplicitGemmShape.from_workload(w)
    candidates = _list_candidates(gemm.itemsize, gemm.spatial_ndim)
    smem_bytes = candidates.dynamic_smem_bytes(
        gemm, compute_staged_itemsize(w, candidates), count_channel_args(w, candidates)
    )
    is_allowed = candidates.has_k_tile_in_each_part(gemm) & (smem_bytes <= PORTABLE_SHARED_BYTES)
    return candidates.row(int(np.argmin(np.where(is_allowed, estimate_latency_us(candidates, gemm), np.inf))))


def min_latency_us(gemm: ImplicitGemmShape) -> float:
    """Return the best latency estimate of all candidates in microseconds."""
    return float(np.min(estimate_latency_us(_list_candidates(gemm.itemsize, gemm.spatial_ndim), gemm)))


@functools.cache
def _list_candidates(itemsize: int, spatial_ndim: int) -> MmaSyncTileConfig:
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
