"""Means over the spatial axes of channels-last tensors, such as global average pooling, as scheduled TIR for GPUs.

TVM's rules give such a mean to a few blocks, one thread of which adds hundreds of rows, and convert 16-bit inputs in a
launch of their own. Here up to `MAX_SPLITS` blocks add rows of a channel, and a second launch adds their sums.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from tvmconv.arithmetic import ceil_div, round_up
from tvmconv.relax.kernels import OPAQUE_PATTERN
from tvmconv.workloads.dtypes import ACCUMULATOR

if TYPE_CHECKING:
    from tvm.s_tir import Schedule
    from tvm.s_tir.schedule import LoopRV
    from tvm.tirx import PrimFunc

CHANNEL_THREADS, ROW_THREADS = 32, 8  # threads of a block along the channels and along the rows
ROWS_PER_THREAD, MAX_SPLITS = 32, 64
MEAN_DTYPES = ("float16", "bfloat16", "float32")


def make_mean_function(shape: tuple[int, ...], dtype: str, output_dtype: str) -> PrimFunc:
    """Return a function that computes the mean over all axes but the first and the last, which keep size 1.

    Args:
        shape: Shape of the input, channels last.
        dtype: Dtype of the input; sums are float32.
        output_dtype: Dtype of the output.
    """
    from tvm import s_tir, te, tirx

    batch, *space, channels = shape
    rows = math.prod(space)
    splits = min(MAX_SPLITS, ceil_div(rows, ROW_THREADS * ROWS_PER_THREAD))
    rows_per_split = round_up(ceil_div(rows, splits), ROW_THREADS)
    x = te.placeholder(shape, dtype, name="X")
    row, split = (
        te.reduce_axis((0, extent), name=name) for extent, name in ((rows_per_split, "row"), (splits, "split"))
    )

    def read(image: Any, part: Any, channel: Any) -> Any:
        index = part * rows_per_split + row
        position: list[Any] = []
        remaining = index
        for extent in reversed(space):
            position.insert(0, remaining % extent)
            remaining = remaining // extent
        value = x(image, *position, channel).astype(ACCUMULATOR)
        return te.sum(tirx.if_then_else(index < rows, value, tirx.const(0.0, ACCUMULATOR)), axis=row)

    sums = te.compute((batch, splits, channels), read, name="sums")
    total = te.compute((batch, channels), lambda n, c: te.sum(sums[n, split, c], axis=split), name="total")
    y = te.compute(
        (batch, *(1 for _ in space), channels),
        lambda *index: (total[index[0], index[-1]] * tirx.const(1.0 / rows, ACCUMULATOR)).astype(output_dtype),
        name="Y",
    )
    schedule = s_tir.Schedule(te.create_prim_func([x, y]))
    _schedule_sum(schedule)
    _schedule_total(schedule)
    attributes = {"global_symbol": make_mean_symbol(shape, dtype, output_dtype), "op_pattern": OPAQUE_PATTERN}
    return schedule.mod["main"].with_attrs({**attributes, "tirx.is_scheduled": True})


def make_mean_symbol(shape: tuple[int, ...], dtype: str, output_dtype: str) -> str:
    """Return the name of a function of `make_mean_function`."""
    return f"tvmconv_mean_{'x'.join(map(str, shape))}_{dtype}_{output_dtype}"


def _schedule_sum(schedule: Schedule) -> None:
    """Let the threads of a column add every eighth row, then add their sums through shared memory."""
    image, split, channel, row = schedule.get_loops(schedule.get_sblock("sums"))
    channels = int(schedule.get(channel).extent)
    # TVM does not guard the stores behind a reduction over threads, so that the threads must divide the channels.
    channel_threads = max(n for n in range(1, CHANNEL_THREADS + 1) if channels % n == 0)
    channel_outer, channel_inner = schedule.split(channel, [None, channel_threads])
    row_outer, row_inner = schedule.split(row, [None, ROW_THREADS])
    schedule.reorder(image, split, channel_outer, channel_inner, row_inner, row_outer)
    schedule.bind(schedule.fuse(image, split, channel_outer), "blockIdx.x")
    schedule.bind(channel_inner, "threadIdx.x")
    schedule.bind(row_inner, "threadIdx.y")
    _unroll(schedule, row_outer)


def _schedule_total(schedule: Schedule) -> None:
    output = schedule.get_sblock("Y")
    outer, inner = schedule.split(schedule.fuse(*schedule.get_loops(output)), [None, CHANNEL_THREADS])
    schedule.bind(outer, "blockIdx.x")
    schedule.bind(inner, "threadIdx.x")
    total = schedule.get_sblock("total")
    schedule.compute_at(total, inner)
    schedule.set_scope(total, 0, "local")
    _unroll(schedule, schedule.get_loops(total)[-1])


def _unroll(schedule: Schedule, loop: LoopRV) -> None:
    """Let the compiler unroll a loop, so that its loads overlap."""
    schedule.annotate(loop, "pragma_auto_unroll_max_step", MAX_SPLITS)
    schedule.annotate(loop, "pragma_unroll_explicit", 0)
