"""Knobs of `hopper`: choices, search pruning and resource usage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tvmconv.space import Columns, Knobs
from tvmconv.space.search_space import ResourceUsage
from tvmconv.target import H200
from tvmconv.workloads import Conv
from tvmconv.workloads.layout import CHANNELS_LAST

from ...tile_config import Rule, add_rules, declare_choices
from ..implicit_gemm_shape import ImplicitGemmShape
from ..promotion import (
    BUFFERS_KNOB,
    KNOB,
    ORDER_KNOB,
    PROMOTION_BUFFERS,
    PROMOTION_ORDERS,
    SIMULTANEOUS,
    has_float8_sums,
    limit_accumulation_error,
    list_intervals,
    prune_short_alternation,
)
from .constraints import (
    MAX_ACCUMULATORS,
    count_equal_registers,
    isa_constraints,
    resource_constraints,
)
from .latency import (
    estimate_latency_us,
    min_latency_us,
    select_default_config,
    select_kernel_schedule,
)
from .tile_config import (
    BLOCK_K_BYTES_CHOICES,
    COOPERATIVE,
    COOPERATIVE_SETMAXNREG,
    DECOMPOSITIONS,
    FILTER_COPIES,
    KERNEL_SCHEDULES,
    KNOB_OPTIONS,
    NORMAL,
    NUM_MULTIPROCESSORS,
    OUTPUT_BOXES,
    OUTPUT_EVICTIONS,
    OUTPUT_STAGES_CHOICES,
    RASTER_ORDERS,
    REALLOCATED_WGMMA_M_TILES_CHOICES,
    STAGES_CHOICES,
    STREAMED,
    SWIZZLED,
    HopperTileConfig,
)
from .tma_requirements import (
    WGMMA_M,
    can_pad_lines,
    can_share_taps,
    can_store_by_tma,
    describe_lines,
    find_residual,
    list_taps_per_copy,
)

MIN_EVICTED_BYTES = H200.architecture.l2_bytes // 2  # minimum size of an output that may leave L2 before the operands
Estimate = Callable[[HopperTileConfig, Conv], Any]  # returns the latency of configs in microseconds

MIN_OUTPUTS_PER_SM = 128 * 64  # minimum number of outputs with which a CTA may compute several tiles of useful size
MIN_TILES_PER_MODE = 4  # minimum number of tiles along both modes for which their order matters
MAX_LATENCY_RATIO = 2.5  # maximum estimated latency of a searched config, relative to the best cooperative one


def compute_usage(w: Conv, columns: Columns) -> ResourceUsage:
    """Return the resources that configs use."""
    config, gemm = HopperTileConfig.of_workload(columns, w), ImplicitGemmShape.from_workload(w)
    k_tiles, num_tiles = config.k_tiles_per_cta(gemm), config.num_tiles(gemm)
    smem_bytes = config.dynamic_smem_bytes(w)
    loaded_pixels = np.where(
        config.taps_per_copy > 1, config.block_m // WGMMA_M * (WGMMA_M + config.halo_width), config.block_m
    )
    bytes_per_k_tile = (
        loaded_pixels / config.cluster_n + config.block_n * config.taps_per_copy / config.cluster_m
    ) * config.block_k_bytes
    return ResourceUsage(
        threads=config.threads_with_residual_warp(w),
        shared_bytes=0 * smem_bytes,
        dynamic_shared_bytes=smem_bytes,
        cluster=config.cluster_size,
        accumulators=config.num_accumulators,
        blocks=config.num_ctas(w),
        steps=k_tiles,
        registers=config.estimate_registers(),
        cluster_waves=num_tiles * config.split_k / config.max_active_ctas,
        products=config.block_m * config.block_n * config.block_k(gemm.itemsize) * config.taps_per_copy * k_tiles,
        intensity=config.block_m * config.block_n / (config.block_m + config.block_n),
        traffic=num_tiles * config.split_k * k_tiles * bytes_per_k_tile,
        padding_ratio=num_tiles * config.block_m * config.block_n / (gemm.num_products * gemm.m * gemm.n),
        in_flight_bytes=config.mainloop_smem_bytes(),
        estimate=estimate_latency_us(config, w),
        estimate_seconds_per_unit=1e-6,
    )


def declare_knobs(
    w: Conv,
    k: Knobs,
    default: HopperTileConfig | None = None,
    estimate: Estimate = estimate_latency_us,
    *,
    b_is_mn_major: bool = False,
    keeps_filters: bool = False,
) -> HopperTileConfig:
    """Declare the knobs, with defaults that suit the workload unless given, and return their values.

    Large outputs have three further knobs, and `wgmma_m_tiles` of 3. The defaults of the other knobs suit the kernel
    schedule. Configs without it are older, and cooperative.

    | knob | value | meaning |
    | --- | --- | --- |
    | kernel_schedule | "cooperative" | all consumer warpgroups compute one tile together |
    | | "cooperative_setmaxnreg" | so do they, and `setmaxnreg` gives them registers of the producer warpgroup |
    | | "pingpong" | warpgroups compute tiles in turn, one multiplies while others store; with `setmaxnreg` |
    | raster_order | "n" | consecutive tiles have the same pixels and neighbouring channels |
    | | "m" | consecutive tiles have the same channels and neighbouring pixels |
    | decomposition | "data_parallel" | a CTA computes whole tiles |
    | | "split_last_wave" | several CTAs divide each tile of the last wave, and a second kernel adds the parts |
    | | "narrow_last_wave" | several CTAs divide the channels of each tile of the last wave |
    | filters | "streamed" | a CTA loads filters and pixels of each work tile |
    | | "resident" | it loads the filters once, and all of its work tiles have their channels |

    `keeps_filters` says whether `filters` is a knob, and `output_boxes`, which other outputs have as well.

    8-bit floats have the knob `promotion_interval`: the number of products after which sums are promoted to float32. A
    search has only the longest one whose error is bounded; longer ones, and 0 for none, are for users who set them.
    With `promotion_buffers` of 2, a warpgroup has two sets of accumulators, and promotes one while the wgmmas of the
    other run. With `promotion_order` "alternating", the warpgroups of a tile promote at different times.
    """
    options, kernel_schedule = dict(KNOB_OPTIONS), COOPERATIVE
    has_kernel_schedules = can_compute_several_tiles(w)
    if has_kernel_schedules:
        options["wgmma_m_tiles"] = REALLOCATED_WGMMA_M_TILES_CHOICES
        preferred = default.kernel_schedule if default else select_kernel_schedule(w, b_is_mn_major=b_is_mn_major)
        kernel_schedule = k.choice("kernel_schedule", KERNEL_SCHEDULES, preferred, missing=COOPERATIVE)
    default = default or select_default_config(w, kernel_schedule, b_is_mn_major=b_is_mn_major)
    values = declare_choices(k, options, default) | {"kernel_schedule": kernel_schedule}
    taps_per_copy = 1
    if can_share_taps(w):
        missing = {"missing": 1} if can_pad_lines(w) else {}  # older configs do not pad lines
        taps_per_copy = k.choice("taps_per_copy", list_taps_per_copy(w), default.taps_per_copy, **missing)
    if has_kernel_schedules:
        values["raster_order"] = k.choice("raster_order", RASTER_ORDERS, default.raster_order)
        values["decomposition"] = k.choice("decomposition", DECOMPOSITIONS, default.decomposition)
        if keeps_filters:
            values["filters"] = k.choice("filters", FILTER_COPIES, default.filters, missing=STREAMED)
    if keeps_filters:
        values["output_boxes"] = k.choice("output_boxes", OUTPUT_BOXES, default.output_boxes, missing=SWIZZLED)
    if has_float8_sums(w):
        intervals = list_intervals(w)
        values[KNOB] = k.choice(KNOB, intervals, intervals[0])
        values[BUFFERS_KNOB] = k.choice(BUFFERS_KNOB, PROMOTION_BUFFERS, default.promotion_buffers, missing=1)
        values[ORDER_KNOB] = k.choice(ORDER_KNOB, PROMOTION_ORDERS, default.promotion_order, missing=SIMULTANEOUS)
    tiles = HopperTileConfig(**values, taps_per_copy=taps_per_copy, **describe_lines(w))
    best_us = None if estimate is estimate_latency_us else float(estimate(default, w))
    required = (*isa_constraints(w), *resource_constraints(w))
    pruned = pruning_constraints(w, estimate, best_us)
    add_rules(k, lambda columns: HopperTileConfig.of_workload(columns, w), required, pruned)
    return tiles


def require_channels_first_output(w: Conv, k: Knobs) -> None:
    """Declare the conditions on configs whose output is channels first, after the knobs."""

    def make_config(columns: Columns) -> HopperTileConfig:
        return HopperTileConfig.of_workload(columns, w)

    if find_residual(w):
        k.require(
            f"at most {MAX_ACCUMULATORS} accumulators per thread besides a residual that is channels first",
            lambda c: make_config(c).num_accumulators <= MAX_ACCUMULATORS,
        )
    k.require(
        "the last wave is split, and rows are padded, only if outputs are channels last",
        lambda c: ~np.asarray(make_config(c).divides_last_wave | make_config(c).pads_lines),
    )


def can_evict_output(w: Conv) -> bool:
    """Return whether TMA stores an output that is so large that few of its lines are in L2 when they are read."""
    gemm = ImplicitGemmShape.from_workload(w)
    output_bytes = gemm.num_products * gemm.m * gemm.n * gemm.output_itemsize
    return w.output_layout == CHANNELS_LAST and can_store_by_tma(w) and output_bytes >= MIN_EVICTED_BYTES


def declare_output_knobs(w: Conv, k: Knobs) -> dict[str, Any]:
    """Declare the knobs of stores, if the output may leave L2 first, after the others; return their values."""
    if not can_evict_output(w):
        return {}
    values = {"output_eviction": k.choice("output_eviction", OUTPUT_EVICTIONS, NORMAL, missing=NORMAL)}
    if not find_residual(w):
        fewest = OUTPUT_STAGES_CHOICES[0]
        values["output_stages"] = k.choice("output_stages", OUTPUT_STAGES_CHOICES, fewest, missing=fewest)
    return values


def can_keep_filters(w: Conv, viewed_workload: Conv) -> bool:
    """Return whether some CTAs may keep filters: the product is one, and all arrays are channels last.

    Args:
        w: The convolution.
        viewed_workload: The convolution, as TMA views it.
    """
    num_products = ImplicitGemmShape.from_workload(viewed_workload).num_products
    return w.layout == CHANNELS_LAST and num_products == 1 and can_store_by_tma(viewed_workload)


def can_compute_several_tiles(w: Conv) -> bool:
    """Return whether outputs are so many that a CTA may compute several tiles of useful size."""
    gemm = ImplicitGemmShape.from_workload(w)
    return gemm.m * gemm.n * gemm.num_products > NUM_MULTIPROCESSORS * MIN_OUTPUTS_PER_SM


def pruning_constraints(w: Conv, estimate: Estimate = estimate_latency_us, best_us: float | None = None) -> list[Rule]:
    """Return the conditions under which a config is worth searching, from estimates and the best of them."""
    gemm = ImplicitGemmShape.from_workload(w)
    best_latency_us = min_latency_us(w) if best_us is None else best_us
    min_row = max(16, BLOCK_K_BYTES_CHOICES[0] // gemm.itemsize)  # shorter rows of channels are padded
    return [
        *limit_accumulation_error(w, lambda t: t.promoted_products(1)),
        *([prune_short_alternation(lambda t: gemm.k)] if has_float8_sums(w) else []),
        (
            "tiles are less than twice as large as the product",
            lambda t: (t.block_m < 2 * max(gemm.m, 64)) & (t.block_n < 2 * max(gemm.n, 16)),
        ),
        (
            "rows are less than twice as long as the channels",
            lambda t: t.block_k(gemm.itemsize) < 2 * max(gemm.channels_per_group, min_row),
        ),
        (
            "there are at most as many stages as k-tiles, or those of some tiles if CTAs compute several",
            lambda t: (t.stages <= t.useful_stages(gemm)) | (t.stages == STAGES_CHOICES[0]) | t.keeps_filters,
        ),
        (
            "a reduction is split only if tiles are few",
            lambda t: (t.split_k == 1) | (t.num_tiles(gemm) <= NUM_MULTIPROCESSORS),
        ),
        (
            "operands are shared only if tiles are many",
            lambda t: (t.multicast_size == 1) | (2 * t.num_tiles(gemm) >= NUM_MULTIPROCESSORS),
        ),
        (
            "CTAs share the input only if channels fill several tiles",
            lambda t: (t.cluster_n == 1) | (gemm.n > t.block_n),
        ),
        (
            "warpgroups take turns only if some CTA computes several tiles",
            lambda t: np.logical_not(t.is_pingpong) | t.computes_several_tiles(gemm),
        ),
        (
            "registers are reallocated only if an equal share does not suffice",
            lambda t: (
                (t.kernel_schedule != COOPERATIVE_SETMAXNREG) | (t.estimate_registers() > count_equal_registers(t, w))
            ),
        ),
        (
            "the order of tiles changes only if CTAs compute several, and tiles along both modes are many",
            lambda t: (
                (t.raster_order == RASTER_ORDERS[0])
                | (
                    t.computes_several_tiles(gemm)
                    & (t.num_tiles_m(gemm) >= MIN_TILES_PER_MODE)
                    & (t.num_tiles_n(gemm) >= MIN_TILES_PER_MODE)
                )
            ),
        ),
        (
            f"the estimated latency is at most {MAX_LATENCY_RATIO} times the best estimate",
            lambda t: estimate(t, w) <= MAX_LATENCY_RATIO * best_latency_us,
        ),
    ]
