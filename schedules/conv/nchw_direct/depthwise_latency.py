"""Estimated latency of depthwise kernels whose lanes compute neighbouring columns, by the residency of their CTAs.

`StripConfig.estimated_cycles` counts the work of an SM. It ignores that a warp waits for its own instructions and loads
unless others run meanwhile, and that registers limit how many do. Here the estimate is a norm of four times: that of
all instructions, that of a warp from its first load to its last store in each wave of CTAs, that of the loads in the L1
cache, and that of the bytes from L2.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tvmconv.arithmetic import ceil_div, round_up
from tvmconv.fitted_latency import H200_FIT
from tvmconv.target import (
    H200,
    LINE_BYTES,
    MAX_REGISTERS_PER_THREAD,
    REGISTERS_PER_MULTIPROCESSOR,
    SCHEDULERS,
    WARP_SIZE,
)
from tvmconv.workloads.dtypes import get_itemsize

from ..nhwc_direct.strip_config import WORD_BYTES, StripConfig
from ..tensor_cores.latency_model import count_ctas_per_sm

REGISTER_UNIT = 8
P_NORM_EXPONENT = 2


def estimate_registers(config: StripConfig) -> Any:
    """Return the estimated registers per thread.

    The rows of a strip pass through registers if the filter is unrolled: only those that further input rows reach have
    accumulators. Fitted to 2,231 kernels of `depthwise_nhwc` on an H200 that spill nothing. The standard deviation is
    15 registers with the whole filter unrolled, and 8 else.
    """
    shape, words = config.shape, get_itemsize(config.w.storage) / WORD_BYTES
    open_rows = np.minimum(config.rows.local, ceil_div(shape.kernel_size[1], shape.strides[1]))
    row_accumulators = config.vector * config.columns.local
    taps = config.vector * words * (0.5 * config.num_taps + 0.4 * shape.kernel_size[2])
    unrolled = 19 + row_accumulators * (1.75 * open_rows + 0.12 * config.rows.local) + taps
    looped = 21 + 1.4 * config.num_accumulators + 0.5 * config.vector * words * config.window_vectors
    return np.where(np.equal(config.unroll_scope, "filter"), unrolled, looped)


def count_row_loads(config: StripConfig) -> Any:
    """Return the number of input rows that a thread loads one after another."""
    planes, filter_rows, _ = config.shape.kernel_size
    rows, stride = config.rows.local, config.shape.strides[1]
    scopes = [np.equal(config.unroll_scope, name) for name in ("filter", "row")]
    return np.select(
        scopes, [planes * ((rows - 1) * stride + filter_rows), planes * filter_rows * rows], config.num_taps * rows
    )


def estimate_cycles(config: StripConfig, read_cycles: Any, block_bytes: Any) -> Any:
    """Return the estimated latency in clock cycles of the SM with the most CTAs.

    Args:
        config: One config, or many as columns.
        read_cycles: Clock cycles in which the L1 cache and shared memory serve the loads of a warp.
        block_bytes: Bytes that a CTA transfers.
    """
    fit, traffic, itemsize = H200_FIT.depthwise, config.traffic, get_itemsize(config.w.storage)
    threads = round_up(config.num_threads, WARP_SIZE)
    whole_units = REGISTERS_PER_MULTIPROCESSOR // threads // REGISTER_UNIT * REGISTER_UNIT
    max_registers = np.clip(whole_units, REGISTER_UNIT, MAX_REGISTERS_PER_THREAD)  # of illegal configs, at least a unit
    registers = estimate_registers(config)
    kept_registers = np.minimum(registers, max_registers)
    resident = count_ctas_per_sm(
        config.num_blocks, H200.multiprocessors, config.allocated_bytes, kept_registers, threads
    )
    filter_elements = config.shared_bytes / itemsize / config.num_threads
    instructions = fit.overhead_instructions + config.count_issued_instructions(traffic)
    instructions = instructions + np.where(config.is_weight_shared, 3 * filter_elements, traffic.scattered_instructions)
    spilled = np.maximum(registers / max_registers - 1, 0)  # a spilled register is stored and loaded
    instructions = instructions * (1 + fit.spill_factor * spilled)
    ctas_per_sm = ceil_div(config.num_blocks, H200.multiprocessors)
    warps = ctas_per_sm * (threads // WARP_SIZE)
    waves = np.maximum(config.num_blocks / (H200.multiprocessors * resident), 1)
    waves = 0.5 * (waves + ceil_div(ctas_per_sm, resident))  # CTAs of a wave do not end at a time
    warp_cycles = instructions * fit.cycles_per_instruction + count_row_loads(config) * fit.row_cycles
    copied_lines = np.where(config.is_input_shared, 2 * config.block_input_bytes / LINE_BYTES, 0)  # loaded and stored
    times = (
        fit.issue_factor * warps * instructions / SCHEDULERS,
        waves * warp_cycles,
        fit.read_factor * warps * read_cycles + ctas_per_sm * copied_lines,
        ctas_per_sm * block_bytes / fit.l2_bytes_per_cycle,
    )
    return sum(np.asarray(time, float) ** P_NORM_EXPONENT for time in times) ** (1 / P_NORM_EXPONENT)
