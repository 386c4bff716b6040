"""Constraints on the tile configs of `hopper`: limits of the instructions, and resources of a CTA."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tvmconv.arithmetic import ceil_div
from tvmconv.target import MAX_REGISTERS_PER_THREAD, REGISTERS_PER_MULTIPROCESSOR, WARP_SIZE
from tvmconv.tensor_map import MAX_BOX_ELEMENTS
from tvmconv.workloads import Conv
from tvmconv.workloads.dtypes import INT8, get_itemsize

from ...tile_config import Rule
from ..implicit_gemm_shape import ImplicitGemmShape
from ..promotion import has_eight_bits, has_float8_sums, has_integer_output
from .tile_config import (
    COOPERATIVE,
    MAX_EPILOGUE_ROW_BYTES,
    MAX_SWIZZLE_BYTES,
    MIN_SLICED_STAGES,
    MIN_SWIZZLE_BYTES,
    OVERHEAD_REGISTERS,
    RASTER_ORDERS,
    REALLOCATED_REGISTERS,
    SWIZZLE_ROWS,
    WGMMA_M_TILES_CHOICES,
    HopperTileConfig,
)
from .tma_requirements import can_pad_lines, can_store_rows_by_tma, find_residual, has_large_output, returns_stats

MAX_ACCUMULATORS, MAX_REALLOCATED_ACCUMULATORS = 128, 192  # per thread, without and with `setmaxnreg`
MAX_PARTIAL_SUMS = 144  # registers with which kernels do not spill that promote two sets within a k-tile
SM_PARTITIONS = 4  # partitions of an SM, each with a part of the registers, over which a CTA's warps are distributed
RESIDUAL_REGISTERS = 24  # registers per thread of a residual, besides `OVERHEAD_REGISTERS`
VECTOR_REGISTERS = 24  # registers per thread of vectors and pixels where warps store the output in place of TMA
MAX_SHARED_BYTES = 227 << 10  # per CTA
MIN_BOX_COLUMNS = 32  # 16-bit columns of a box that a search tries


def isa_constraints(w: Conv) -> list[Rule]:
    """Return the constraints that the instructions impose."""
    gemm = ImplicitGemmShape.from_workload(w)
    # Three warpgroups skip the K tiles of two tiles each, of which each has as many.
    turns = [2, 3] if has_eight_bits(w) and gemm.residues * gemm.frames == 1 else [2]
    warpgroups_in_turn = " or ".join(("one", "two", "three")[number - 1] for number in turns) + " warpgroups"
    whole_sums: list[Rule] = [
        (
            "a CTA has whole sums, and TMA stores them, if the output is large or the kernel returns its statistics",
            lambda t: np.logical_not(t.uses_smem_reduction(w) | t.splits_last_wave),
        )
    ]
    whole_tiles: list[Rule] = [
        (
            "CTAs do not divide the channels of tiles if there are statistics, a residual, or operands of 8 bits",
            lambda t: np.logical_not(t.narrows_last_wave),
        )
    ]
    padded_lines: list[Rule] = [
        (
            "a CTA has whole sums, and TMA stores them, if output rows are padded",
            lambda t: ~(t.pads_lines & (t.uses_smem_reduction(w) | t.divides_last_wave)),
        )
    ]
    return [
        # First, as one warpgroup with two slices has tiles of no rows, whose number the next rules would divide by.
        (
            f"two warpgroups divide k-tiles, of which {MIN_SLICED_STAGES} are in shared memory",
            lambda t: (
                np.equal(t.k_slices, 1)
                | (
                    (t.warpgroups == 2)
                    & (t.kernel_schedule == COOPERATIVE)
                    & (t.stages >= MIN_SLICED_STAGES)
                    & (t.k_tiles_per_cta(gemm) >= MIN_SLICED_STAGES)
                )
            ),
        ),
        *(whole_sums if returns_stats(w) or has_large_output(w) else []),
        *(whole_tiles if returns_stats(w) or find_residual(w) or has_eight_bits(w) else []),
        *list_eight_bit_rules(w),
        *(padded_lines if can_pad_lines(w) else []),
        (
            f"at most {MAX_ACCUMULATORS} accumulators per thread, or {MAX_REALLOCATED_ACCUMULATORS} with setmaxnreg",
            lambda t: t.num_sums <= np.where(t.reallocates_registers, MAX_REALLOCATED_ACCUMULATORS, MAX_ACCUMULATORS),
        ),
        (
            "registers are reallocated between a producer and two or three consumers whose output TMA stores",
            lambda t: (
                np.logical_not(t.reallocates_registers)
                | (np.isin(t.warpgroups, list(REALLOCATED_REGISTERS)) & ~t.uses_smem_reduction(w))
            ),
        ),
        (
            f"more than {max(WGMMA_M_TILES_CHOICES)} wgmmas along the pixels only with setmaxnreg",
            lambda t: (t.wgmma_m_tiles <= max(WGMMA_M_TILES_CHOICES)) | t.reallocates_registers,
        ),
        (
            f"{warpgroups_in_turn} without a cluster take turns in ping-pong",
            lambda t: np.logical_not(t.is_pingpong) | (np.isin(t.warpgroups, turns) & (t.cluster_size == 1)),
        ),
        (
            "the last wave is split if TMA stores, CTAs form no clusters, and several have time for each of its tiles",
            lambda t: (
                np.logical_not(t.splits_last_wave)
                | (
                    (t.cluster_size == 1)
                    & (gemm.frames == 1)
                    & ~t.uses_smem_reduction(w)
                    & t.computes_several_tiles(gemm)
                    & (t.last_wave_parts(gemm) > 1)
                )
            ),
        ),
        (
            "the last wave has narrow tiles if TMA stores, CTAs form no clusters, and several have time for each tile",
            lambda t: (
                np.logical_not(t.narrows_last_wave)
                | (
                    (t.cluster_size == 1)
                    & (gemm.frames == 1)
                    & ~t.uses_smem_reduction(w)
                    & t.computes_several_tiles(gemm)
                    & (t.narrow_parts(gemm) > 1)
                )
            ),
        ),
        (
            "the channels of a group fill whole k-tiles",
            lambda t: (gemm.groups == 1) | (gemm.channels_per_group % t.block_k(gemm.itemsize) == 0),
        ),
        (
            "a CTA keeps filters if all of its tiles have the same channels, and TMA loads and stores them",
            lambda t: (
                np.logical_not(t.keeps_filters)
                | (
                    (gemm.num_products == 1)
                    & (t.cluster_size == 1)
                    & np.equal(t.k_slices, 1)
                    & np.equal(t.raster_order, RASTER_ORDERS[0])
                    & ~t.divides_last_wave
                    & ~t.uses_smem_reduction(w)
                    & (t.num_tiles_n(gemm) <= t.max_active_ctas)
                )
            ),
        ),
        (
            "TMA stores wide boxes where swizzled ones are narrow, of outputs without a residual or statistics",
            lambda t: np.logical_not(t.stores_wide_boxes) | can_store_wide_boxes(t, w),
        ),
        ("a split reduction shares no operands", lambda t: (t.split_k == 1) | (t.multicast_size == 1)),
        (
            "clusters share operands only if TMA stores, or if warpgroups divide the k-tiles",
            lambda t: (t.multicast_size == 1) | ~t.uses_smem_reduction(w) | np.greater(t.k_slices, 1),
        ),
        (
            "taps share a copy only if one CTA loads it and its rows fit one swizzle atom",
            lambda t: (
                (t.taps_per_copy == 1)
                | (
                    (np.where(t.has_filter_rows, t.cluster_m, t.cluster_n) == 1)
                    & (t.block_k_bytes <= MAX_SWIZZLE_BYTES)
                )
            ),
        ),
        ("the slices of a shared operand are whole swizzle atoms", lambda t: t.block_n // t.cluster_m % 8 == 0),
        (
            "each block of a split reduction has a k-tile",
            lambda t: t.k_tiles_per_cta(gemm) * (t.split_k - 1) < t.total_k_tiles(gemm),
        ),
    ]


def can_store_wide_boxes(t: HopperTileConfig, w: Conv) -> Any:
    """Return whether a box without a swizzle is wider than a swizzled one, and TMA stores it."""
    itemsize = get_itemsize(w.argument_dtypes[-1])
    row_bytes = t.block_n * itemsize
    lowest_bit = row_bytes & -row_bytes
    width = row_bytes // lowest_bit * MIN_SWIZZLE_BYTES
    return (
        (lowest_bit >= MIN_SWIZZLE_BYTES)
        & (width > np.gcd(row_bytes, MAX_EPILOGUE_ROW_BYTES))
        & (width <= MAX_BOX_ELEMENTS * itemsize)
        & np.logical_not(t.uses_smem_reduction(w) | t.divides_last_wave | t.has_filter_rows)
        & (not find_residual(w) and not returns_stats(w))
    )


def list_eight_bit_rules(w: Conv) -> list[Rule]:
    """Return the constraints on operands and outputs of 8 bits, and on integer outputs; none for other workloads."""
    if not has_eight_bits(w):
        return []
    output_itemsize = get_itemsize(w.argument_dtypes[-1])
    rules: list[Rule] = [
        (
            f"TMA stores rows of at least {MIN_SWIZZLE_BYTES} bytes",
            lambda t: t.uses_smem_reduction(w) | (t.epilogue_row_bytes(output_itemsize) >= MIN_SWIZZLE_BYTES),
        )
    ]
    if w.dtype == INT8.name:
        rules.append(("wgmma of integers has N of a multiple of 16", lambda t: t.block_n % 16 == 0))
    if has_float8_sums(w):
        rules.append(
            (
                "two sets of accumulators take turns if sums are promoted in every k-tile",
                lambda t: np.equal(t.promotion_buffers, 1) | np.equal(t.promotion_k_tiles(1), 1),
            )
        )
        rules.append(
            (
                "warpgroups promote in turn if several share a tile and most of its k-tiles, with one set each",
                lambda t: (
                    np.logical_not(t.alternates_promotions)
                    | (
                        (t.warpgroups_per_tile > 1)
                        & (t.split_k == 1)
                        & np.equal(t.promotion_buffers, 1)
                        & np.greater(t.promotion_interval, 0)
                    )
                ),
            )
        )
        rules.append(
            (
                "warpgroups that promote in turn have stages for an interval, and another one",
                lambda t: np.logical_not(t.alternates_promotions) | (t.stages > t.max_k_tiles_per_interval(1)),
            )
        )
        rules.append(
            (
                f"two sets of accumulators have at most {MAX_PARTIAL_SUMS} sums if a k-tile has several promotions",
                lambda t: (
                    np.equal(t.promotion_buffers, 1)
                    | np.equal(t.promotions_per_k_tile(1), 1)
                    | (t.num_sums <= MAX_PARTIAL_SUMS)
                ),
            )
        )
    if has_integer_output(w):
        rules.append(
            (
                "integers are stored by CTAs with whole sums",
                lambda t: (t.split_k == 1) & ~np.asarray(t.splits_last_wave),
            )
        )
    return rules


def require_whole_slices(storage: str, *, a_is_mn_major: bool = False) -> Rule:
    """Return the constraint on the channels that the CTAs of a cluster load of an MN-major operand B, or of both."""
    itemsize = get_itemsize(storage)
    return (
        "the slices of shared MN-major operands are whole swizzle atoms",
        lambda t: (
            t.block_k(itemsize)
            >= SWIZZLE_ROWS * (np.maximum(t.cluster_m, t.cluster_n) if a_is_mn_major else t.cluster_m)
        ),
    )


def prune_narrow_boxes(num_columns: int) -> Rule:
    """Return the condition on a search that boxes of an MN-major operand B have 64 bytes, if its columns permit it.

    Boxes of 32 bytes made wgrads on an H200 take 1.4 times their estimate, and up to three times.
    """
    min_columns = math.gcd(num_columns, MIN_BOX_COLUMNS)
    return (
        f"boxes of an MN-major operand have at least {MIN_BOX_COLUMNS} columns",
        lambda t: np.gcd(t.block_n, MIN_BOX_COLUMNS) >= min_columns,
    )


def resource_constraints(w: Conv) -> list[Rule]:
    """Return the constraints that registers and shared memory impose."""

    def has_enough_registers(config: HopperTileConfig) -> Any:
        residual_registers = RESIDUAL_REGISTERS if find_residual(w) else 0
        vector_registers = 0 if can_store_rows_by_tma(w) else VECTOR_REGISTERS
        vector_registers = vector_registers + (config.count_stats_registers(w) if returns_stats(w) else 0)
        max_registers = np.where(
            config.reallocates_registers,
            count_consumer_registers(config) - residual_registers - vector_registers,
            count_equal_registers(config, w) - (config.count_stats_registers(w) if returns_stats(w) else 0),
        )
        return config.estimate_registers() <= max_registers

    return [
        ("the registers of all threads fit", has_enough_registers),
        (
            "the registers of one wgmma fit those at the launch, which ptxas requires also where they are reallocated",
            lambda t: (
                np.logical_not(t.reallocates_registers)
                | (t.block_n // 2 + OVERHEAD_REGISTERS <= count_equal_registers(t, w))
            ),
        ),
        (f"at most {MAX_SHARED_BYTES} bytes of shared memory", lambda t: t.dynamic_smem_bytes(w) <= MAX_SHARED_BYTES),
    ]


def count_equal_registers(config: HopperTileConfig, w: Conv) -> Any:
    """Return the maximum number of registers per thread if all threads have the same number."""
    return limit_registers_per_thread(config.threads_with_residual_warp(w))


def limit_registers_per_thread(num_threads: Any) -> Any:
    """Return the maximum number of registers per thread of a CTA, whose warps the partitions of an SM take in turn."""
    warps_per_partition = ceil_div(num_threads, SM_PARTITIONS * WARP_SIZE)
    return np.minimum(
        MAX_REGISTERS_PER_THREAD,
        REGISTERS_PER_MULTIPROCESSOR // (SM_PARTITIONS * WARP_SIZE) // warps_per_partition // 8 * 8,
    )


def count_consumer_registers(config: HopperTileConfig) -> Any:
    """Return the number of registers per thread of a consumer after reallocation; 0 if there is none."""
    by_warpgroups = [REALLOCATED_REGISTERS.get(n, (0, 0))[1] for n in range(max(REALLOCATED_REGISTERS) + 1)]
    return np.take(by_warpgroups, config.warpgroups, mode="clip")
