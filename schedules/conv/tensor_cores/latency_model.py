"""Latency of a tiled matrix product on tensor cores; schedules contribute the traffic and the work of their tiles.

CTAs run in waves, with some CTAs resident on each SM. A k-tile takes the time of its bottleneck, and whatever overlaps
with it adds less the shorter it is. A launch takes at least as long as its compulsory traffic.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tvmconv.arithmetic import ceil_div, round_up
from tvmconv.fitted_latency import GemmCoefficients
from tvmconv.target import H200, REGISTERS_PER_MULTIPROCESSOR, RESERVED_SHARED_BYTES

from .implicit_gemm_shape import ImplicitGemmShape

P_NORM_EXPONENT = 4
REGISTER_UNIT = 8  # registers per thread are multiples of it


def combine_overlapping_times(*times: Any) -> Any:
    """Return the p-norm of several times: close to the longest one, and more if others are nearly as long."""
    return sum(np.asarray(time, float) ** P_NORM_EXPONENT for time in times) ** (1 / P_NORM_EXPONENT)


def count_ctas_per_sm(num_ctas: Any, max_active_ctas: Any, smem_bytes: Any, registers: Any, num_threads: Any) -> Any:
    """Return the number of resident CTAs per SM of a H200, at most as many as a grid has for each of its SMs.

    Args:
        num_ctas: CTAs in the grid.
        max_active_ctas: Maximum number of CTAs that run at a time, one per SM.
        smem_bytes: Shared memory per CTA in bytes.
        registers: Registers per thread.
        num_threads: Threads per CTA.
    """
    limits = H200.architecture
    occupancy = np.minimum(
        (limits.shared_kib << 10) // (smem_bytes + RESERVED_SHARED_BYTES), limits.max_threads // num_threads
    )
    register_limit = REGISTERS_PER_MULTIPROCESSOR // (round_up(registers, REGISTER_UNIT) * num_threads)
    return np.clip(np.minimum(np.minimum(occupancy, register_limit), ceil_div(num_ctas, max_active_ctas)), 1, None)


def estimate_k_tile_us(
    ctas: Any, macs: Any, smem_bytes: Any, itemsize: int, coefficients: GemmCoefficients, *other_us: Any
) -> Any:
    """Return the time of one k-tile of CTAs that are resident together, in microseconds.

    Args:
        ctas: Number of CTAs.
        macs: Multiply-adds of a CTA.
        smem_bytes: Shared-memory traffic of a CTA in bytes.
        itemsize: Bytes of an operand element.
        coefficients: Fitted rates.
        other_us: Times of the schedule's other resources: copies, latency, issue.
    """
    mma_us = ctas * macs * (itemsize / 2) / coefficients.mma_per_us
    return combine_overlapping_times(mma_us, ctas * smem_bytes / coefficients.smem_bytes_per_us, *other_us)


def bound_by_memory(launch_us: Any, gemm: ImplicitGemmShape, coefficients: GemmCoefficients) -> Any:
    """Return the time of a launch in microseconds, given that of its CTAs, with its compulsory traffic."""
    memory_us = coefficients.launch_us + gemm.min_bytes / coefficients.dram_bytes_per_us
    return combine_overlapping_times(launch_us, memory_us)
