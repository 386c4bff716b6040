"""A thread's walk down the rows of an input, for depthwise convolutions whose sums stay in registers.

Each row is read once, and added to all output rows whose filter covers it. Taps are in registers in float32. A warp of
a persistent CTA copies tiles of rows to shared memory ahead of the threads that compute.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.target import WARP_SIZE
from tvmconv.workloads import Conv

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
from .row_walk_config import COPY_BYTES, STAGE_ALIGNMENT_BYTES, RowWalkConfig, count_lead_lines, count_period_lines
from .tensor_cores.gemm.atoms import named_barrier_sync
from .tensor_cores.gemm.cta import Cta, allocate_smem, open_cta
from .tensor_cores.gemm.epilogue_ops import EpilogueOps
from .tensor_cores.gemm.pipelines import PipelineState, TmaPipeline
from .tensor_cores.gemm.prologue import emit_prologue

COMPUTE_BARRIER = 1  # named barrier of the threads that compute


@dataclass(frozen=True)
class RowWalkCta:
    """A CTA, whose warps share arguments, shared memory and the stages of a pipeline."""

    config: RowWalkConfig
    arguments: dict[str, Buffer]
    ops: EpilogueOps
    position: Cta  # of the thread in the grid
    smem: Expr  # address of the shared memory
    pipeline: TmaPipeline
    state: PipelineState  # of the threads that compute

    @property
    def thread(self) -> Expr:
        """Index of the thread."""
        return self.position.thread.thread

    @property
    def first_channel(self) -> Expr:
        """First channel of the CTA."""
        return self.position.index % int(self.config.channel_blocks) * int(self.config.channels)

    def locate_tile(self, tile_round: Expr) -> Expr:
        """Return the index of the CTA's tile in a round."""
        return self.position.index // int(self.config.channel_blocks) + tile_round * int(self.config.ctas_per_block)

    def load_taps(self, lane_channel: Expr, vector: int, *, is_flipped: bool = False) -> Buffer:
        """Load the taps of a thread's channels, widened to float32: taps × channels; run by all threads that compute.

        The filters of a CTA's channels are contiguous in global memory. They pass through shared memory, because
        threads that load their own filters touch a line of memory each.

        Args:
            lane_channel: First channel of the thread, relative to that of the CTA; a multiple of `vector`.
            vector: Channels of the thread.
            is_flipped: Whether the taps of K are in the opposite order.
        """
        config, w = self.config, self.config.w
        num_taps, itemsize = math.prod(w.kernel), config.itemsize
        smem = self.smem + to_uint32(int(config.filter_offset_bytes))
        self._copy_filters(smem)
        taps = allocate("taps", num_taps * vector, "float32")
        if w.C % int(config.channels):  # a thread whose channels do not exist reads the last ones
            lane_channel = T.min(lane_channel, w.C - vector - self.first_channel)
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

    def _copy_filters(self, smem: Expr) -> None:
        """Copy the filters of the CTA's channels to shared memory, at an address that is a multiple of 16."""
        config, w = self.config, self.config.w
        num_taps, itemsize, num_threads = math.prod(w.kernel), config.itemsize, int(config.compute_threads)
        block_taps = int(config.channels) * num_taps
        copied_bytes = math.gcd(block_taps * itemsize, COPY_BYTES)
        copied, elements = allocate("copied_taps", COPY_BYTES // 4, "uint32"), copied_bytes // itemsize
        first = Register("first_tap", value=self.first_channel * num_taps).value
        with (
            items_loop(block_taps // elements, self.thread, num_threads) as item,
            # Channels that do not exist have no filters; their threads store no results.
            if_(is_below(first + item * elements, w.C * num_taps, block_taps)),
        ):
            load_global(copied, self.arguments["K"], first + item * elements, elements)
            store_shared(smem + to_uint32(item * copied_bytes), copied, copied_bytes)
        named_barrier_sync(COMPUTE_BARRIER, num_threads)

    def release_stage(self) -> None:
        """Release the stage that a warp has read; run by all threads that compute."""
        self.pipeline.warp_release(self.state.index, self.position.thread)

    def emit_roles(self, load: Callable[[], None], compute: Callable[[], None]) -> None:
        """Emit what the warps do: one thread loads all tiles, of a warp of its own if there are several."""
        compute_threads = int(self.config.compute_threads)
        if not self.config.is_persistent:
            with if_(self.thread == 0):
                load()
            compute()
            return
        with if_(self.thread < compute_threads):
            compute()
        with self.position.thread.elect_in_warp(compute_threads // WARP_SIZE):
            load()


@contextmanager
def open_row_walk(
    config: RowWalkConfig, arguments: dict[str, Buffer], state_name: str, tensor_maps: Sequence[Expr] = ()
) -> Iterator[RowWalkCta]:
    """Open the loops over CTAs and threads, and initialize the pipeline of a CTA.

    Args:
        config: The config.
        arguments: Arguments of the kernel.
        state_name: Prefix of the names of the registers of the pipeline's state.
        tensor_maps: Tensor maps of what TMA copies.
    """
    compute_threads, stages = int(config.compute_threads), int(config.buffers)
    with open_cta(int(config.num_blocks), int(config.num_threads), 1, splits_in_cluster=False) as cta:
        smem = allocate_smem(int(config.smem_bytes), STAGE_ALIGNMENT_BYTES)
        barriers = smem + to_uint32(int(config.barrier_offset_bytes))
        sizes = int(config.stage_bytes), barriers, stages, int(config.copy_bytes)
        pipeline = TmaPipeline(smem, *sizes, num_consumers=compute_threads // WARP_SIZE)
        emit_prologue(cta.thread, [pipeline], tensor_maps, compute_threads if config.is_persistent else 0)
        ops = EpilogueOps.from_workload(config.w).bind_tensor_args(arguments, uses_registers=True)
        yield RowWalkCta(config, arguments, ops, cta, smem, pipeline, PipelineState(state_name, stages))


def locate_item(thread: Expr, num_items: int, num_threads: int) -> Expr:
    """Return the index of a thread's item; a thread without one computes the first, and does not store it."""
    if num_items == num_threads:
        return thread
    return Register("item", value=T.Select(thread < num_items, thread, 0)).value


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
