"""Analytic latency of `hopper` configs, and the default configs with the lowest latency."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from tvmconv.arithmetic import ceil_div
from tvmconv.fitted_latency import H200_FIT
from tvmconv.workloads import Conv

from ..implicit_gemm_shape import ACCUMULATOR_BYTES, ImplicitGemmShape
from ..latency_model import bound_by_memory, combine_overlapping_times, estimate_k_tile_us
from ..promotion import (
    BUFFERS_KNOB,
    KNOB,
    MIN_ALTERNATING_PRODUCTS,
    ORDER_KNOB,
    PROMOTION_BUFFERS,
    PROMOTION_ORDERS,
    SIMULTANEOUS,
    has_float8_sums,
    limit_accumulation_error,
    list_intervals,
    needs_promotion,
)
from .candidates import select_best
from .constraints import isa_constraints, require_whole_slices, resource_constraints
from .tile_config import COOPERATIVE, KNOB_OPTIONS, MAX_TILES_AHEAD, PINGPONG, HopperTileConfig
from .tma_requirements import (
    WGMMA_K_BYTES,
    WGMMA_M,
    describe_lines,
    list_taps_per_copy_of_whole_lines,
    returns_stats,
)

# Costs of partial sums in a workspace: a second launch, as fitted for `mma_sync`, and traffic of L2 by all SMs.
WORKSPACE_LAUNCH_US, WORKSPACE_BYTES_PER_US = H200_FIT.mma_sync.workspace_launch_us, 4.0e6

# Rough time of a last wave of narrower tiles for each byte that a CTA copies, relative to a whole wave.
NARROW_WAVE_TIME = 0.8

# Rough time of a promotion of a warpgroup during which the tensor cores are idle, fitted to layers on an H200. If
# several warpgroups compute a tile, two thirds of it are hidden; in turn and with two sets of accumulators, nearly all.
PROMOTION_LATENCY_US, PROMOTION_US_PER_ACCUMULATOR = 0.15, 1e-3
EXPOSED_PROMOTION, ALTERNATING_PROMOTION, HIDDEN_PROMOTION = 0.35, 0.12, 0.1


def list_promotion_options(w: Conv) -> dict[str, tuple[int | str, ...]]:
    """Return the knobs of sums of 8-bit floats with the default interval; no knobs for other dtypes."""
    if not has_float8_sums(w):
        return {}
    is_long = ImplicitGemmShape.from_workload(w).k >= MIN_ALTERNATING_PRODUCTS
    orders = PROMOTION_ORDERS if is_long else (SIMULTANEOUS,)
    buffers = PROMOTION_BUFFERS if needs_promotion(w) else PROMOTION_BUFFERS[:1]
    return {KNOB: list_intervals(w)[:1], BUFFERS_KNOB: buffers, ORDER_KNOB: orders}


def estimate_latency_us(
    config: HopperTileConfig, w: Conv, *, waves: Any = None, k_tiles: Any = None, other_us: Any = 0.0
) -> Any:
    """Return the estimated latency of a launch in microseconds, which selects defaults and prunes searches.

    CTAs run in waves, and an epilogue follows each mainloop except in ping-pong. Each k-tile takes the time of its
    bottleneck: tensor cores, shared memory, TMA (which processes row by row) or the fixed cost. A stage is full again
    `stage_reuse_k_tiles` k-tiles after its use; with fewer stages the CTA waits. Stages beyond the k-tiles of a tile
    serve if CTAs compute several. A launch takes at least as long as its compulsory traffic.

    Args:
        config: One config, or many as columns.
        w: The convolution, as TMA views it.
        waves: Number of waves; by default that of the config. A fraction is the share of the last wave that counts.
        k_tiles: Mean number of k-tiles per tile of the slowest CTA; None if all tiles have the same number.
        other_us: Time of this CTA's other work in microseconds.
    """
    gemm = ImplicitGemmShape.from_workload(w)
    launch_us = _estimate_unbounded_us(config, w, gemm, waves, k_tiles) + other_us
    return bound_by_memory(launch_us, gemm, H200_FIT.hopper)


def _estimate_unbounded_us(
    config: HopperTileConfig, w: Conv, gemm: ImplicitGemmShape, waves: Any = None, k_tiles: Any = None
) -> Any:
    """Return the estimate of a launch whose compulsory traffic takes no time."""
    params, ctas_per_sm = H200_FIT.hopper, config.ctas_per_sm(w)
    k_tiles = config.k_tiles_per_cta(gemm) if k_tiles is None else k_tiles
    useful_stages = np.where(config.computes_several_tiles(gemm), MAX_TILES_AHEAD * k_tiles, k_tiles)
    if waves is None:
        waves = _count_waves(config, gemm, ctas_per_sm)
    macs_per_k_tile = config.block_m * config.block_n * config.block_k(gemm.itemsize)
    tma_rows = config.a_stage_rows / config.cluster_n + config.b_streamed_rows / config.cluster_m
    wgmmas_m = config.wgmma_m_tiles * config.warpgroups_per_tile
    num_wgmmas = config.block_k_bytes // WGMMA_K_BYTES * wgmmas_m * config.taps_per_copy
    smem_bytes = num_wgmmas * (WGMMA_M + config.block_n) * WGMMA_K_BYTES + config.stage_bytes()
    tma_us, macs = ctas_per_sm * tma_rows / params.tma_rows_per_us, macs_per_k_tile * config.taps_per_copy
    k_tile_us = estimate_k_tile_us(ctas_per_sm, macs, smem_bytes, gemm.itemsize, params, tma_us, params.k_tile_us)
    promotion_us = ctas_per_sm * _estimate_promotion_us(config)
    stage_wait_us = (
        params.stage_reuse_k_tiles * k_tile_us + (config.multicast_size > 1) * params.cluster_wait_us
    ) / np.where(config.keeps_filters, config.stages, np.minimum(config.stages, useful_stages))
    epilogue_us = (
        params.epilogue_us_per_accumulator * config.num_accumulators
        + config.uses_smem_reduction(w) * params.reduction_us_per_element * config.block_m * config.block_n
    )
    mainloop_us = k_tiles * (combine_overlapping_times(k_tile_us, stage_wait_us) + promotion_us)
    total_us = params.launch_us + waves * (mainloop_us + ctas_per_sm * epilogue_us)
    total_us = total_us + (waves > 1) * waves * params.tile_start_us + (config.split_k > 1) * params.split_k_cluster_us
    other_us = epilogue_us + params.tile_start_us
    pingpong_us = params.launch_us + _pingpong_latency_us(waves, mainloop_us, other_us, config.warpgroups)
    stats_us = _stats_us(config, gemm) if returns_stats(w) else 0.0
    return np.where(config.is_pingpong, pingpong_us, total_us) + _last_wave_us(config, gemm) + stats_us


def _estimate_promotion_us(config: HopperTileConfig) -> Any:
    """Return the time of promotions per k-tile during which the tensor cores are idle."""
    promotions = config.products_per_k_tile(1) / np.maximum(1, config.promoted_products(1))
    promotion_us = PROMOTION_LATENCY_US + config.num_accumulators * PROMOTION_US_PER_ACCUMULATOR
    share = np.where(np.greater(config.warpgroups_per_tile, 1), EXPOSED_PROMOTION, 1.0)
    share = np.where(config.alternates_promotions, ALTERNATING_PROMOTION, share)
    share = np.where(np.greater(config.promotion_buffers, 1), HIDDEN_PROMOTION, share)
    return np.where(np.greater(config.promotion_interval, 0), share * promotions * promotion_us, 0.0)


def _count_waves(config: HopperTileConfig, gemm: ImplicitGemmShape, ctas_per_sm: Any) -> Any:
    """Return the number of waves; a split last wave takes a fraction of the time."""
    num_ctas, active_ctas = config.num_tiles(gemm) * config.split_k, config.active_ctas(gemm) * ctas_per_sm
    split_waves = num_ctas // active_ctas + 1 / config.last_wave_parts(gemm)
    # In narrower tiles, fewer CTAs copy fewer rows of weights, and as many of pixels.
    narrow_n = config.block_n // config.narrow_parts(gemm)
    copied = (config.block_m + narrow_n) / (config.block_m + config.block_n)
    narrow_waves = num_ctas // active_ctas + NARROW_WAVE_TIME * copied
    waves = np.where(config.narrows_last_wave, narrow_waves, ceil_div(num_ctas, active_ctas))
    return np.where(config.splits_last_wave, split_waves, waves)


def _last_wave_us(config: HopperTileConfig, gemm: ImplicitGemmShape) -> Any:
    """Return the time of the partial sums of a split last wave, which are written and read, and of their kernel."""
    num_parts = config.num_tiles(gemm) % config.max_active_ctas * config.last_wave_parts(gemm)
    workspace_bytes = 2 * num_parts * config.block_m * config.block_n * ACCUMULATOR_BYTES
    launch_us = WORKSPACE_LAUNCH_US + workspace_bytes / WORKSPACE_BYTES_PER_US
    return np.where(config.splits_last_wave, launch_us, 0.0)


def _stats_us(config: HopperTileConfig, gemm: ImplicitGemmShape) -> Any:
    """Return the time of the statistics of blocks of rows, which are written and read, and of their kernel."""
    num_blocks = ceil_div(gemm.m, config.wgmma_m_tiles * WGMMA_M)
    workspace_bytes = 2 * num_blocks * 2 * gemm.groups * gemm.n * ACCUMULATOR_BYTES
    return WORKSPACE_LAUNCH_US + workspace_bytes / WORKSPACE_BYTES_PER_US


def _pingpong_latency_us(waves: Any, mainloop_us: Any, other_us: Any, warpgroups: Any) -> Any:
    """Return the latency of a CTA whose warpgroups compute tiles in turn.

    The mainloops follow one another. A warpgroup stores and starts a tile during the mainloops of the others, which
    takes `other_us`. The last tile is stored alone.
    """
    return waves * combine_overlapping_times(mainloop_us, other_us / np.maximum(warpgroups - 1, 1)) + other_us


def select_kernel_schedule(w: Conv, *, b_is_mn_major: bool = False) -> str:
    """Return the kernel schedule of the default config, for outputs that may be computed by either.

    Estimates are compared without the bound by memory, which makes all estimates alike.
    """
    gemm, max_ratio = ImplicitGemmShape.from_workload(w), H200_FIT.hopper.max_pingpong_ratio
    cooperative, pingpong = (
        select_default_config(w, name, b_is_mn_major=b_is_mn_major) for name in (COOPERATIVE, PINGPONG)
    )
    cooperative_us, pingpong_us = (_estimate_unbounded_us(config, w, gemm) for config in (cooperative, pingpong))
    return pingpong.kernel_schedule if pingpong_us <= max_ratio * cooperative_us else COOPERATIVE


def select_default_config(
    w: Conv, kernel_schedule: str = COOPERATIVE, *, b_is_mn_major: bool = False
) -> HopperTileConfig:
    """Return the config of a kernel schedule with the best estimate, or a cooperative one if none is legal.

    Args:
        w: The convolution, as TMA views it.
        kernel_schedule: The kernel schedule.
        b_is_mn_major: Whether the filters are an MN-major operand, as in a dgrad.
    """
    config, _ = _select_best(w, kernel_schedule, b_is_mn_major)
    return config or select_default_config(w, b_is_mn_major=b_is_mn_major)


def min_latency_us(w: Conv) -> float:
    """Return the best latency estimate of cooperative configs in microseconds."""
    return _select_best(w, COOPERATIVE, False)[1]


@functools.lru_cache(maxsize=256)
def _select_best(w: Conv, kernel_schedule: str, b_is_mn_major: bool) -> tuple[HopperTileConfig | None, float]:
    """Return the legal config with the best estimate, if there is one, and the estimate in microseconds."""
    options = KNOB_OPTIONS | {"taps_per_copy": list_taps_per_copy_of_whole_lines(w)} | list_promotion_options(w)
    rules = [*isa_constraints(w), *resource_constraints(w)]
    rules += limit_accumulation_error(w, lambda t: t.promoted_products(1))
    if b_is_mn_major:
        rules.append(require_whole_slices(w.storage))
    if kernel_schedule == PINGPONG:
        gemm = ImplicitGemmShape.from_workload(w)
        rules.append(("some CTA computes several tiles", lambda t: t.computes_several_tiles(gemm)))
    estimate = functools.partial(estimate_latency_us, w=w)
    fixed = {**describe_lines(w), "kernel_schedule": kernel_schedule}
    return select_best(options, rules, estimate, prefers_wide_boxes=b_is_mn_major, **fixed)
