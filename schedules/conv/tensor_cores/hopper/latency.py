"""Analytic latency of `hopper` configs, and the default config with the lowest latency."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from tvmconv.arithmetic import ceil_div
from tvmconv.workloads import Conv

from ..implicit_gemm_shape import ImplicitGemmShape
from ..overlap_model import combine_overlapping_times
from .constraints import isa_constraints, resource_constraints
from .tile_config import KNOB_NAMES, KNOB_OPTIONS, HopperTileConfig
from .tma_requirements import WGMMA_K_BYTES, WGMMA_M, compute_halo_width, list_taps_per_copy


class HopperLatencyParams(NamedTuple):
    """Parameters of `estimate_latency_us` for one GPU; times in microseconds, traffic in bytes per microsecond.

    The numbers were fitted to 8,792 timings in float16 and bfloat16 on H200s: 363 layers of ResNet-50, d2l-tvm,
    YOLOv8s, EfficientNet-B0, ConvNeXt-T, Stable Diffusion 1.5, fifteen networks of torchvision and others, at batch
    sizes 1 to 32. Half of all estimates are within 8 % of the measurement. Among the measured configs of a layer, the
    one with the best estimate takes 1.05 times the fastest time (geometric mean). It takes more than 1.15 times for 24
    of the 278 layers with at least twelve measured configs.

    Attributes:
        mma_per_us: 16-bit multiply-adds per SM.
        smem_bytes_per_us: Shared-memory traffic per SM.
        tma_rows_per_us: Rows (pixels and output channels) that TMA copies per SM.
        dram_bytes_per_us: Compulsory traffic of global memory.
        k_tile_us: Fixed cost of a k-tile.
        stage_reuse_k_tiles: Number of k-tiles after which a stage is full again.
        cluster_wait_us: Additional latency of a stage that the CTAs of a cluster share.
        epilogue_us_per_accumulator: Cost of a tile's epilogue per accumulator of a thread.
        reduction_us_per_element: Cost of a cluster reduction per element of the tile.
        tile_start_us: Cost of starting a tile in a CTA that computes several.
        split_k_cluster_us: Cost of a split-K cluster.
        launch_us: Cost of a launch.
        pingpong_mainloop_ratio: Time of a mainloop in ping-pong relative to this model. It is not fitted to timings of
            `hopper`. A similar kernel ran 14 large layers on one H100 in both schedules; this is about the mean by
            which the measured ratio of ping-pong to cooperative times was below the estimated one.
    """

    mma_per_us: float = 5.24e6
    smem_bytes_per_us: float = 2.53e5
    tma_rows_per_us: float = 1.21e3
    dram_bytes_per_us: float = 3.73e6
    k_tile_us: float = 0.129
    stage_reuse_k_tiles: float = 3.03
    cluster_wait_us: float = 0.788
    epilogue_us_per_accumulator: float = 0.00751
    reduction_us_per_element: float = 1.04e-4
    tile_start_us: float = 0.158
    split_k_cluster_us: float = 0.654
    launch_us: float = 1.49
    pingpong_mainloop_ratio: float = 0.92


H200_PARAMS = HopperLatencyParams()


def estimate_latency_us(config: HopperTileConfig, w: Conv, params: HopperLatencyParams | None = None) -> Any:
    """Return the estimated latency of a launch in microseconds, which selects defaults and prunes searches.

    CTAs run in waves, and an epilogue follows each mainloop except in ping-pong. Each k-tile takes the time of its
    bottleneck: tensor cores, shared memory, TMA (which processes row by row) or the fixed cost. A stage is full again
    `stage_reuse_k_tiles` k-tiles after its use; with fewer stages the CTA waits.
    """
    params, gemm = params or H200_PARAMS, ImplicitGemmShape.from_workload(w)
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
    k_tile_us = combine_overlapping_times(
        ctas_per_sm * macs_per_k_tile * config.taps_per_copy * (gemm.itemsize / 2) / params.mma_per_us,
        ctas_per_sm * smem_bytes / params.smem_bytes_per_us,
        ctas_per_sm * tma_rows / params.tma_rows_per_us,
        params.k_tile_us,
    )
    stage_wait_us = (
        params.stage_reuse_k_tiles * k_tile_us + (config.multicast_size > 1) * params.cluster_wait_us
    ) / np.minimum(config.stages, config.k_tiles_per_cta(gemm))
    epilogue_us = (
        params.epilogue_us_per_accumulator * config.num_accumulators
        + config.uses_smem_reduction(w) * params.reduction_us_per_element * config.block_m * config.block_n
    )
    mainloop_us = config.k_tiles_per_cta(gemm) * combine_overlapping_times(k_tile_us, stage_wait_us)
    total_us = params.launch_us + waves * (mainloop_us + ctas_per_sm * epilogue_us)
    total_us = total_us + (waves > 1) * waves * params.tile_start_us + (config.split_k > 1) * params.split_k_cluster_us
    total_us = np.where(
        config.is_pingpong, params.launch_us + _pingpong_latency_us(waves, mainloop_us, epilogue_us, params), total_us
    )
    return combine_overlapping_times(total_us, params.launch_us + gemm.min_bytes / params.dram_bytes_per_us)


def _pingpong_latency_us(waves: Any, mainloop_us: Any, epilogue_us: Any, params: HopperLatencyParams) -> Any:
    """Return the latency of a CTA whose two warpgroups compute tiles in turn.

    The mainloops follow one another. A warpgroup stores and starts a tile during the mainloop of the other one, which
    hides this time unless it is longer than the mainloop. The last tile is stored alone.
    """
    mainloop_us = params.pingpong_mainloop_ratio * mainloop_us
    other_us = epilogue_us + params.tile_start_us
    return waves * np.maximum(mainloop_us, (mainloop_us + other_us) / 2) + other_us


@functools.lru_cache(maxsize=256)
def select_default_config(w: Conv) -> HopperTileConfig:
    """Return the config with the best estimate."""
    tiles, latencies_us = _list_candidates(w)
    best_index = int(np.argmin(latencies_us))
    return HopperTileConfig(
        **{name: getattr(tiles, name)[best_index].item() for name in (*KNOB_NAMES, "taps_per_copy")},
        halo_width=compute_halo_width(w),
    )


def min_latency_us(w: Conv) -> float:
    """Return the best latency estimate in microseconds."""
    return float(np.min(_list_candidates(w)[1]))


@functools.lru_cache(maxsize=16)
def _list_candidates(w: Conv) -> tuple[HopperTileConfig, Any]:
    """Return all legal configs of a workload, as columns, and their estimates."""
    option_grid = np.meshgrid(*KNOB_OPTIONS, list_taps_per_copy(w), indexing="ij")
    columns = {name: column.ravel() for name, column in zip((*KNOB_NAMES, "taps_per_copy"), option_grid, strict=True)}
    tiles = HopperTileConfig(**columns, halo_width=compute_halo_width(w))
    is_allowed = functools.reduce(
        np.logical_and, (predicate(tiles) for _, predicate in (*isa_constraints(w), *resource_constraints(w)))
    )
    tiles = HopperTileConfig(
        **{name: column[is_allowed] for name, column in columns.items()}, halo_width=compute_halo_width(w)
    )
    return tiles, estimate_latency_us(tiles, w)
