"""The tiles of `mma_sync` from knobs: what choices have to fulfil, what is worth searching, and what they use."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from tvmconv.gpu_specs import MAX_REGISTERS_PER_THREAD, MAX_THREADS_PER_BLOCK, REGISTERS_PER_MULTIPROCESSOR
from tvmconv.space import Columns, Knobs
from tvmconv.space.search_space import ResourceUsage
from tvmconv.workloads import Conv, epilogue

from ..implicit_gemm_shape import VECTOR_BYTES, ImplicitGemmShape
from .epilogue_split import compute_staged_itemsize, count_channel_args
from .latency import estimate_latency_us, min_latency_us, select_default_config
from .tile_config import (
    BLOCK_K_BYTES_CHOICES,
    BLOCK_M_CHOICES,
    BLOCK_N_CHOICES,
    MAX_ACCUMULATORS,
    MMA_K_BYTES,
    SLICED_K_WARPS,
    SPLIT_K_CHOICES,
    STAGES_CHOICES,
    TILES_PER_BLOCK,
    WARPS_CHOICES,
    MmaSyncTileConfig,
)

MAX_LATENCY_RATIO = (
    2.0  # times the best estimate: of the 40 searches that it was fitted to, the best was within 1.5 times
)
MIN_PERSISTENT_BLOCKS = 100  # at least, of blocks that compute several tiles
MAX_SPLIT_K_TILES = 140  # about as many as large GPUs have multiprocessors: with more, a split reduction gains nothing


def compute_usage(w: Conv, columns: Columns) -> ResourceUsage:
    """What configs use of a device."""
    gemm, config = ImplicitGemmShape.from_workload(w), MmaSyncTileConfig.from_columns(columns)
    k_tiles, num_tiles = config.k_tiles_per_block(gemm), config.num_tiles(gemm)
    macs_per_k_tile = config.block_m * config.block_n * config.block_k
    num_blocks = config.num_blocks(gemm)
    smem_bytes = config.dynamic_smem_bytes(gemm, compute_staged_itemsize(w, config), count_channel_args(w, config))
    return ResourceUsage(
        threads=config.num_threads,
        shared_bytes=0 * smem_bytes,
        dynamic_shared_bytes=smem_bytes,
        cluster=np.where(config.uses_cluster_reduction, config.split_k, 1),
        accumulators=config.num_accumulators,
        blocks=num_blocks,
        steps=k_tiles,
        registers=config.estimate_registers(gemm.itemsize, gemm.spatial_ndim),
        products=macs_per_k_tile * k_tiles,
        intensity=config.block_m * config.block_n / (config.block_m + config.block_n),
        traffic=num_tiles * config.split_k * k_tiles * config.stage_bytes(gemm),
        waste=num_tiles * config.block_m * config.block_n / (gemm.groups * gemm.m * gemm.n),
        in_flight=(config.stages - 1) * config.stage_bytes(gemm),
        estimate=estimate_latency_us(config, gemm),
        estimate_seconds_per_unit=1e-6,
        all_threads=num_blocks * config.num_threads,
    )


def declare_knobs(w: Conv, k: Knobs) -> MmaSyncTileConfig:
    """The tiles from knobs; the defaults suit the workload."""
    gemm, default = ImplicitGemmShape.from_workload(w), select_default_config(w)
    block_k_choices = tuple(n // gemm.itemsize for n in BLOCK_K_BYTES_CHOICES)
    tiles = MmaSyncTileConfig(
        block_m=k.choice("block_m", BLOCK_M_CHOICES, default.block_m),
        block_n=k.choice("block_n", BLOCK_N_CHOICES, default.block_n),
        block_k=k.choice("block_k", block_k_choices, default.block_k),
        warps_m=k.choice("warps_m", WARPS_CHOICES, default.warps_m),
        warps_n=k.choice("warps_n", WARPS_CHOICES, default.warps_n),
        warps_k=k.choice("warps_k", SLICED_K_WARPS, default.warps_k),
        stages=k.choice("stages", STAGES_CHOICES, default.stages),
        split_k=k.choice("split_k", SPLIT_K_CHOICES, default.split_k),
        meet=k.choice("meet", ("scratch", "cluster"), default.meet),
        tiles_per_block=k.choice("tiles_per_block", TILES_PER_BLOCK, default.tiles_per_block),
        residual=k.choice("residual", ("end", "begin"), "end") if _can_start_with_residual(w) else "none",
    )
    _add_constraints(k, gemm)
    return tiles


def _add_constraints(k: Knobs, gemm: ImplicitGemmShape) -> None:
    """State what the choices have to fulfil together, and what is worth searching."""

    def require(description: str, predicate: Callable[[MmaSyncTileConfig], Any]) -> None:
        k.require(description, lambda c: predicate(MmaSyncTileConfig.from_columns(c)))

    def prune(description: str, predicate: Callable[[MmaSyncTileConfig], Any]) -> None:
        k.prune(description, lambda c: predicate(MmaSyncTileConfig.from_columns(c)))

    require("a warp has whole mmas: 16 pixels, 16 channels", lambda t: t.is_warp_tile_exact)
    require(
        "a warp has an even number of mmas in a step",
        lambda t: t.block_k * gemm.itemsize % (2 * MMA_K_BYTES * t.warps_k) == 0,
    )
    require(
        "the threads copy at least 8 rows at a time",
        lambda t: t.num_threads * VECTOR_BYTES >= 8 * t.block_k * gemm.itemsize,
    )
    require(f"at most {MAX_THREADS_PER_BLOCK} threads", lambda t: t.num_threads <= MAX_THREADS_PER_BLOCK)
    require(
        "each block of a split reduction has a step",
        lambda t: t.k_tiles_per_block(gemm) * (t.split_k - 1) < t.total_k_tiles(gemm),
    )
    require("blocks that meet in a cluster share out the pixels of their tile", lambda t: t.block_m % t.split_k == 0)
    require(
        "only whole sums are computed in turn, and by one warp each",
        lambda t: (t.tiles_per_block == 1) | ((t.split_k == 1) & (t.warps_k == 1)),
    )
    require(
        "a tile in turn has as many steps as are on their way",
        lambda t: (t.tiles_per_block == 1) | (t.stages - 1 <= t.total_k_tiles(gemm)),
    )
    prune(
        "tiles are in turn where they are many",
        lambda t: (t.tiles_per_block == 1) | (t.num_blocks(gemm) >= MIN_PERSISTENT_BLOCKS),
    )
    prune(
        "tiles are not twice the product",
        lambda t: (t.block_m < 2 * max(gemm.m, 16)) & (t.block_n < 2 * max(gemm.n, 16)),
    )
    prune(
        "steps are not twice the reduction",
        lambda t: t.block_k < 2 * max(gemm.k, BLOCK_K_BYTES_CHOICES[0] // gemm.itemsize),
    )
    prune(
        "no more stages than steps",
        lambda t: (t.stages <= t.k_tiles_per_block(gemm) + 1) | (t.stages == STAGES_CHOICES[0]),
    )
    prune("few enough accumulators", lambda t: t.num_accumulators <= MAX_ACCUMULATORS)
    prune(
        "all threads' registers fit",
        lambda t: (
            (t.estimate_registers(gemm.itemsize, gemm.spatial_ndim) <= MAX_REGISTERS_PER_THREAD)
            & (t.estimate_registers(gemm.itemsize, gemm.spatial_ndim) * t.num_threads <= REGISTERS_PER_MULTIPROCESSOR)
        ),
    )
    prune(
        "a reduction is split where blocks are few",
        lambda t: (t.split_k == 1) | (t.num_tiles(gemm) <= MAX_SPLIT_K_TILES),
    )
    best_latency_us = min_latency_us(gemm)
    prune(
        f"estimated to take at most {MAX_LATENCY_RATIO} times the best",
        lambda t: estimate_latency_us(t, gemm) <= MAX_LATENCY_RATIO * best_latency_us,
    )
    prune("one of several equal configs", lambda t: (t.split_k > 1) | (t.meet == "scratch"))


def _can_start_with_residual(w: Conv) -> bool:
    """Whether a tensor like the output is among the operations that add and come first in the epilogue."""
    additive_ops = itertools.takewhile(lambda op: op.is_addition, epilogue.get_ops(w.epilogue))
    return any(op.argument_kind == "output" for op in additive_ops)
