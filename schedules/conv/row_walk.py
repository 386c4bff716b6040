"""A thread's walk down the rows of an input, for depthwise convolutions whose sums stay in registers.

Each row is read once, and added to all output rows whose filter covers it. Taps are in registers in float32.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.arithmetic import ceil_div
from tvmconv.target import H200
from tvmconv.workloads import Conv
from tvmconv.workloads.dtypes import get_itemsize

from ..tir_builder import (
    Buffer,
    Expr,
    Register,
    allocate,
    if_,
    is_below,
    items_loop,
    load_global,
    load_shared,
    serial_loop,
    store,
    store_shared,
    to_uint32,
    unpack,
)
from .tensor_cores.gemm.atoms import named_barrier_sync

COPY_BYTES = 16  # of which the innermost axis of a copy by TMA has a multiple
CACHE_RATIOS = 0.95, 1.3  # of the bytes of the arrays and the L2 cache, between which eviction makes kernels faster
INPUT_EVICTIONS = NORMAL, FIRST = "normal", "first"  # when lines of X leave the L2 cache


def count_lead_lines(w: Conv) -> int:
    """Return the rows of X before the one that completes an output row, from its first one on."""
    return (w.kernel[0] - 1) * w.dilation[0]


def count_period_lines(w: Conv) -> int:
    """Return the rows of X after which a walk repeats itself: those of the sums under way."""
    return ceil_div(count_lead_lines(w) + 1, w.stride[0]) * w.stride[0]


def count_periods(w: Conv, end_line: Any, period_lines: Any) -> Any:
    """Return the rounds of a loop over rows, which begins after the lead and ends before a row."""
    return np.maximum(0, end_line - count_lead_lines(w)) // period_lines


def competes_for_cache(w: Conv) -> bool:
    """Return whether the arrays exceed the L2 cache by little, so that Y stays there if X leaves it first."""
    low, high = CACHE_RATIOS
    return bool(low < w.min_bytes / H200.architecture.l2_bytes <= high)


def has_short_padding(w: Conv) -> bool:
    """Return whether a walk can leave out the rows above an image: each output row begins before one is complete."""
    return w.pad_low[0] <= max(0, count_lead_lines(w) - w.dilation[0])


def load_taps(
    w: Conv,
    filters: Buffer,
    smem: Expr,
    *,
    first_channel: Expr,
    lane_channel: Expr,
    num_channels: int,
    vector: int,
    thread: Expr,
    num_threads: int,
    barrier: int,
    is_flipped: bool = False,
) -> Buffer:
    """Load the taps of a thread's channels, widened to float32: taps × channels.

    The filters of a CTA's channels are contiguous in global memory. They pass through shared memory, because threads
    that load their own filters touch a line of memory each.

    Args:
        w: The convolution.
        filters: Array K.
        smem: Address of shared memory for the filters, a multiple of 16.
        first_channel: First channel of the CTA.
        lane_channel: First channel of the thread, relative to that of the CTA; a multiple of `vector`.
        num_channels: Channels of the CTA.
        vector: Channels of the thread.
        thread: Index of the thread.
        num_threads: Threads that call this function.
        barrier: Named barrier for these threads.
        is_flipped: Whether the taps of K are in the opposite order.
    """
    num_taps, itemsize = math.prod(w.kernel), get_itemsize(w.storage)
    block_taps = num_channels * num_taps
    copied_bytes = math.gcd(block_taps * itemsize, COPY_BYTES)
    copied, elements = allocate("copied_taps", COPY_BYTES // 4, "uint32"), copied_bytes // itemsize
    first = Register("first_tap", value=first_channel * num_taps).value
    with (
        items_loop(block_taps // elements, thread, num_threads) as item,
        # Channels that do not exist have no filters; their threads store no results.
        if_(is_below(first + item * elements, w.C * num_taps, block_taps)),
    ):
        load_global(copied, filters, first + item * elements, elements)
        store_shared(smem + to_uint32(item * copied_bytes), copied, copied_bytes)
    named_barrier_sync(barrier, num_threads)
    taps = allocate("taps", num_taps * vector, "float32")
    if w.C % num_channels:  # a thread whose channels do not exist reads the last ones
        lane_channel = T.min(lane_channel, w.C - vector - first_channel)
    address = Register("taps_address", "uint32", smem + to_uint32(lane_channel * (num_taps * itemsize))).value
    nbytes = num_taps * vector * itemsize
    part = math.gcd(nbytes, COPY_BYTES)  # the alignment of a thread's taps
    words = allocate("tap_words", COPY_BYTES // 4, "uint32")
    for offset in range(0, nbytes, part):
        load_shared(words, address + to_uint32(offset), part)
        for i, value in enumerate(unpack(words, part // itemsize, w.storage), offset // itemsize):
            e, tap = divmod(i, num_taps)
            store(taps, (num_taps - 1 - tap if is_flipped else tap) * vector + e, value)
    return taps


class RowWalk(ABC):
    """A walk down the rows of a window of X, with the sums of the output rows under way.

    The sums of an output row are at its index modulo the number of rows under way. Rows after the first complete output
    repeat themselves, so that a loop over them has the same registers in each round.

    Args:
        w: The convolution.
        taps: Taps in float32: taps × channels.
        strip: Output columns of the thread.
        vector: Channels of the thread.
        rows: Output rows.
        period_lines: Rows of X in a round of the loop, a multiple of those after which the walk repeats itself.
        num_periods: Rounds of the loop.
    """

    def __init__(
        self, w: Conv, taps: Buffer, *, strip: int, vector: int, rows: int, period_lines: int, num_periods: int
    ) -> None:
        self.w, self.taps, self.strip, self.vector, self.rows = w, taps, strip, vector, rows
        self.period_lines, self.num_periods = period_lines, num_periods
        self.live_rows = count_period_lines(w) // w.stride[0]
        strip_columns = (strip - 1) * w.stride[1] + (w.kernel[1] - 1) * w.dilation[1] + 1
        self.sums = allocate("sums", self.live_rows * strip * vector, "float32")
        self.values = allocate("row", strip_columns * vector, "float32")

    @property
    def lines(self) -> range:
        """Rows of the window that are in memory; others are zero."""
        return range((self.rows - 1) * self.w.stride[0] + count_lead_lines(self.w) + 1)

    @property
    def columns(self) -> range:
        """Columns of the strip's window that are loaded; others are zero for all threads."""
        w = self.w
        return range((self.strip - 1) * w.stride[1] + (w.kernel[1] - 1) * w.dilation[1] + 1)

    @abstractmethod
    def begin_line(self, line: int) -> None:
        """Wait for a row of the window, which is relative to that of an output row, if it is not there yet."""

    @abstractmethod
    def load_line(self, line: int, first_row: Expr) -> None:
        """Load a row of the window, relative to that of an output row, to `values` in float32."""

    @abstractmethod
    def end_line(self, line: int, *, is_last: bool) -> None:
        """Note that a row is in registers; `is_last`: the last one of the window."""

    @abstractmethod
    def store_row(self, row: Expr, slot: int) -> None:
        """Store an output row, whose sums are in a slot."""

    def run(self) -> None:
        """Walk down all rows."""
        lead, step = count_lead_lines(self.w), self.w.stride[0]
        num_lines = (self.rows - 1) * step + lead + 1
        looped = self.num_periods * self.period_lines
        for line in range(lead):
            self._add_line(line, 0)
        if looped:
            with serial_loop(self.num_periods, "period") as period:
                first_row = Register("first_row", value=period * (self.period_lines // step)).value
                for line in range(lead, lead + self.period_lines):
                    self._add_line(line, first_row)
        for line in range(lead + looped, num_lines):
            self._add_line(line - looped, looped // step)

    def _add_line(self, line: int, first_row: Expr) -> None:
        """Add a row of the window, relative to that of an output row, and store the output rows that it completes."""
        (height, _), (step, _), (dilation, _) = self.w.kernel, self.w.stride, self.w.dilation
        is_looped = not isinstance(first_row, int)
        base = 0 if is_looped else int(first_row)
        candidates = [(r, *divmod(line - r * dilation, step)) for r in range(height)]
        users = [(r, y) for r, y, remainder in candidates if remainder == 0 and 0 <= y < self.rows - base]
        window_line = line + base * step
        if not is_looped and window_line not in self.lines:
            return
        self.begin_line(line)
        if users:
            self.load_line(line, first_row)
        self.end_line(line, is_last=not is_looped and window_line == self.lines[-1])
        for r, y in users:
            taps = range(height) if is_looped else self._list_taps(base + y)
            self._add_products(r, y % self.live_rows, begins=r == taps[0])
        for r, y in users:
            taps = range(height) if is_looped else self._list_taps(base + y)
            if r == taps[-1]:
                self.store_row(first_row + y, y % self.live_rows)

    def _list_taps(self, row: int) -> list[int]:
        """Return the rows of the filter that meet rows in memory, for an output row."""
        (height, _), (step, _), (dilation, _) = self.w.kernel, self.w.stride, self.w.dilation
        return [r for r in range(height) if row * step + r * dilation in self.lines]

    def _add_products(self, r: int, slot: int, *, begins: bool) -> None:
        """Multiply the loaded row by a row of the filter; the first one begins the sums of an output row."""
        w, width, vector = self.w, self.w.kernel[1], self.vector
        for j in range(self.strip):
            columns = {s: j * w.stride[1] + s * w.dilation[1] for s in range(width)}
            columns = {s: column for s, column in columns.items() if column in self.columns}
            for e in range(vector):
                place, is_first = (slot * self.strip + j) * vector + e, begins
                for s, column in columns.items():
                    product = self.values[column * vector + e] * self.taps[(r * width + s) * vector + e]
                    store(self.sums, place, product if is_first else self.sums[place] + product)
                    is_first = False
                if is_first:  # no column is in memory
                    store(self.sums, place, T.float32(0))
