"""Neighbours' values by warp shuffle: of a row, each input is loaded once a warp and passed from lane to lane.

From `constant`: a warp computes 32 neighbouring outputs of a row, channels interleaved. For each row of the mask its
lanes load the inputs that all of them together see, each once: lane i holds elements i, 32 + i, ... of them. The tap at
a distance d is then with lane i + d, or wrapped around with lane i + d - 32, which gives its next element instead:
every lane chooses what to give, and one shuffle brings each lane its own. Rows of an image are shared through the L1
cache: a warp loads every row that the mask reaches, as its neighbours above and below do.

Against shared memory it saves the barrier and the stores; a shuffle itself takes the path through the shared-memory
unit that a load would take. For CUDA only: TVM has no warp shuffles for OpenCL.

Tensor expressions cannot say this: no lane's value is defined without the others'. It is written as TIR.
"""

from __future__ import annotations

from tvm.s_tir import Schedule
from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.arithmetic import ceil_div
from tvmconv.gpu import WARP
from tvmconv.knobs import Knobs
from tvmconv.library import schedule
from tvmconv.workloads import Filter, Filter1d
from tvmconv.workloads.filters_te import finished

from ..vocabulary import place
from .tiles import mask_is_constant

ALL_LANES = 0xFFFFFFFF
MAX_HELD = 32  # elements that a lane holds of a row
MAX_UNROLLED = 289  # taps that are unrolled; of larger masks only the taps of a row are


def fits(w: Filter) -> bool:
    """Whether what a warp sees of a row fits in registers, its taps in the text, and the mask in constant memory."""
    return mask_is_constant(w) and _held(w) <= MAX_HELD and w.mask[1] <= MAX_UNROLLED


@schedule("filter1d", "filter2d", kinds=("cuda",), condition=fits)
def shuffle(s: Schedule, w: Filter, k: Knobs) -> Schedule:
    """A warp computes 32 neighbouring outputs of a row."""
    if isinstance(w, Filter1d):
        warps = k.choice("warps", (1, 2, 4, 8, 16, 32), default=8), 1
    else:
        warps = k.choice("warps_x", (1, 2, 4), default=1), k.choice("threads_y", (1, 2, 4, 8), default=8)
    return program(w, warps)


def program(w: Filter, warps: tuple[int, int]) -> Schedule:
    """The filter as a scheduled function of X, K and Y, for CUDA; the mask is in constant memory.

    Args:
        w: the workload.
        warps: of a block, along a row and across rows.
    """
    (height, width, channels), (mask_rows, mask_columns) = w.image, w.mask
    row, (along, down) = width * channels, warps
    parts = _held(w)
    seen = _seen(w)
    blocks_along = ceil_div(row, WARP * along)
    blocks = blocks_along * ceil_div(height, down)
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
                    and (first + p * WARP >= 0 and first + p * WARP < row)
                    and lane + p * WARP < seen
                ):
                    part[p] = X[w.at(line, first + p * WARP)]
                else:
                    part[p] = T.float32(0)

        @T.inline
        def add(r, s, lane):
            if s * channels % WARP == 0:
                total[0] += part[s * channels // WARP] * K[w.tap(r, s)]
            else:
                total[0] += T.tvm_warp_shuffle(
                    T.uint32(ALL_LANES),
                    T.Select(
                        lane >= s * channels % WARP, part[s * channels // WARP], part[s * channels // WARP + 1]
                    ),
                    lane + s * channels % WARP,
                    WARP,
                    WARP,
                ) * K[w.tap(r, s)]

        @T.inline
        def compute(line, element, lane):
            total[0] = T.float32(0)
            for r in rows_of_mask(mask_rows):
                load(line + r - mask_rows // 2, element - mask_columns // 2 * channels, lane)
                for s in T.unroll(mask_columns):
                    add(r, s, lane)
            if line < height and element < row:
                Y[w.at(line, element)] = finished(w, total[0])

        for block in T.thread_binding(blocks, thread="blockIdx.x"):
            for ty in T.thread_binding(down, thread="threadIdx.y"):
                for tx in T.thread_binding(along * WARP, thread="threadIdx.x"):
                    compute(
                        block // blocks_along * down + ty,
                        block % blocks_along * along * WARP + tx,
                        tx % WARP,
                    )
    # fmt: on
    s = Schedule(main)
    place(s, K="constant")
    return s


def _seen(w: Filter) -> int:
    """Elements of a row that a warp sees."""
    return WARP + (w.mask[1] - 1) * w.image[2]


def _held(w: Filter) -> int:
    """Elements of a row that each lane loads."""
    return ceil_div(_seen(w), WARP)
