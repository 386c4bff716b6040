"""A block for a tile of the output, which it first copies to shared memory: left halo, the tile itself, right halo.

It differs from `constant` in that the block's threads first copy their inputs to shared memory once, as each sample is
read by as many threads as the mask has taps. There are as many threads as outputs, but more inputs: all threads copy
one sample of the tile each, and the first few copy the halo before and after it. Bounds are checked once per sample, no
longer at each tap. The cost is a barrier before the sums, which waits for the slowest load, and whole warps that copy
few samples of the halo.

Tensor expressions cannot express three statements that fill one array. The kernel is written as TIR.
"""

from tvm.s_tir import Schedule
from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.arithmetic import ceil_div
from tvmconv.registry import schedule
from tvmconv.space import Knobs
from tvmconv.workloads import Filter1d
from tvmconv.workloads.filters_te import apply_epilogue

from ..primitives import set_memory_scope
from ..tir_builder import (
    Buffer,
    Expr,
    Register,
    allocate,
    build_schedule,
    if_,
    items_loop,
    serial_loop,
    store,
    thread_axis,
    unrolled_loop,
)
from .output_tiling import MAX_UNROLLED_TAPS, can_stage_halo, declare_tile_knobs


@schedule("filter1d", condition=can_stage_halo)
def halo_blocks(s: Schedule, w: Filter1d, k: Knobs) -> Schedule:
    """Compute as many outputs per block as it has threads."""
    (threads,) = declare_tile_knobs(k, w)
    radius = w.k // 2
    tap_loop = unrolled_loop if w.k <= MAX_UNROLLED_TAPS else serial_loop

    def emit_kernel(arguments: dict[str, Buffer]) -> None:
        X, K, Y = arguments.values()
        tile = allocate("tile", radius + threads + radius, "float32", "shared")
        total = Register("total", "float32")

        def emit_copy(first: Expr, count: int, start: Expr, thread: Expr) -> None:
            with items_loop(count, thread, threads, is_unrolled=True) as i:  # several if the halo exceeds the block
                sample = start + i
                store(tile, first + i, T.if_then_else(T.And(sample >= 0, sample < w.n), X[sample], T.float32(0)))

        with (
            thread_axis(ceil_div(w.n, threads), "blockIdx.x") as block,
            thread_axis(threads, "threadIdx.x") as thread,
        ):
            emit_copy(0, radius, block * threads - radius, thread)
            emit_copy(radius, threads, block * threads, thread)
            emit_copy(radius + threads, radius, block * threads + threads, thread)
            total.set(T.float32(0))
            with tap_loop(w.k, "tap") as tap:
                total.set(total.value + tile[thread + tap] * K[tap])
            with if_(block * threads + thread < w.n):
                store(Y, block * threads + thread, apply_epilogue(w, total.value))

    s = build_schedule(w, emit_kernel)
    set_memory_scope(s, K="constant")
    return s
