"""Neighbours' values by warp shuffle: of a row, each input is loaded once a warp and passed from lane to lane.

It differs from `constant` in that a warp computes 32 neighbouring outputs of a row, with channels interleaved. For each
row of the mask, its lanes load the inputs of the whole warp, each once: lane i holds elements i, 32 + i, and so on. The
tap at distance d is in lane i + d, or wrapped around in lane i + d - 32, which then provides its next element. Every
lane selects the element that it provides, and one shuffle gives each lane its input. Image rows are shared through the
L1 cache: a warp loads every row that its mask covers, as the warps above and below do.

Compared with shared memory, it saves the barrier and the stores; a shuffle itself uses the same path through the
shared-memory unit as a load. It is for CUDA only, because TVM has no warp shuffles for OpenCL.

Tensor expressions cannot express this, because no lane's value is defined without those of others. The kernel is
written as TIR.
"""

from __future__ import annotations

from tvm.s_tir import Schedule
from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.arithmetic import ceil_div
from tvmconv.registry import schedule
from tvmconv.space import Knobs
from tvmconv.target import WARP_SIZE
from tvmconv.workloads import Filter, Filter1d
from tvmconv.workloads.filters_te import apply_epilogue

from .. import tvm_script
from ..primitives import set_memory_scope
from .output_tiling import can_place_mask_in_constant_memory

ALL_LANES = 0xFFFFFFFF
MAX_LANE_ELEMENTS = 32  # elements of a row per lane
MAX_UNROLLED_TAPS = 289  # for larger masks, only the taps of a row are unrolled


def can_fit_registers(w: Filter) -> bool:
    """Whether a warp's inputs fit registers, a row's taps can be unrolled, and the mask fits constant memory."""
    return (
        can_place_mask_in_constant_memory(w)
        and _count_lane_elements(w) <= MAX_LANE_ELEMENTS
        and w.mask[1] <= MAX_UNROLLED_TAPS
    )


@schedule("filter1d", "filter2d", device_kinds=("cuda",), condition=can_fit_registers)
def shuffle(s: Schedule, w: Filter, k: Knobs) -> Schedule:
    """Compute 32 neighbouring outputs of a row per warp."""
    if isinstance(w, Filter1d):
        warp_shape = k.choice("warps", (1, 2, 4, 8, 16, 32), default=8), 1
    else:
        warp_shape = k.choice("warps_x", (1, 2, 4), default=1), k.choice("threads_y", (1, 2, 4, 8), default=8)
    return build_filter_schedule(w, warp_shape)


def build_filter_schedule(w: Filter, warp_shape: tuple[int, int]) -> Schedule:
    """Return the filter as a scheduled function of X, K and Y for CUDA; the mask is in constant memory."""
    (height, width, channels), (mask_rows, mask_columns) = w.image, w.mask
    row_elements, (warps_x, warps_y) = width * channels, warp_shape
    elements_per_lane = _count_lane_elements(w)
    elements_per_warp = _count_warp_elements(w)
    blocks_along = ceil_div(row_elements, WARP_SIZE * warps_x)
    blocks = blocks_along * ceil_div(height, warps_y)
    mask_row_loop = T.unroll if mask_rows * mask_columns <= MAX_UNROLLED_TAPS else T.serial

    # fmt: off
    @tvm_script.prim_func(s_tir=True)
    def main(X: T.Buffer(w.signal_shape), K: T.Buffer(w.mask_shape), Y: T.Buffer(w.signal_shape)):  # type: ignore[valid-type]
        part = T.sblock_alloc_buffer((elements_per_lane + 1,), scope="local")
        total = T.sblock_alloc_buffer((1,), scope="local")

        @T.inline
        def load(line, first, lane):
            for p in T.unroll(elements_per_lane):
                if (
                    (line >= 0 and line < height)
                    and (first + p * WARP_SIZE >= 0 and first + p * WARP_SIZE < row_elements)
                    and lane + p * WARP_SIZE < elements_per_warp
                ):
                    part[p] = X[w.element_index(line, first + p * WARP_SIZE)]
                else:
                    part[p] = T.float32(0)

        @T.inline
        def add(r, s, lane):
            if s * channels % WARP_SIZE == 0:
                total[0] += part[s * channels // WARP_SIZE] * K[w.mask_index(r, s)]
            else:
                total[0] += T.tvm_warp_shuffle(
                    T.uint32(ALL_LANES),
                    T.Select(
                        lane >= s * channels % WARP_SIZE,
                        part[s * channels // WARP_SIZE],
                        part[s * channels // WARP_SIZE + 1],
                    ),
                    lane + s * channels % WARP_SIZE,
                    WARP_SIZE,
                    WARP_SIZE,
                ) * K[w.mask_index(r, s)]

        @T.inline
        def compute(line, element, lane):
            total[0] = T.float32(0)
            for r in mask_row_loop(mask_rows):
                load(line + r - mask_rows // 2, element - mask_columns // 2 * channels, lane)
                for s in T.unroll(mask_columns):
                    add(r, s, lane)
            if line < height and element < row_elements:
                Y[w.element_index(line, element)] = apply_epilogue(w, total[0])

        for block in T.thread_binding(blocks, thread="blockIdx.x"):
            for ty in T.thread_binding(warps_y, thread="threadIdx.y"):
                for tx in T.thread_binding(warps_x * WARP_SIZE, thread="threadIdx.x"):
                    compute(
                        block // blocks_along * warps_y + ty,
                        block % blocks_along * warps_x * WARP_SIZE + tx,
                        tx % WARP_SIZE,
                    )
    # fmt: on
    s = Schedule(main)
    set_memory_scope(s, K="constant")
    return s


def _count_warp_elements(w: Filter) -> int:
    """Return the elements of a row that a warp reads."""
    return WARP_SIZE + (w.mask[1] - 1) * w.image[2]


def _count_lane_elements(w: Filter) -> int:
    """Return the elements of a row that each lane loads."""
    return ceil_div(_count_warp_elements(w), WARP_SIZE)
