"""Filters by warp shuffles: what the `shuffle` schedules of signals and images have in common.

A warp computes 32 neighbouring outputs of a row, channels interleaved. For each row of the mask its lanes load the
inputs that all of them together see, each once: lane i holds elements i, 32 + i, ... of them. The tap at a distance d
is then with lane i + d, or wrapped around with lane i + d - 32, which gives its next element instead: every lane
chooses what to give, and one shuffle brings each lane its own. Neither shared memory nor a barrier is needed.

Tensor expressions cannot say this: no lane's value is defined without the others'.
"""

from __future__ import annotations

import functools

from tvm import s_tir
from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.workloads.filters import Filter
from tvmconv.workloads.filters_te import finished

from .filters import mask_is_constant
from .vocabulary import place

LANES = 32
ALL_LANES = 0xFFFFFFFF
MAX_HELD = 32  # elements that a lane holds of a row
MAX_UNROLLED = 289  # taps that are unrolled; of larger masks only the taps of a row are


def held(w: Filter) -> int:
    """Elements that each lane loads of a row."""
    return -(-(LANES + (w.mask[1] - 1) * w.image[2]) // LANES)


def fits(w: Filter) -> bool:
    """Whether what a warp sees of a row fits in registers, its taps in the text, and the mask in constant memory."""
    return mask_is_constant(w) and held(w) <= MAX_HELD and w.mask[1] <= MAX_UNROLLED


def program(w: Filter, warps: tuple[int, int]) -> s_tir.Schedule:
    """The filter as a scheduled function of X, K and Y, for CUDA; the mask is in constant memory.

    Args:
        w: the workload.
        warps: of a block, along a row and across rows.
    """
    (height, width, channels), (mask_rows, mask_columns) = w.image, w.mask
    row, (along, down) = width * channels, warps
    parts = held(w)
    seen = LANES + (mask_columns - 1) * channels  # elements of a row that a warp sees
    blocks_along = -(-row // (LANES * along))
    blocks = blocks_along * -(-height // down)
    finish = functools.partial(finished, w)
    rows_of_mask = T.unroll if mask_rows * mask_columns <= MAX_UNROLLED else T.serial

    # fmt: off
    @T.prim_func(s_tir=True)
    def main(X: T.Buffer(w.signal_shape), K: T.Buffer(w.mask_shape), Y: T.Buffer(w.signal_shape)):  # type: ignore[valid-type]
        part = T.sblock_alloc_buffer((parts + 1,), scope="local")
        total = T.sblock_alloc_buffer((1,), scope="local")

        @T.inline
        def load(line, first, lane):
            for p in T.unroll(parts):
                if (
                    (line >= 0 and line < height)
                    and (first + p * LANES >= 0 and first + p * LANES < row)
                    and lane + p * LANES < seen
                ):
                    part[p] = X[w.at(line, first + p * LANES)]
                else:
                    part[p] = T.float32(0)

        @T.inline
        def add(r, s, lane):
            if s * channels % LANES == 0:
                total[0] += part[s * channels // LANES] * K[w.tap(r, s)]
            else:
                total[0] += T.tvm_warp_shuffle(
                    T.uint32(ALL_LANES),
                    T.Select(
                        lane >= s * channels % LANES, part[s * channels // LANES], part[s * channels // LANES + 1]
                    ),
                    lane + s * channels % LANES,
                    LANES,
                    LANES,
                ) * K[w.tap(r, s)]

        @T.inline
        def compute(line, element, lane):
            total[0] = T.float32(0)
            for r in rows_of_mask(mask_rows):
                load(line + r - mask_rows // 2, element - mask_columns // 2 * channels, lane)
                for s in T.unroll(mask_columns):
                    add(r, s, lane)
            if line < height and element < row:
                Y[w.at(line, element)] = finish(total[0])

        for block in T.thread_binding(blocks, thread="blockIdx.x"):
            for ty in T.thread_binding(down, thread="threadIdx.y"):
                for tx in T.thread_binding(along * LANES, thread="threadIdx.x"):
                    compute(
                        block // blocks_along * down + ty,
                        block % blocks_along * along * LANES + tx,
                        tx % LANES,
                    )
    # fmt: on
    s = s_tir.Schedule(main)
    place(s, K="constant")
    return s
