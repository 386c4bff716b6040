"""A block for a tile of the output, which it first copies to shared memory: left halo, the tile itself, right halo.

It differs from `constant` in that the block's threads first copy their inputs to shared memory once, as each sample is
read by as many threads as the mask has taps. There are as many threads as outputs, but more inputs: all threads copy
one sample of the tile each, and the first few copy the halo before and after it. Bounds are checked once per sample, no
longer at each tap. The cost is a barrier before the sums, which waits for the slowest load, and whole warps that copy
few samples of the halo.

Tensor expressions cannot express three statements that fill one array. The kernel is written as TIR.
"""

from tvm import s_tir
from tvm.s_tir import Schedule
from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.arithmetic import ceil_div
from tvmconv.registry import schedule
from tvmconv.space import Knobs
from tvmconv.workloads import Filter1d
from tvmconv.workloads.filters_te import apply_epilogue

from .. import tvm_script
from ..primitives import set_memory_scope
from .output_tiling import MAX_UNROLLED_TAPS, can_stage_halo, declare_tile_knobs


@schedule("filter1d", condition=can_stage_halo)
def halo_blocks(s: Schedule, w: Filter1d, k: Knobs) -> Schedule:
    """Compute as many outputs per block as it has threads."""
    (threads,) = declare_tile_knobs(k, w)
    radius = w.k // 2
    tap_loop = T.unroll if w.k <= MAX_UNROLLED_TAPS else T.serial

    # fmt: off
    @tvm_script.prim_func(s_tir=True)
    def main(X: T.Buffer((w.n,)), K: T.Buffer((w.k,)), Y: T.Buffer((w.n,))):  # type: ignore[valid-type]
        tile = T.sblock_alloc_buffer((radius + threads + radius,), scope="shared")
        total = T.sblock_alloc_buffer((1,), scope="local")

        @T.inline
        def copy_element(place, sample):
            tile[place] = T.if_then_else(sample >= 0 and sample < w.n, X[sample], T.float32(0))

        @T.inline
        def copy(first, count, start, t):
            for step in T.unroll(ceil_div(count, threads)):  # more than one if the halo is larger than the block
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
