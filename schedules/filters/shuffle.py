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
from tvm.tirx.script.builder import ir

from tvmconv.arithmetic import ceil_div
from tvmconv.registry import schedule
from tvmconv.space import Knobs
from tvmconv.target import WARP_SIZE
from tvmconv.workloads import Filter, Filter1d
from tvmconv.workloads.filters_te import apply_epilogue

from ..primitives import set_memory_scope
from ..tir_builder import (
    Buffer,
    Expr,
    Register,
    allocate,
    build_schedule,
    if_,
    logical_and,
    serial_loop,
    store,
    store_element,
    thread_axis,
    unrolled_loop,
)
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
    mask_row_loop = unrolled_loop if mask_rows * mask_columns <= MAX_UNROLLED_TAPS else serial_loop

    def emit_kernel(arguments: dict[str, Buffer]) -> None:
        X, K, Y = arguments.values()
        part = allocate("part", elements_per_lane + 1, "float32")
        total = Register("total", "float32")

        def emit_load(row: Expr, first_element: Expr, lane: Expr) -> None:
            with unrolled_loop(elements_per_lane, "i") as i:
                element = first_element + i * WARP_SIZE
                is_inside = logical_and(row >= 0, row < height, element >= 0, element < row_elements)
                with ir.If(logical_and(is_inside, lane + i * WARP_SIZE < elements_per_warp)):
                    with ir.Then():
                        store(part, i, X[w.element_index(row, element)])
                    with ir.Else():
                        store(part, i, T.float32(0))

        def emit_tap(r: Expr, s: Expr, lane: Expr) -> None:
            provider, index = s * channels % WARP_SIZE, s * channels // WARP_SIZE
            tap = K[w.mask_index(r, s)]
            with ir.If(provider == 0):
                with ir.Then():
                    total.set(total.value + part[index] * tap)
                with ir.Else():
                    provided = T.Select(lane >= provider, part[index], part[index + 1])
                    shuffled = T.tvm_warp_shuffle(T.uint32(ALL_LANES), provided, lane + provider, WARP_SIZE, WARP_SIZE)
                    total.set(total.value + shuffled * tap)

        with (
            thread_axis(blocks, "blockIdx.x") as block,
            thread_axis(warps_y, "threadIdx.y") as ty,
            thread_axis(warps_x * WARP_SIZE, "threadIdx.x") as tx,
        ):
            row, element = block // blocks_along * warps_y + ty, block % blocks_along * warps_x * WARP_SIZE + tx
            total.set(T.float32(0))
            with mask_row_loop(mask_rows, "r") as r:
                emit_load(row + r - mask_rows // 2, element - mask_columns // 2 * channels, tx % WARP_SIZE)
                with unrolled_loop(mask_columns, "s") as s:
                    emit_tap(r, s, tx % WARP_SIZE)
            with if_(logical_and(row < height, element < row_elements)):
                store_element(Y, w.element_index(row, element), apply_epilogue(w, total.value))

    s = build_schedule(w, emit_kernel)
    set_memory_scope(s, K="constant")
    return s


def _count_warp_elements(w: Filter) -> int:
    """Return the elements of a row that a warp reads."""
    return WARP_SIZE + (w.mask[1] - 1) * w.image[2]


def _count_lane_elements(w: Filter) -> int:
    """Return the elements of a row that each lane loads."""
    return ceil_div(_count_warp_elements(w), WARP_SIZE)
