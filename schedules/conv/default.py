"""The naive baseline: a block for each output row, a thread for each column.

The padding is inlined; each thread runs over all output channels and the whole reduction by itself, and reads every
operand from global memory each time. Everything above is measured against this.
"""

from tvm.s_tir import Schedule

from tvmconv.gpu import MAX_THREADS
from tvmconv.knobs import Knobs
from tvmconv.library import schedule
from tvmconv.workloads import Conv

from ..vocabulary import inline_producers
from .sums import DTYPES, accumulate_in_registers, loops


@schedule("conv1d", "conv2d", "conv3d", dtypes=DTYPES, baseline=True)
def default(s: Schedule, w: Conv, k: Knobs) -> None:
    """Bind the output's rows to blocks and its columns to threads."""
    inline_producers(s, s.get_sblock("sum"))
    store = accumulate_in_registers(s)
    outer, channel, (*rows, row), *_ = loops(s, w)
    s.reorder(outer, *rows, row, channel)
    columns, threads = s.split(row, [None, min(w.out[-1], MAX_THREADS)])
    s.bind(s.fuse(outer, *rows, columns), "blockIdx.x")
    s.bind(threads, "threadIdx.x")
    s.reverse_compute_at(store, channel)
