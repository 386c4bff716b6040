"""Initialization of accumulators with the bias, which replaces the addition at the end.

A store that waits for the bias has nothing left to overlap with, which costs a tenth of the time of a kernel of some
microseconds. The initial value is instead loaded at the kernel's start, together with the first operands. No schedule
primitive expresses this, so the scheduled function is rewritten.
"""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.ir import IRModule, Range, TensorLoad
from tvm.s_tir import SBlock, Schedule
from tvm.s_tir.schedule import ScheduleError
from tvm.tirx import PrimFunc

from tvmconv.workloads import Conv
from tvmconv.workloads.dtypes import ACCUMULATOR, DTYPES

from .direct_config import DirectTileConfig

BIAS_NAME = "bias"
FIRST_POSITION = -2  # index argument of `compute_at`: before all other statements of the loop


def initialize_with_bias(
    s: Schedule, w: Conv, block_name: str, config: DirectTileConfig, *, group_axis: int
) -> Schedule:
    """Return the schedule with accumulators initialized by the bias, if that is the first operation of the epilogue.

    The reduction of the schedule is decomposed. Slices are the first axis of the block `block_name`; only the first
    slice starts with the bias. The output channels follow the axis `group_axis`. Sums of integers start with zero,
    because the bias is a float.
    """
    if w.epilogue[:1] != (BIAS_NAME,) or DTYPES[w.dtype].accumulator != ACCUMULATOR:
        return s
    function = s.mod["main"]
    (bias,) = (buffer for buffer in function.params if str(buffer.name) == BIAS_NAME)
    zero = tirx.const(0.0, ACCUMULATOR)

    def add_bias_to_init(block: Any) -> Any:
        if str(block.name_hint) != f"{block_name}_init":
            return block
        variables = [axis.var for axis in block.iter_vars]
        slice_index, axes = (variables[0], variables[1:]) if config.sliced_k > 1 else (None, variables)
        channel = axes[group_axis] * (w.O // w.groups) + axes[group_axis + 1]
        init_value = tirx.BufferLoad(bias, [channel])
        if slice_index is not None:
            init_value = tirx.Select(slice_index == 0, init_value, zero)
        store = tirx.BufferStore(block.body.buffer, init_value, block.body.indices)
        reads = [tirx.BufferRegion(bias, [Range.from_min_extent(channel, 1)])]
        return SBlock(block.iter_vars, reads, block.writes, block.name_hint, store)

    function = tvm_ffi.structural_map(_remove_bias(function, bias), (SBlock, add_bias_to_init))
    return _hoist_bias_load(Schedule(IRModule({"main": function})), f"{block_name}_init")


def _remove_bias(function: PrimFunc, bias: Any) -> PrimFunc:
    """Return the function without the addition of the bias."""
    zero = tirx.const(0.0, ACCUMULATOR)

    def remove_bias_read(block: Any) -> Any:
        reads = [region for region in block.reads if not region.source.same_as(bias)]
        if len(reads) == len(block.reads):
            return block
        return SBlock(block.iter_vars, reads, block.writes, block.name_hint, block.body, block.init)

    def fold_zero_addition(addition: Any) -> Any:
        for term, other_term in ((addition.a, addition.b), (addition.b, addition.a)):
            if term.same_as(zero):
                return other_term
        return addition

    return tvm_ffi.structural_map(
        function,
        [
            (TensorLoad, lambda load: zero if load.source.same_as(bias) else load),
            (tirx.Add, fold_zero_addition),
            (SBlock, remove_bias_read),
        ],
    )


def _hoist_bias_load(s: Schedule, init_block_name: str) -> Schedule:
    """Return the schedule with one bias load per thread and channel, instead of one per accumulator.

    If TVM cannot prove that the loads may move, for example with overhanging tiles, they stay.
    """
    new_schedule = s.copy()
    block = new_schedule.get_sblock(init_block_name)
    thread_loops = [loop for loop in new_schedule.get_loops(block) if new_schedule.get(loop).thread_binding is not None]
    try:
        new_schedule.compute_at(
            new_schedule.cache_read(block, 0, "local"), thread_loops[-1], preserve_unit_loops=True, index=FIRST_POSITION
        )
    except ScheduleError:
        return s
    return new_schedule
