"""The naive baseline: a block for each output row, a thread for each column.

The padding is inlined; each thread runs over all output channels and the whole reduction by itself, and reads every
operand from global memory each time. Everything above is measured against this.
"""

from tvm.s_tir import Schedule

from tvmconv.knobs import Knobs
from tvmconv.library import schedule
from tvmconv.workloads import Conv2d

from .stages import accumulate_in_registers, axes, convolution

MAX_THREADS = 1024


@schedule("conv2d", baseline=True)
def default(s: Schedule, w: Conv2d, k: Knobs) -> None:
    """Bind an output axis to blocks and another to threads."""
    conv = convolution(s, w)
    s.compute_inline(s.get_sblock("padded"))
    store = accumulate_in_registers(s, conv) if w.groups > 1 else None

    outer, channel, height, width, *_ = axes(s, w, conv)
    s.reorder(outer, height, width, channel)
    columns, threads = s.split(width, [None, min(w.Q, MAX_THREADS)])
    s.bind(s.fuse(outer, height, columns), "blockIdx.x")
    s.bind(threads, "threadIdx.x")
    if store is not None:
        s.reverse_compute_at(store, channel)
