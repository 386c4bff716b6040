"""Loader of channels-first pixels by cp.async, for filters of one tap and planes whose rows TMA cannot address.

The strides of a tensor map are multiples of 16 bytes, but a plane of 14 × 14 pixels in 16 bits has 392. The pixels of
the batch are one line, as for TMA: a row of an MN-major tile has the pixels of one channel. Threads copy vectors of
pixels, of 4 to 16 bytes, that do not cross the end of a plane. Each thread copies the same pixels of several channels,
so that addresses differ by constants.

cp.async completes in the order of commit groups. A thread waits for the group of an earlier K tile after it has started
the copies of the next ones, and arrives at the full barrier. (Sources: PTX ISA, "cp.async"; CUTLASS,
`include/cutlass/gemm/collective/sm90_mma_multistage_gmma_ss_warpspecialized.hpp`.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.target import WARP_SIZE
from tvmconv.workloads import Conv
from tvmconv.workloads.dtypes import get_itemsize

from ....tir_builder import Buffer, Expr, Register, emit_call, if_, serial_loop, to_uint32
from .cp_async import MIN_COPY_BYTES, cp_async
from .pipelines import AsyncPipeline, PipelineState
from .smem_layout import CHUNK_BYTES
from .tile_scheduler import KRange, ResidueKRange, WorkTile
from .tma import TmaCopy
from .tma_loaders import TapIterator
from .wgmma_mainloop import MnMajorTile, WgmmaMainloop

NUM_GATHER_WARPS = 4
NUM_GATHER_THREADS = NUM_GATHER_WARPS * WARP_SIZE
MAX_PENDING_STAGES = 4  # stages whose copies are in flight at a time


def count_vector_pixels(pixels: int, itemsize: int) -> int:
    """Return the pixels of the widest vector that does not cross the end of a plane; 0 if it is too small to copy."""
    vector = math.gcd(pixels, CHUNK_BYTES // itemsize)
    return vector if vector * itemsize >= MIN_COPY_BYTES else 0


@dataclass(frozen=True)
class PlaneGather:
    """Copies the pixels of K tiles."""

    w: Conv  # the convolution, channels last
    tile: MnMajorTile  # tile of operand A
    source: Buffer  # the array X, channels first
    thread: Expr  # index of this thread among those that copy

    @property
    def _pixels(self) -> int:
        return math.prod(self.w.input_size)

    @property
    def _vector(self) -> int:
        return count_vector_pixels(self._pixels, get_itemsize(self.w.storage))

    @property
    def _vectors_per_row(self) -> int:
        return self.tile.box_rows // self._vector

    def locate(self, first_row: Expr) -> list[Expr]:
        """Compute the index of this thread's first element in each box of a work tile."""
        w, pixels, last_row = self.w, self._pixels, self.w.N * self._pixels - self._vector
        channel = self.thread // self._vectors_per_row
        indices = []  # rows past the end repeat the last vector
        for box in range(self.tile.layout.boxes):
            row = first_row + box * self.tile.box_rows + self.thread % self._vectors_per_row * self._vector
            row = Register("row", value=T.min(row, last_row)).value
            index = (row // pixels * w.C + channel) * pixels + row % pixels
            indices.append(Register(f"box_{box}", value=index).value)
        return indices

    def load(self, stage: Expr, indices: list[Expr], first_channel: Expr, channel: Expr) -> None:
        """Start the copies of a K tile.

        Args:
            stage: Shared-memory address of the stage.
            indices: Result of `locate`.
            first_channel: First channel of the K tile in X.
            channel: The same channel, counted from the first one of its group.
        """
        layout, channels = self.tile.layout, self.w.C // self.w.groups
        vector_bytes = self._vector * get_itemsize(self.w.storage)
        rows_per_pass = NUM_GATHER_THREADS // self._vectors_per_row
        first_row = self.thread // self._vectors_per_row
        column_bytes = self.thread % self._vectors_per_row * vector_bytes
        base = stage + to_uint32(self.tile.offset) + to_uint32(column_bytes % CHUNK_BYTES)
        for box, index in enumerate(indices):
            for row in range(0, layout.rows, rows_per_pass):
                offset = layout.swizzled_offset(first_row + row, column_bytes // CHUNK_BYTES)
                element, is_inside = index + (first_channel + row) * self._pixels, True
                if channels % layout.rows:
                    is_inside = channel + (first_row + row) < channels
                    element = T.Select(is_inside, element, 0)
                destination = base + offset + to_uint32(box * layout.box_bytes)
                cp_async(destination, self.source, element, vector_bytes, is_inside)


class PendingArrivals:
    """Arrivals of a thread at the full barriers of stages that it fills by cp.async.

    Args:
        pipeline: The stages.
        num_held_stages: Stages that have to be full before the first of them is released.
    """

    def __init__(self, pipeline: AsyncPipeline, num_held_stages: int) -> None:
        self._max_pending = max(0, min(pipeline.stages - num_held_stages, MAX_PENDING_STAGES))
        self._pipeline = pipeline
        self._state, self._pending = PipelineState("arrival", pipeline.stages), Register("pending", value=0)

    def commit(self) -> None:
        """Commit the copies of a stage, and arrive for an earlier one if enough are in flight."""
        emit_call(T.ptx.cp.async_.commit_group())
        self._pending.set(self._pending.value + 1)
        with if_(self._pending.value > self._max_pending):
            self._arrive(self._max_pending)
            self._pending.set(self._max_pending)

    def drain(self) -> None:
        """Arrive for all stages."""
        for pending in reversed(range(self._max_pending)):
            with if_(self._pending.value > pending):
                self._arrive(pending)

    def _arrive(self, pending: int) -> None:
        emit_call(T.ptx.cp.async_.wait_group(pending))
        self._pipeline.producer_commit(self._state.index)
        self._state.advance()


def produce_by_gather(
    gather: PlaneGather,
    mainloop: WgmmaMainloop,
    tile: WorkTile,
    k_range: KRange | ResidueKRange,
    filter_map: Expr,
    pipeline: AsyncPipeline,
    state: PipelineState,
    arrivals: PendingArrivals,
    k: TapIterator,
) -> None:
    """Load the K tiles of a work tile: pixels by all threads, and filters by TMA; run by all threads that copy."""
    indices, b, cluster = gather.locate(tile.m), mainloop.b, pipeline.cluster
    positions = b.locate(tile.n, tile.group, cluster.rank_m)
    k.seek(k_range.first)
    with serial_loop(k_range.count, "k_tile"):
        pipeline.producer_acquire(state.index, state.phase)
        stage = pipeline.stage_address(state.index)
        with if_(gather.thread == 0):
            pipeline.producer_expect(state.index)
            copy = TmaCopy(filter_map, pipeline.full_barrier(state.index), cluster.b_multicast_mask())
            b.load(stage, copy, positions, tile.group, cluster.rank_m, k)
        gather.load(stage, indices, mainloop.a.operand.locate_channel(tile.group, k.channel), k.channel)
        arrivals.commit()
        k.advance()
        state.advance()
