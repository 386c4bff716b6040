"""Constraints on the tile configs of `hopper`: limits of the instructions, and resources of a CTA."""

from __future__ import annotations

from typing import Any

import numpy as np

from tvmconv.arithmetic import ceil_div
from tvmconv.target import MAX_REGISTERS_PER_THREAD, REGISTERS_PER_MULTIPROCESSOR, WARP_SIZE
from tvmconv.workloads import Conv

from ...tile_config import Rule
from ..implicit_gemm_shape import ImplicitGemmShape
from .tile_config import MAX_SWIZZLE_BYTES, HopperTileConfig

MAX_ACCUMULATORS = 128  # per thread
SM_PARTITIONS = 4  # partitions of an SM, each with a part of the registers, over which a CTA's warps are distributed
MAX_SHARED_BYTES = 227 << 10  # per CTA


def isa_constraints(w: Conv) -> list[Rule]:
    """Return the constraints that the instructions impose."""
    gemm = ImplicitGemmShape.from_workload(w)
    return [
        (f"at most {MAX_ACCUMULATORS} accumulators per thread", lambda t: t.num_accumulators <= MAX_ACCUMULATORS),
        (
            "the channels of a group fill whole k-tiles",
            lambda t: (gemm.groups == 1) | (gemm.channels_per_group % t.block_k(gemm.itemsize) == 0),
        ),
        ("a split reduction shares no operands", lambda t: (t.split_k == 1) | (t.multicast_size == 1)),
        ("clusters share operands only if TMA stores", lambda t: (t.multicast_size == 1) | ~t.uses_smem_reduction(w)),
        (
            "taps share a copy only if one CTA loads it and its rows fit one swizzle atom",
            lambda t: (t.taps_per_copy == 1) | ((t.cluster_n == 1) & (t.block_k_bytes <= MAX_SWIZZLE_BYTES)),
        ),
        ("the slices of a shared operand are whole swizzle atoms", lambda t: t.block_n // t.cluster_m % 8 == 0),
        (
            "each block of a split reduction has a k-tile",
            lambda t: t.k_tiles_per_cta(gemm) * (t.split_k - 1) < t.total_k_tiles(gemm),
        ),
    ]


def resource_constraints(w: Conv) -> list[Rule]:
    """Return the constraints that registers and shared memory impose."""

    def has_enough_registers(config: HopperTileConfig) -> Any:
        warps_per_partition = ceil_div(config.threads_with_residual_warp(w), SM_PARTITIONS * WARP_SIZE)
        return config.estimate_registers() <= np.minimum(
            MAX_REGISTERS_PER_THREAD,
            REGISTERS_PER_MULTIPROCESSOR // (SM_PARTITIONS * WARP_SIZE) // warps_per_partition // 8 * 8,
        )

    return [
        ("the registers of all threads fit", has_enough_registers),
        (f"at most {MAX_SHARED_BYTES} bytes of shared memory", lambda t: t.dynamic_smem_bytes(w) <= MAX_SHARED_BYTES),
    ]
