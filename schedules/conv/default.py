"""The naive baseline: a block for each output row, a thread for each column.

The padding is inlined. Each thread loops over all output channels and the whole reduction, and reads every operand from
global memory each time. All other schedules are compared with this one.
"""

from tvm.s_tir import Schedule

from tvmconv.registry import schedule
from tvmconv.space import Knobs
from tvmconv.target import MAX_THREADS_PER_BLOCK
from tvmconv.workloads import Conv
from tvmconv.workloads.features import ALL_FEATURES

from ..primitives import inline_producers
from .reduction import DTYPES, accumulate_in_registers, get_conv_loops


@schedule("conv1d", "conv2d", "conv3d", dtypes=DTYPES, baseline=True, features=ALL_FEATURES)
def default(s: Schedule, w: Conv, k: Knobs) -> None:
    """Bind output rows to blocks and output columns to threads."""
    inline_producers(s, s.get_sblock("sum"))
    store = accumulate_in_registers(s)
    outer, channel, (*row_loops, row_loop), *_ = get_conv_loops(s, w)
    s.reorder(outer, *row_loops, row_loop, channel)
    columns, threads = s.split(row_loop, [None, min(w.output_size[-1], MAX_THREADS_PER_BLOCK)])
    s.bind(s.fuse(outer, *row_loops, columns), "blockIdx.x")
    s.bind(threads, "threadIdx.x")
    s.reverse_compute_at(store, channel)
