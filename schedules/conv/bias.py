"""A sum that begins with its bias, instead of having it added at the end.

A store would wait for the bias with nothing left to compute meanwhile, which is a tenth of the time of a kernel of some
microseconds. What a sum begins with is asked for at the kernel's start, together with the first operands. No scheduling
step says that: it is a change of the scheduled function.
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
from tvmconv.workloads.dtypes import ACCUMULATOR

from .plan import Plan

BIAS = "bias"
FIRST = -2  # of `compute_at`: before all that is in the loop


def begin_with_bias(s: Schedule, w: Conv, products: str, plan: Plan, *, group: int) -> Schedule:
    """The schedule with its sums begun with the bias, if that is the first operation of the epilogue.

    Args:
        s: the schedule, whose reduction is decomposed.
        w: the workload.
        products: name of the block that multiplies.
        plan: how; of slices, which are the block's first axis, only the first begins with the bias.
        group: which of its other axes are the groups; behind it come their output channels.
    """
    if w.epilogue[:1] != (BIAS,):
        return s
    function = s.mod["main"]
    (bias,) = (buffer for buffer in function.params if str(buffer.name) == BIAS)
    zero = tirx.const(0.0, ACCUMULATOR)

    def begun(block: Any) -> Any:
        if str(block.name_hint) != f"{products}_init":
            return block
        variables = [axis.var for axis in block.iter_vars]
        piece, axes = (variables[0], variables[1:]) if plan.slices > 1 else (None, variables)
        channel = axes[group] * (w.O // w.groups) + axes[group + 1]
        value = tirx.BufferLoad(bias, [channel])
        if piece is not None:
            value = tirx.Select(piece == 0, value, zero)
        store = tirx.BufferStore(block.body.buffer, value, block.body.indices)
        reads = [tirx.BufferRegion(bias, [Range.from_min_extent(channel, 1)])]
        return SBlock(block.iter_vars, reads, block.writes, block.name_hint, store)

    function = tvm_ffi.structural_map(_without(function, bias), (SBlock, begun))
    return _load_once(Schedule(IRModule({"main": function})), f"{products}_init")


def _without(function: PrimFunc, bias: Any) -> PrimFunc:
    """The function with no bias added."""
    zero = tirx.const(0.0, ACCUMULATOR)

    def unread(block: Any) -> Any:
        reads = [region for region in block.reads if not region.source.same_as(bias)]
        if len(reads) == len(block.reads):
            return block
        return SBlock(block.iter_vars, reads, block.writes, block.name_hint, block.body, block.init)

    def folded(addition: Any) -> Any:
        for term, other in ((addition.a, addition.b), (addition.b, addition.a)):
            if term.same_as(zero):
                return other
        return addition

    return tvm_ffi.structural_map(
        function,
        [
            (TensorLoad, lambda load: zero if load.source.same_as(bias) else load),
            (tirx.Add, folded),
            (SBlock, unread),
        ],
    )


def _load_once(s: Schedule, init: str) -> Schedule:
    """Let each thread load what its sums begin with once for each channel, and not for each sum.

    Where TVM cannot tell that the loads may be moved, as where tiles overhang, they stay.
    """
    moved = s.copy()
    block = moved.get_sblock(init)
    bound = [loop for loop in moved.get_loops(block) if moved.get(loop).thread_binding is not None]
    try:
        moved.compute_at(moved.cache_read(block, 0, "local"), bound[-1], preserve_unit_loops=True, index=FIRST)
    except ScheduleError:
        return s
    return moved
