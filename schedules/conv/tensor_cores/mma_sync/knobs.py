"""Knobs of `mma_sync`: choices, constraints, search pruning and resource usage."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from tvmconv.space import Columns, Knobs
from tvmconv.space.search_space import ResourceUsage
from tvmconv.target import MAX_THREADS_PER_BLOCK
from tvmconv.workloads import Conv, epilogue
from tvmconv.workloads.text import MAX_INT32_ELEMENTS

from ...tile_config import Rule, add_rules, declare_choices
from ..implicit_gemm_shape import VECTOR_BYTES, ImplicitGemmShape
from ..promotion import KNOB, has_float8_sums, has_integer_output, limit_accumulation_error, list_intervals
from .epilogue_split import compute_smem_bytes
from .input_loader import (
    CONVERTED,
    HALO,
    INPUT_LOADER,
    HaloTileConfig,
    estimate_by_loader_us,
    list_loader_constraints,
    rank_loader_defaults,
)
from .latency import estimate_latency_us, min_latency_us, select_default_config
from .tile_config import (
    BLOCK_K_BYTES_CHOICES,
    MAX_ACCUMULATORS,
    MMA_K_BYTES,
    STAGES_CHOICES,
    MmaSyncTileConfig,
    list_options,
)

# Maximum estimated latency of a searched config relative to the best estimate. The fastest configs of the 40 searches
# that it was fitted to were within a factor of 1.5.
MAX_LATENCY_RATIO = 2.0
MIN_PERSISTENT_BLOCKS = 100  # minimum number of blocks that compute several tiles each
MAX_SPLIT_K_TILES = 140  # about the SMs of a large GPU; with more tiles, a split reduction gains nothing


def compute_usage(w: Conv, columns: Columns, *, stores_channels_first: bool = False) -> ResourceUsage:
    """Return the resources that configs use."""
    fixed = {"stores_channels_first": stores_channels_first}

    def compute(config: MmaSyncTileConfig) -> ResourceUsage:
        cluster = np.where(config.uses_cluster_reduction, config.split_k, 1)
        usage = compute_product_usage(config, config.get_shape(w), compute_smem_bytes(w, config), cluster)
        if INPUT_LOADER in columns:
            usage.estimate = estimate_by_loader_us(config, w)
        return usage

    usage = compute(MmaSyncTileConfig.from_columns(columns, **fixed))
    if np.any(has_halo := np.equal(columns.get(INPUT_LOADER, CONVERTED), HALO)):
        halo = compute(HaloTileConfig.from_columns(columns, w=w, **fixed)).to_columns()
        selected = {name: np.where(has_halo, halo[name], column) for name, column in usage.to_columns().items()}
        usage = ResourceUsage(**selected, estimate_seconds_per_unit=usage.estimate_seconds_per_unit)
    return usage


def compute_product_usage(
    config: MmaSyncTileConfig, gemm: ImplicitGemmShape, smem_bytes: Any, cluster: Any = None
) -> ResourceUsage:
    """Return the resources that configs use for a product; `cluster` has the blocks per cluster, if there are any."""
    k_tiles, num_tiles, num_blocks = config.k_tiles_per_block(gemm), config.num_tiles(gemm), config.num_blocks(gemm)
    macs_per_k_tile = config.block_m * config.block_n * config.block_k
    return ResourceUsage(
        threads=config.num_threads,
        shared_bytes=0 * smem_bytes,
        dynamic_shared_bytes=smem_bytes,
        cluster=cluster,
        accumulators=config.num_accumulators,
        blocks=num_blocks,
        steps=k_tiles,
        registers=config.estimate_registers(gemm.itemsize, gemm.spatial_ndim),
        products=macs_per_k_tile * k_tiles,
        intensity=config.block_m * config.block_n / (config.block_m + config.block_n),
        traffic=num_tiles * config.split_k * k_tiles * config.stage_bytes(gemm),
        padding_ratio=num_tiles * config.block_m * config.block_n / (gemm.num_products * gemm.m * gemm.n),
        in_flight_bytes=(config.stages - 1) * config.stage_bytes(gemm),
        estimate=estimate_latency_us(config, gemm),
        estimate_seconds_per_unit=1e-6,
        all_threads=num_blocks * config.num_threads,
    )


def declare_knobs(
    w: Conv, k: Knobs, *, stores_channels_first: bool = False, loaders: tuple[str, ...] = ()
) -> MmaSyncTileConfig:
    """Declare the knobs, with defaults that suit the workload, and return their values.

    Args:
        w: The convolution, channels last.
        k: The knobs.
        stores_channels_first: Whether the kernel stores its output channels first.
        loaders: Values of the knob that chooses how a channels-first X is loaded; none if there is no choice.
    """
    gemm = ImplicitGemmShape.from_workload(w)
    returns_stats = epilogue.STATS in w.epilogue
    has_whole_sums = returns_stats or has_integer_output(w)
    if loaders:
        best_us, default = rank_loader_defaults(w, loaders)[0]
    else:
        default = select_default_config(
            w, splits_reduction=not has_whole_sums, stores_channels_first=stores_channels_first
        )
    values = declare_choices(k, list_options(gemm.itemsize), default)
    if _can_start_with_residual(w):
        values["residual_add"] = k.choice("residual_add", ("epilogue", "accumulator_init"), "epilogue")
    required = list_requirements(gemm)
    if returns_stats:
        required.append(("a block that returns statistics of its output has whole sums", lambda t: t.split_k == 1))
    if has_integer_output(w):
        rule = "integers are stored by blocks and warps with whole sums"
        required.append((rule, lambda t: (t.split_k == 1) & (t.warps_k == 1)))
    # The best estimate of all configs may be that of a split reduction, which has no whole sums.
    prunings = list_prunings(
        gemm, best_latency_us=float(estimate_latency_us(default, gemm)) if has_whole_sums else None
    )
    if has_float8_sums(w):
        intervals = list_intervals(w)
        values[KNOB] = k.choice(KNOB, intervals, intervals[0])
        prunings += limit_accumulation_error(w, lambda t: t.promoted_products)
    if loaders:
        loader = k.choice(INPUT_LOADER, loaders, default.input_loader, missing=loaders[0])
        return _limit_by_loader(w, k, values | {INPUT_LOADER: loader}, best_us)
    add_rules(k, MmaSyncTileConfig.from_columns, required, prunings)
    return MmaSyncTileConfig(**values, stores_channels_first=stores_channels_first)


def _limit_by_loader(w: Conv, k: Knobs, values: dict[str, Any], best_us: float) -> MmaSyncTileConfig:
    """Add the conditions on configs whose channels-first X is loaded in one of several ways; return the config."""
    fixed: dict[str, Any] = {"stores_channels_first": True}
    make_halo_config = functools.partial(HaloTileConfig, w=w, **fixed)
    gemm = ImplicitGemmShape.from_workload(w)
    halo_gemm = make_halo_config(**values).get_shape(w)._replace(k=gemm.channels_per_group)
    kinds = (
        (False, gemm, lambda columns: MmaSyncTileConfig.from_columns(columns, **fixed)),
        (True, halo_gemm, lambda columns: HaloTileConfig.from_columns(columns, w=w, **fixed)),
    )
    for has_halo, shape, make_config in kinds:
        required = [*list_requirements(shape), *list_loader_constraints()]
        prunings = list_prunings(shape, lambda t: estimate_by_loader_us(t, w), best_us)
        add_rules(k, make_config, *(_limit(rules, has_halo) for rules in (required, prunings)))
    return make_halo_config(**values) if values[INPUT_LOADER] == HALO else MmaSyncTileConfig(**values, **fixed)


def _limit(rules: Iterable[Rule], has_halo: bool) -> list[Rule]:
    """Return the conditions that rules are met by configs with halo rows, or by those without."""

    def limit(predicate: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda t: (np.equal(t.input_loader, HALO) != has_halo) | predicate(t)

    return [(description, limit(predicate)) for description, predicate in rules]


def require_even_steps(gemm: ImplicitGemmShape) -> Rule:
    """Return the condition that fragments alternate between two register sets in the same way in each k-tile."""
    return (
        "a warp issues an even number of mma steps per k-tile",
        lambda t: t.block_k * gemm.itemsize % (2 * MMA_K_BYTES * t.warps_k) == 0,
    )


def list_tile_prunings(gemm: ImplicitGemmShape) -> list[Rule]:
    """Return the conditions under which a tile suits the product and the registers of its threads."""
    return [
        (
            "tiles are less than twice as large as the product",
            lambda t: (t.block_m < 2 * max(gemm.m, 16)) & (t.block_n < 2 * max(gemm.n, 16)),
        ),
        (f"at most {MAX_ACCUMULATORS} accumulators per thread", lambda t: t.num_accumulators <= MAX_ACCUMULATORS),
        ("the registers of all threads fit", lambda t: t.fits_registers(gemm.itemsize, gemm.spatial_ndim)),
    ]


def list_requirements(gemm: ImplicitGemmShape) -> list[Rule]:
    """Return the conditions that every config meets."""
    return [
        ("a warp computes whole mma tiles of 16 pixels and 16 channels", lambda t: t.is_warp_tile_exact),
        require_even_steps(gemm),
        (
            "the threads copy at least 8 rows at a time",
            lambda t: t.num_threads * VECTOR_BYTES >= 8 * t.block_k * gemm.itemsize,
        ),
        (f"at most {MAX_THREADS_PER_BLOCK} threads", lambda t: t.num_threads <= MAX_THREADS_PER_BLOCK),
        ("each block of a split reduction has a k-tile", lambda t: t.has_k_tile_in_each_part(gemm)),
        (
            "the blocks of a cluster reduction share the pixels of a tile evenly",
            lambda t: t.block_m % t.split_k == 0,
        ),
        (
            f"partial sums in a workspace have at most {MAX_INT32_ELEMENTS} elements",
            lambda t: (
                np.logical_not(t.uses_workspace_reduction)
                | (t.split_k * gemm.num_products * gemm.m * gemm.n <= MAX_INT32_ELEMENTS)
            ),
        ),
        (
            "blocks that compute several tiles do not split the reduction over blocks or warps",
            lambda t: (t.tiles_per_block == 1) | ((t.split_k == 1) & (t.warps_k == 1)),
        ),
        (
            "a tile of a block that computes several has enough k-tiles to fill the pipeline",
            lambda t: (t.tiles_per_block == 1) | (t.stages - 1 <= t.total_k_tiles(gemm)),
        ),
    ]


def list_prunings(
    gemm: ImplicitGemmShape,
    estimate: Callable[[MmaSyncTileConfig], Any] | None = None,
    best_latency_us: float | None = None,
) -> list[Rule]:
    """Return the conditions under which a config is worth searching.

    Args:
        gemm: The product.
        estimate: Function that returns the latencies of configs in microseconds; None for that of the product.
        best_latency_us: Best estimate of all configs; None for that of the product.
    """
    estimate = estimate or functools.partial(estimate_latency_us, gemm=gemm)
    best_us = min_latency_us(gemm) if best_latency_us is None else best_latency_us
    return [
        (
            f"blocks compute several tiles only if at least {MIN_PERSISTENT_BLOCKS} blocks remain",
            lambda t: (t.tiles_per_block == 1) | (t.num_blocks(gemm) >= MIN_PERSISTENT_BLOCKS),
        ),
        *list_tile_prunings(gemm),
        (
            "k-tiles are less than twice as long as the reduction",
            lambda t: t.block_k < 2 * max(gemm.k, BLOCK_K_BYTES_CHOICES[0] // gemm.itemsize),
        ),
        (
            "there are at most as many stages as k-tiles",
            lambda t: (t.stages <= t.k_tiles_per_block(gemm) + 1) | (t.stages == STAGES_CHOICES[0]),
        ),
        (
            "a reduction is split only if tiles are few",
            lambda t: (t.split_k == 1) | (t.num_tiles(gemm) <= MAX_SPLIT_K_TILES),
        ),
        (
            f"the estimated latency is at most {MAX_LATENCY_RATIO} times the best estimate",
            lambda t: estimate(t) <= MAX_LATENCY_RATIO * best_us,
        ),
        ("one of several equal configs", lambda t: (t.split_k > 1) | (t.split_k_reduction == "workspace")),
    ]


def _can_start_with_residual(w: Conv) -> bool:
    """Return whether the epilogue begins with additions that include a residual."""
    additive_ops = itertools.takewhile(lambda op: op.is_addition, epilogue.get_ops(w.epilogue))
    return any(op.argument_kind == "output" for op in additive_ops)
