"""A block for a tile of the output, which it first copies to shared memory: left halo, the tile itself, right halo.

From `constant`: every sample is read by as many threads as the mask has taps, so that the block's threads copy what
they read together to shared memory first, once. They are as many as the tile, and the halo on both sides is more than
that: all threads copy the tile, a sample each, and before and after it the first few of them copy the halo. Bounds are
checked as samples are copied, no longer at each tap. The price is the barrier before the sums, which waits for the
slowest load, and that the copies of the halo keep whole warps for a few samples.

Tensor expressions cannot say this: three statements that fill one array. It is written as TIR.
"""

from tvm import s_tir
from tvm.s_tir import Schedule
from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.arithmetic import ceil_div
from tvmconv.registry import schedule
from tvmconv.space import Knobs
from tvmconv.workloads import Filter1d
from tvmconv.workloads.filters_te import apply_epilogue

from ..primitives import set_memory_scope
from .output_tiling import MAX_UNROLLED_TAPS, can_stage_halo, declare_tile_knobs


@schedule("filter1d", condition=can_stage_halo)
def halo_blocks(s: Schedule, w: Filter1d, k: Knobs) -> Schedule:
    """A block computes as many outputs as it has threads."""
    (threads,) = declare_tile_knobs(k, w)
    radius = w.k // 2
    tap_loop = T.unroll if w.k <= MAX_UNROLLED_TAPS else T.serial

    # fmt: off
    @T.prim_func(s_tir=True)
    def main(X: T.Buffer((w.n,)), K: T.Buffer((w.k,)), Y: T.Buffer((w.n,))):  # type: ignore[valid-type]
        tile = T.sblock_alloc_buffer((radius + threads + radius,), scope="shared")
        total = T.sblock_alloc_buffer((1,), scope="local")

        @T.inline
        def copy_element(place, sample):
            tile[place] = T.if_then_else(sample >= 0 and sample < w.n, X[sample], T.float32(0))

        @T.inline
        def copy(first, count, start, t):
            for step in T.unroll(ceil_div(count, threads)):  # more than one where the halo is larger than the block
                if step * threads + t < count:
                    copy_element(first + step * threads + t, start + step * threads + t)

        for block in T.thread_binding(ceil_div(w.n, threads), thread="blockIdx.x"):
            for t in T.thread_binding(threads, thread="threadIdx.x"):
                copy(0, radius, block * threads - radius, t)
                copy(radius, threads, block * threads, t)
                copy(radius + threads, radius, block * threads + threads, t)
                total[0] = T.float32(0)
                for j in tap_loop(w.k):
                    total[0] += tile[t + j] * K[j]
                if block * threads + t < w.n:
                    Y[block * threads + t] = apply_epilogue(w, total[0])
    # fmt: on
    s = s_tir.Schedule(main)
    set_memory_scope(s, K="constant")
    return s
