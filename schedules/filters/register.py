"""Outputs and inputs in registers, vector loads, the mask in constant memory: as near the memory's limit as it gets.

A thread computes a strip of outputs, some rows of a few neighbouring vectors, and accumulates them in registers. It
loads the window of its strip from each input row in aligned vectors: its own and the halo beside them. Its neighbours
in the warp also load the halo, so the L1 cache serves all but one load. Rows are image rows with interleaved channels;
a tap to the right is `channels` elements further on. Nothing is staged in shared memory, and there are no barriers.

For a signal, it differs from `constant` in that each output needs one load instruction instead of one per tap, which
leaves enough loads in flight to keep the memory busy. A vector of four samples takes three vector loads for a mask of
up to nine taps. If no vector divides a signal's length, its last elements are loaded and stored one by one.

For an image, a thread walks down the input rows of its strip; each row is loaded once and added to every output row
whose mask covers it. The L1 cache thus serves an input once per thread and neighbouring column, instead of once per
tap. Large masks would make the source too long, so they are processed row by row in a loop, with more loads and the
same arithmetic. Rows that no wide vector divides use narrower vectors, down to single elements.

Tensor expressions cannot express this: the sums of several output rows use an input row while it is in registers. The
loop over input rows is therefore the outer one, and it determines which output row and mask row meet. The kernel is
written as TIR.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm.s_tir import Schedule
from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)
from tvm.tirx.script.builder import ir

from tvmconv.arithmetic import ceil_div
from tvmconv.registry import schedule
from tvmconv.space import Columns, Knobs
from tvmconv.space.search_space import ResourceUsage
from tvmconv.workloads.filters import Filter
from tvmconv.workloads.filters_te import apply_epilogue

from ..primitives import set_memory_scope
from ..tir_builder import (
    Buffer,
    Expr,
    allocate,
    build_schedule,
    if_,
    logical_and,
    serial_loop,
    store,
    store_element,
    thread_axis,
    unrolled_loop,
    vectorized_loop,
)
from .output_tiling import can_place_mask_in_constant_memory

VECTOR_CHOICES = (1, 2, 4)  # floats per load
MAX_PRODUCTS = 2600  # unrolled products, for which NVRTC takes 3 s; twice as many take four times as long
MAX_LIVE_REGISTERS = 160  # registers per thread for accumulators and the window
DEFAULT_THREADS = (64, 4)  # threads per block along rows and columns
MIN_BLOCKS = 256  # at least the number of SMs of a large GPU


def can_fit_registers(w: Filter) -> bool:
    """Whether a strip of one vector fits the registers, and the mask fits constant memory."""
    smallest_config = {"vector": VECTOR_CHOICES[-1], "vectors_per_thread": 1, "rows_per_thread": 1, "load_rows_once": 0}
    return (
        can_place_mask_in_constant_memory(w)
        and _count_products(w, smallest_config) <= MAX_PRODUCTS
        and _estimate_live_registers(w, smallest_config) <= MAX_LIVE_REGISTERS
    )


def compute_usage(w: Filter, columns: Columns) -> ResourceUsage:
    """Return the resources that configs use; `loads` is the number of vector loads per output."""
    rows_per_thread, threads_y = (
        columns.get(name, np.ones_like(columns["vector"])) for name in ("rows_per_thread", "threads_y")
    )
    outputs_per_thread = rows_per_thread * columns["vector"] * columns["vectors_per_thread"]
    height, width, channels = w.image
    num_blocks = ceil_div(height, rows_per_thread * threads_y) * ceil_div(
        width * channels, columns["vector"] * columns["vectors_per_thread"] * columns["threads_x"]
    )
    rows_loaded = np.where(
        columns.get("load_rows_once", 1) == 1, rows_per_thread + w.mask[0] - 1, rows_per_thread * w.mask[0]
    )
    loads = rows_loaded * _count_window_elements(w, columns) / columns["vector"] / outputs_per_thread
    threads = columns["threads_x"] * threads_y
    return ResourceUsage(
        threads,
        np.zeros_like(threads),
        outputs_per_thread,
        num_blocks,
        live_registers=_estimate_live_registers(w, columns),
        loads=loads,
    )


@schedule("filter1d", "filter2d", usage=compute_usage, condition=can_fit_registers, search_if=can_fit_registers)
def register(s: Schedule, w: Filter, k: Knobs) -> Schedule:
    """Compute a few vectors of neighbouring outputs per thread; in an image, of a few rows."""
    return build_filter_schedule(w, declare_knobs(w, k))


@dataclass(frozen=True)
class FilterThreadTile:
    """Strip of a thread, and arrangement of threads in a block."""

    vector: int  # elements per vector
    vectors_per_thread: int  # neighbouring vectors per thread
    rows_per_thread: int  # output rows per thread
    thread_shape: tuple[int, int]  # threads per block along a row and along a column
    # Whether each input row is loaded once, with all mask rows unrolled; otherwise it is loaded for each mask row, in a
    # loop.
    load_rows_once: bool


def declare_knobs(w: Filter, k: Knobs) -> FilterThreadTile:
    """Declare the knobs, with defaults that suit the mask, and return the strip."""
    height, width, channels = w.image
    vector_choices = tuple(v for v in VECTOR_CHOICES if height == 1 or width * channels % v == 0)
    rows_per_thread, load_rows_once = _select_default(w, vector_choices[-1])
    vector = k.choice("vector", vector_choices, default=vector_choices[-1])
    vectors_per_thread = k.choice("vectors_per_thread", (1, 2, 4), default=1)
    threads_x = k.choice("threads_x", (32, 64, 128, 256), default=128 if height == 1 else DEFAULT_THREADS[0])
    threads_y = 1
    if height > 1:
        rows_per_thread = k.choice("rows_per_thread", (1, 2, 4, 8, 16, 32), default=rows_per_thread)
        threads_y = k.choice("threads_y", (1, 2, 4, 8), default=DEFAULT_THREADS[1])
    if w.mask[0] > 1:
        load_rows_once = bool(k.choice("load_rows_once", (1, 0), default=int(load_rows_once)))
    k.require(f"at most {MAX_PRODUCTS} unrolled products per thread", lambda c: _count_products(w, c) <= MAX_PRODUCTS)
    k.require(
        f"at most {MAX_LIVE_REGISTERS} registers per thread for accumulators and inputs",
        lambda c: _estimate_live_registers(w, c) <= MAX_LIVE_REGISTERS,
    )
    return FilterThreadTile(vector, vectors_per_thread, rows_per_thread, (threads_x, threads_y), load_rows_once)


def _select_default(w: Filter, vector: int) -> tuple[int, bool]:
    """Return the output rows per thread, and whether each input row is loaded once: the first pair that meets the
    limits.

    More rows share more loads, but leave fewer threads to hide latency. The fastest on an H200 are 2 rows for masks of
    3 rows and 4 for masks of 5 rows (tuning_logs/nvidia-h200/). Small images use fewer rows, so that there are enough
    blocks.
    """
    (height, width, channels), mask_rows = w.image, w.mask[0]
    max_rows = 1 if height == 1 else 2 if mask_rows <= 3 else 4 if mask_rows <= 5 else 8
    blocks_across = ceil_div(width * channels, vector * DEFAULT_THREADS[0])
    while max_rows > 1 and blocks_across * ceil_div(height, max_rows * DEFAULT_THREADS[1]) < MIN_BLOCKS:
        max_rows //= 2
    variants = [
        (max_rows, True),
        (ceil_div(max_rows, 2), True),
        *((num_rows, False) for num_rows in (8, 4, 2, 1) if num_rows <= max_rows),
    ]
    for num_rows, load_rows_once in variants:
        columns = {
            "vector": vector,
            "vectors_per_thread": 1,
            "rows_per_thread": num_rows,
            "load_rows_once": int(load_rows_once),
        }
        if _count_products(w, columns) <= MAX_PRODUCTS and _estimate_live_registers(w, columns) <= MAX_LIVE_REGISTERS:
            break
    return num_rows, load_rows_once


def build_filter_schedule(w: Filter, thread_tile: FilterThreadTile) -> Schedule:
    """Return the filter with these strips as a scheduled function of X, K and Y; the mask is in constant memory."""
    s = build_schedule(w, lambda arguments: FilterStripKernel(w, thread_tile, arguments).emit())
    set_memory_scope(s, K="constant")
    return s


class FilterStripKernel:
    """Emitter of the kernel; the window of a strip has the elements of an input row that it reads, in whole vectors."""

    def __init__(self, w: Filter, tile: FilterThreadTile, arguments: Mapping[str, Buffer]) -> None:
        self._w, self._tile = w, tile
        self._x, self._k, self._y = arguments.values()
        height, width, channels = w.image
        self._height, self._channels, self._row_elements = height, channels, width * channels
        # Only a signal has remaining elements.
        self._whole_vectors, self._remaining_elements = divmod(self._row_elements, tile.vector)
        halo_elements = _compute_halo_elements(w)
        self._halo_vectors = ceil_div(halo_elements, tile.vector)  # on each side of the strip
        self._window_vectors = tile.vectors_per_thread + 2 * self._halo_vectors
        # Element of the window under the first tap of the first output.
        self._first_element = self._halo_vectors * tile.vector - halo_elements
        self._strip_elements = tile.vectors_per_thread * tile.vector
        self._sums = allocate("sums", (tile.rows_per_thread, self._strip_elements), "float32")
        self._window = allocate("window", self._window_vectors * tile.vector, "float32")

    def emit(self) -> None:
        """Emit the kernel."""
        tile, (threads_x, threads_y) = self._tile, self._tile.thread_shape
        blocks_across = ceil_div(self._row_elements, self._strip_elements * threads_x)
        blocks = blocks_across * ceil_div(self._height, tile.rows_per_thread * threads_y)
        with (
            thread_axis(blocks, "blockIdx.x") as block,
            thread_axis(threads_y, "threadIdx.y") as ty,
            thread_axis(threads_x, "threadIdx.x") as tx,
        ):
            self._emit_strip(
                (block // blocks_across * threads_y + ty) * tile.rows_per_thread,
                (block % blocks_across * threads_x + tx) * tile.vectors_per_thread,
            )

    def _emit_strip(self, top: Expr, left: Expr) -> None:
        """Compute the strip from row `top` and vector `left` on."""
        num_rows, mask_rows = self._tile.rows_per_thread, self._w.mask[0]
        with unrolled_loop(num_rows, "i") as i, unrolled_loop(self._strip_elements, "lane") as lane:
            store_element(self._sums, (i, lane), T.float32(0))
        if self._tile.load_rows_once:
            with unrolled_loop(num_rows + mask_rows - 1, "line") as line:
                self._emit_load(top + line - mask_rows // 2, left)
                with unrolled_loop(num_rows, "i") as i, if_(logical_and(line - i >= 0, line - i < mask_rows)):
                    self._emit_row_products(i, line - i)
        else:
            with serial_loop(mask_rows, "r") as r, unrolled_loop(num_rows, "i") as i:
                self._emit_load(top + i + r - mask_rows // 2, left)
                self._emit_row_products(i, r)
        with unrolled_loop(num_rows, "i") as i:
            self._emit_store(top + i, left, i)

    def _emit_load(self, line: Expr, first_vector: Expr) -> None:
        """Load the window from an input row, with zeros outside of the image."""
        vector, whole_vectors, halo_vectors = self._tile.vector, self._whole_vectors, self._halo_vectors
        with unrolled_loop(self._window_vectors, "g") as g:
            index, is_row = first_vector + g, logical_and(line >= 0, line < self._height)
            is_whole = logical_and(is_row, index >= halo_vectors, index < halo_vectors + whole_vectors)
            with ir.If(is_whole):
                with ir.Then(), vectorized_loop(vector) as lane:
                    element = (index - halo_vectors) * vector + lane
                    store(self._window, g * vector + lane, self._x[self._w.element_index(line, element)])
                with ir.Else(), vectorized_loop(vector) as lane:
                    store(self._window, g * vector + lane, T.float32(0))
            if self._remaining_elements:
                is_last = logical_and(is_row, index == halo_vectors + whole_vectors)
                with if_(is_last), unrolled_loop(self._remaining_elements, "lane") as lane:
                    element = whole_vectors * vector + lane
                    store(self._window, g * vector + lane, self._x[self._w.element_index(line, element)])

    def _emit_row_products(self, i: Expr, r: Expr) -> None:
        """Add the products of the window with a row of the mask to a row of sums."""
        with unrolled_loop(self._w.mask[1], "s") as s, unrolled_loop(self._strip_elements, "lane") as lane:
            position = self._first_element + s * self._channels + lane
            product = self._window[position] * self._k[self._w.mask_index(r, s)]
            store_element(self._sums, (i, lane), self._sums[i, lane] + product)

    def _emit_store(self, line: Expr, first_vector: Expr, i: Expr) -> None:
        """Apply the epilogue to a row of sums, and store it to a row of the image."""
        w, vector, whole_vectors, sums = self._w, self._tile.vector, self._whole_vectors, self._sums
        with unrolled_loop(self._tile.vectors_per_thread, "g") as g:
            with unrolled_loop(vector, "lane") as lane:
                store_element(sums, (i, g * vector + lane), apply_epilogue(w, sums[i, g * vector + lane]))
            index, is_row = first_vector + g, line < self._height
            with if_(logical_and(is_row, index < whole_vectors)), vectorized_loop(vector) as lane:
                store_element(self._y, w.element_index(line, index * vector + lane), sums[i, g * vector + lane])
            if self._remaining_elements:
                is_last = logical_and(is_row, index == whole_vectors)
                with if_(is_last), unrolled_loop(self._remaining_elements, "lane") as lane:
                    element = whole_vectors * vector + lane
                    store_element(self._y, w.element_index(line, element), sums[i, g * vector + lane])


def _count_products(w: Filter, columns: Mapping[str, Any]) -> Any:
    """Return the number of multiplications per thread in the kernel's source."""
    outputs_per_thread = columns.get("rows_per_thread", 1) * columns["vector"] * columns["vectors_per_thread"]
    return outputs_per_thread * w.mask[1] * np.where(columns.get("load_rows_once", 1) == 1, w.mask[0], 1)


def _estimate_live_registers(w: Filter, columns: Mapping[str, Any]) -> Any:
    """Return the accumulators and inputs that a thread keeps in registers at a time."""
    return columns.get("rows_per_thread", 1) * columns["vector"] * columns[
        "vectors_per_thread"
    ] + _count_window_elements(w, columns)


def _count_window_elements(w: Filter, columns: Mapping[str, Any]) -> Any:
    """Return the elements of an input row that a strip reads, in whole vectors."""
    return columns["vector"] * (
        columns["vectors_per_thread"] + 2 * ceil_div(_compute_halo_elements(w), columns["vector"])
    )


def _compute_halo_elements(w: Filter) -> int:
    """Return the distance in elements between an output and the farthest input of its row."""
    return w.radius[1] * w.image[2]
