"""Mainloop of a Hopper kernel: TMA fills the stages of a pipeline, and warpgroups multiply them by wgmma.

Sources: CUTLASS, `include/cutlass/gemm/collective/sm90_mma_tma_gmma_ss_warpspecialized.hpp` and
`include/cutlass/conv/collective/sm90_implicit_gemm_gmma_ss_warpspecialized.hpp`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv import tensor_map as maps
from tvmconv.arithmetic import ceil_div
from tvmconv.workloads.dtypes import DTYPES

from ....tir_builder import Buffer, Expr, if_, serial_loop, to_uint32
from .accumulators import Accumulators
from .alternating_promotion import AlternatingPromotion
from .atoms import ThreadPosition, WgmmaAtom, wgmma_commit_group, wgmma_fence, wgmma_wait_group
from .frame_loaders import FrameImages
from .pipelines import OrderedSequenceBarrier, PipelineState, TmaPipeline
from .problem import Operand
from .resident_filters import ResidentFilters
from .smem_layout import MatrixDescriptor, SmemLayout
from .tap_columns import PlaneWindows
from .tile_scheduler import KRange, ResidueKRange, SlicedKRange, WorkTile
from .tma import TmaCopy
from .tma_loaders import Position, TapIterator

MAX_PROMOTIONS = 4  # per iteration of the loop over K tiles with two sets of accumulators; with more, registers spill


@dataclass(frozen=True)
class OperandTile:
    """The tile of an operand in a stage, and the TMA copies that fill it.

    The CTAs of a cluster that share the operand load a slice of its rows each. There are several copies along the rows
    if each of them has a halo.
    """

    operand: Operand
    layout: SmemLayout  # layout in shared memory; its boxes follow one another along the channels, then along taps
    offset: int  # offset in a stage in bytes
    box_channels: int  # channels per box
    boxes_per_tap: int  # boxes along the channels
    copy_rows: int  # rows per copy
    copies: int = 1  # copies along the rows
    rows_between_copies: int = 0  # rows of the operand between neighbouring copies

    def tensor_map(self) -> maps.TensorMap:
        """Return the tensor map of the copies."""
        return self.operand.loader.tensor_map(self.copy_rows, self.box_channels, self.layout.row_bytes)

    def cache_map(self) -> maps.TensorMap | None:
        """Return the tensor map of the copies of cached frames, if there are."""
        if not isinstance(self.operand.loader, FrameImages | PlaneWindows):
            return None
        return self.operand.loader.cache_map(self.copy_rows, self.box_channels, self.layout.row_bytes)

    def locate(self, first_row: Expr, group: Expr, slice_idx: Expr) -> list[Position]:
        """Compute the position of each copy of a work tile from the operand's first row in it."""
        operand, name = self.operand, self.operand.tensor
        row = operand.locate_row(group, first_row) + slice_idx * self.copy_rows
        return [
            operand.loader.locate(row + copy * self.rows_between_copies, f"{name}{copy}") for copy in range(self.copies)
        ]

    def load(
        self, stage: Expr, copy: TmaCopy, positions: list[Position], group: Expr, slice_idx: Expr, k: TapIterator
    ) -> None:
        """Issue the copies of a K tile to a stage."""
        layout, operand = self.layout, self.operand
        first_channel = operand.locate_channel(group, k.channel)
        first_box = stage + to_uint32(self.offset) if self.offset else stage
        for copy_idx, position in enumerate(positions):
            for box in range(layout.boxes):
                tap_in_copy, channel_box = divmod(box, self.boxes_per_tap)
                *outer_taps, last_tap = k.taps
                box_offset = box * layout.box_bytes + copy_idx * (layout.box_bytes // self.copies)
                destination = first_box + to_uint32(slice_idx * (self.copy_rows * layout.row_bytes) + box_offset)
                channel = first_channel + channel_box * self.box_channels
                operand.loader.load(destination, copy, position, (channel, *outer_taps, last_tap + tap_in_copy))


@dataclass(frozen=True)
class MnMajorTile(OperandTile):
    """The tile of an MN-major operand: a box has some rows of the operand, which are contiguous, and all channels.

    The CTAs of a cluster that share the operand load `copy_rows` of the channels each. The channels of several taps
    follow one another in a box.
    """

    taps_per_copy: int = 1  # taps of a K tile

    @property
    def box_rows(self) -> int:
        """Rows of the operand per box."""
        return self.layout.row_bytes // DTYPES[self.operand.dtype].itemsize

    def tensor_map(self) -> maps.TensorMap:
        """Return the tensor map of the copies, one per box."""
        return self.operand.loader.tensor_map(self.box_rows, self.copy_rows, self.layout.row_bytes)

    def locate(self, first_row: Expr, group: Expr, slice_idx: Expr) -> list[Position]:
        """Compute the position of each box of a work tile from the operand's first row in it."""
        operand, name = self.operand, self.operand.tensor
        row = operand.locate_row(group, first_row)
        return [operand.loader.locate(row + box * self.box_rows, f"{name}{box}") for box in range(self.layout.boxes)]

    def load(
        self, stage: Expr, copy: TmaCopy, positions: list[Position], group: Expr, slice_idx: Expr, k: TapIterator
    ) -> None:
        """Issue the copies of a K tile to a stage."""
        operand, layout = self.operand, self.layout
        channel = operand.locate_channel(group, k.channel)
        channels_per_tap, offset = layout.rows // self.taps_per_copy, self.offset
        slice_offset: Expr = 0
        if self.copy_rows < channels_per_tap:
            channel = channel + slice_idx * self.copy_rows
            slice_offset = slice_idx * (self.copy_rows * layout.row_bytes)
        for box, position in enumerate(positions):
            for tap in range(self.taps_per_copy):
                *outer_taps, last_tap = k.taps
                box_offset = offset + box * layout.box_bytes + tap * channels_per_tap * layout.row_bytes
                taps = (*outer_taps, last_tap + tap if tap else last_tap)
                destination = stage + to_uint32(slice_offset + box_offset)
                operand.loader.load(destination, copy, position, (channel, *taps))


@dataclass(frozen=True)
class WgmmaMainloop:
    """Loads and multiplies the K tiles of a work tile."""

    atom: WgmmaAtom  # the wgmma instruction
    m_atoms: int  # instructions of a warpgroup along M
    rows_per_atom: int  # rows of A in shared memory from one of these instructions to the next
    a: OperandTile  # tile of operand A, whose rows are divided among the warpgroups
    b: OperandTile
    block_k: int  # channels per K tile
    taps_per_copy: int = 1  # taps along a line that are multiplied from one copy of A
    rows_per_tap: int = 0  # rows of A from one of these taps to the next
    shares_columns: bool = False  # whether taps share a copy of B instead, whose rows are the columns of the product
    promotion_k_tiles: int = 0  # K tiles after which accumulators are added to promoted sums; 0: never
    promotions_per_k_tile: int = 1  # of a K tile with more products than are added before a promotion
    promotion_buffers: int = 1  # sets of accumulators; of two, one is promoted while the wgmmas of the other run
    # Wgmmas along the reduction before each promotion, if warpgroups promote at different times; 0 if they do not.
    # CTAs that do not know their number of K tiles promote at the same time.
    promotion_steps: int = 0
    num_warpgroups: int = 1  # warpgroups that share a work tile
    resident_filters: ResidentFilters | None = None  # operand B, if a CTA loads it once; None if stages have it

    @property
    def num_accumulators(self) -> int:
        """Accumulator registers per thread."""
        return self.m_atoms * self.atom.num_accumulators

    def produce(
        self,
        tile: WorkTile,
        k_range: KRange | ResidueKRange,
        tensor_maps: Sequence[Expr],
        pipeline: TmaPipeline,
        state: PipelineState,
        k: TapIterator,
    ) -> None:
        """Load the K tiles of a work tile, each as soon as its stage is empty; run by one thread."""
        cluster, (a_map, b_map, *cache_maps) = pipeline.cluster, tensor_maps
        a_positions = self.a.locate(tile.m, tile.group, cluster.rank_n)
        b_positions = [] if self.resident_filters else self.b.locate(tile.n, tile.group, cluster.rank_m)
        a_mask, b_mask = cluster.a_multicast_mask(), cluster.b_multicast_mask()
        k.seek(k_range.first, tile.residue)
        with serial_loop(k_range.count, "k_tile"):
            pipeline.producer_acquire(state.index, state.phase)
            stage, barrier = pipeline.stage_address(state.index), pipeline.full_barrier(state.index)
            a_copy, b_copy = TmaCopy(a_map, barrier, a_mask, *cache_maps), TmaCopy(b_map, barrier, b_mask)
            self.a.load(stage, a_copy, a_positions, tile.group, cluster.rank_n, k)
            self.b.load(stage, b_copy, b_positions, tile.group, cluster.rank_m, k)
            k.advance()
            state.advance()

    def load_resident_filters(self, tile: WorkTile, filter_map: Expr, k: TapIterator) -> None:
        """Load the filters of all work tiles of a CTA, which have the same channels; run by one thread."""
        filters = self.resident_filters
        assert filters
        filters.producer_expect()
        copy, positions = TmaCopy(filter_map, filters.barrier), self.b.locate(tile.n, tile.group, 0)
        k.seek(0)
        with serial_loop(filters.num_tiles, "filter_tile") as k_tile:
            self.b.load(filters.tile_address(k_tile), copy, positions, tile.group, 0, k)
            k.advance()

    def consume(
        self,
        accumulators: Accumulators,
        descriptors: tuple[MatrixDescriptor, MatrixDescriptor],
        k_range: KRange | ResidueKRange | SlicedKRange,
        pipeline: TmaPipeline,
        state: PipelineState,
        thread: ThreadPosition,
        warpgroup: Expr,
        order: OrderedSequenceBarrier | None = None,
    ) -> None:
        """Multiply the K tiles of a work tile as they arrive; run by all threads of a warpgroup.

        A warpgroup without K tiles only takes its turn. The wgmmas of one K tile are in flight while those of the next
        are issued, so a stage is released one K tile after its use.

        Args:
            accumulators: Sums of this thread.
            descriptors: Matrix descriptors of A and B.
            k_range: K tiles of this CTA.
            pipeline: Stages of the operands.
            state: Stage that is read next.
            thread: Position of this thread.
            warpgroup: Index of the warpgroup among those that share the work tile.
            order: Turns of warpgroups that compute work tiles of their own; None if all warpgroups share one.
        """
        with if_(k_range.count > 0 if k_range.may_be_empty else True):
            if self.resident_filters:
                self.resident_filters.rewind()
            if order:
                order.wait()
            stages = pipeline, state, thread
            multiply = functools.partial(
                self._multiply_k_tiles, accumulators.registers, descriptors, *stages, warpgroup
            )
            step = k_range.num_slices if isinstance(k_range, SlicedKRange) else 1
            multiply = functools.partial(multiply, step=step)
            release = functools.partial(_release_last_stage, *stages, step)
            if self.promotion_steps and isinstance(k_range.count, int):
                promotion = AlternatingPromotion(self, accumulators, descriptors, *stages, self.num_warpgroups)
                promotion.emit(warpgroup, k_range.count)
            elif self.promotion_buffers > 1:
                leave = order.arrive if order else None
                self._multiply_with_two_buffers(
                    accumulators, descriptors, *stages, warpgroup, k_range.count, on_last_issue=leave
                )
            elif self.promotions_per_k_tile > 1:
                self._multiply_with_promotions_within(accumulators, descriptors, *stages, warpgroup, k_range.count)
            elif self.promotion_k_tiles:
                self._multiply_with_promotion(accumulators, k_range.count, multiply, release)
            else:
                multiply(k_range.count)
            if order and self.promotion_buffers == 1:  # all wgmmas of the work tile are issued
                order.arrive()
            if not self.promotion_k_tiles:
                release()
        if order and k_range.may_be_empty:
            with if_(k_range.count == 0):
                order.skip()

    def _multiply_k_tiles(
        self,
        registers: Sequence[Expr],
        descriptors: tuple[MatrixDescriptor, MatrixDescriptor],
        pipeline: TmaPipeline,
        state: PipelineState,
        thread: ThreadPosition,
        warpgroup: Expr,
        count: Expr,
        step: int = 1,
    ) -> None:
        """Multiply `count` K tiles, every `step`-th one; the wgmmas of the last one stay in flight, and its stage is
        not released.
        """
        with serial_loop(count, "k_tile") as k_tile:
            pipeline.consumer_wait(state.index, state.phase)
            stage = pipeline.stage_address(state.index)
            self.multiply(registers, descriptors, stage, warpgroup, k_tile > 0)
            with if_(k_tile > 0):
                wgmma_wait_group(1)
                pipeline.consumer_release(state.index_before(step), thread)
            if step == 1:
                state.advance()
            else:
                state.skip(step)

    def _multiply_with_promotion(
        self,
        accumulators: Accumulators,
        count: Expr,
        multiply: Callable[[Expr], None],
        release: Callable[[], None],
    ) -> None:
        """Multiply K tiles, and add the accumulators to the promoted sums after some of them and at the end.

        The tensor cores wait for a promotion, unless another warpgroup uses them meanwhile.

        Args:
            accumulators: Sums of this thread.
            count: Number of K tiles.
            multiply: Issues the wgmmas of the next K tiles, as many as its argument.
            release: Waits for the wgmmas, and releases the stage of the last one.
        """
        interval = self.promotion_k_tiles
        accumulators.clear_promoted()
        with serial_loop(ceil_div(count, interval), "promotion") as promotion:
            is_exact = isinstance(count, int) and count % interval == 0
            k_tiles = interval if is_exact else T.min(interval, count - promotion * interval)
            multiply(k_tiles)
            release()
            accumulators.promote()

    def _multiply_with_promotions_within(
        self,
        accumulators: Accumulators,
        descriptors: tuple[MatrixDescriptor, MatrixDescriptor],
        pipeline: TmaPipeline,
        state: PipelineState,
        thread: ThreadPosition,
        warpgroup: Expr,
        count: Expr,
    ) -> None:
        """Multiply K tiles, and add the accumulators to the promoted sums several times in each."""
        accumulators.clear_promoted()
        with serial_loop(count, "k_tile"):
            self.set_stage(descriptors, pipeline.stage_address(state.index), warpgroup)
            pipeline.consumer_wait(state.index, state.phase)
            for k_steps in self._list_promoted_steps():
                self.issue(accumulators.registers, descriptors, k_steps, False)
                wgmma_wait_group(0)
                if k_steps[-1] == self.k_steps[-1]:
                    pipeline.consumer_release(state.index, thread)
                accumulators.promote()
            state.advance()

    def _list_promoted_steps(self) -> list[range]:
        """Return the steps of a K tile that are added before each of its promotions."""
        steps_per_promotion = ceil_div(len(self.k_steps), self.promotions_per_k_tile)
        return [
            self.k_steps[first : first + steps_per_promotion]
            for first in range(0, len(self.k_steps), steps_per_promotion)
        ]

    def _multiply_with_two_buffers(
        self,
        accumulators: Accumulators,
        descriptors: tuple[MatrixDescriptor, MatrixDescriptor],
        pipeline: TmaPipeline,
        state: PipelineState,
        thread: ThreadPosition,
        warpgroup: Expr,
        count: Expr,
        *,
        on_last_issue: Callable[[], None] | None,
    ) -> None:
        """Multiply K tiles, and promote one of two sets of accumulators while the wgmmas of the other run.

        The sets take turns: wgmmas of the next products are issued first, and those before are then complete when one
        group remains. No wgmmas are in flight across iterations of a loop, where ptxas would let each of them wait for
        the one before (C7514). An iteration therefore has several K tiles, and the tensor cores wait for the last
        promotion of each.

        Args:
            accumulators: Sums of this thread.
            descriptors: Matrix descriptors of A and B.
            pipeline: Stages of the operands.
            state: Stage that is read next.
            thread: Position of this thread.
            warpgroup: Index of the warpgroup among those that share the work tile.
            count: Number of K tiles.
            on_last_issue: Function that is called once all wgmmas are issued; None for none.
        """

        def multiply_k_tiles(num_k_tiles: int, *, is_last: bool = False) -> None:
            buffer, parts = 1, self._list_promoted_steps()
            for tile, part in itertools.product(range(num_k_tiles), range(len(parts))):
                if part == 0:
                    self.set_stage(descriptors, pipeline.stage_address(state.index), warpgroup)
                    pipeline.consumer_wait(state.index, state.phase)
                buffer = 1 - buffer
                first_register = buffer * accumulators.count
                self.issue(accumulators.registers, descriptors, parts[part], False, first_register)
                if tile or part:
                    wgmma_wait_group(1)
                    if part == 0:
                        pipeline.consumer_release(state.previous_index, thread)
                    accumulators.promote(1 - buffer)
                if part == len(parts) - 1:
                    state.advance()
            if is_last and on_last_issue:
                on_last_issue()
            _release_last_stage(pipeline, state, thread)
            accumulators.promote(buffer)

        accumulators.clear_promoted()
        max_k_tiles = max(1, MAX_PROMOTIONS // self.promotions_per_k_tile)
        if isinstance(count, int):
            num_iterations = ceil_div(count, max_k_tiles)
            k_tiles = ceil_div(count, num_iterations)
            if count > k_tiles:
                with serial_loop((count - 1) // k_tiles, "k_tiles"):
                    multiply_k_tiles(k_tiles)
            multiply_k_tiles((count - 1) % k_tiles + 1, is_last=True)
            return
        with serial_loop(count // max_k_tiles, "k_tiles"):
            multiply_k_tiles(max_k_tiles)
        with serial_loop(count % max_k_tiles, "k_tile"):
            multiply_k_tiles(1)
        if on_last_issue:
            on_last_issue()

    def sums(self, accumulators: Accumulators, k_range: KRange | ResidueKRange | SlicedKRange) -> Sequence[Expr]:
        """Return the sums of a work tile, which are zeros if it has no K tiles.

        Zeros are not stored to accumulators: ptxas would let each wgmma wait for the one before (warning C7510).
        """
        sums = accumulators.list_sums()
        return [T.Select(k_range.count > 0, each, T.float32(0)) for each in sums] if k_range.may_be_empty else sums

    def multiply(
        self,
        accumulators: Buffer,
        descriptors: tuple[MatrixDescriptor, MatrixDescriptor],
        stage: Expr,
        warpgroup: Expr,
        accumulates: Expr,
    ) -> None:
        """Issue the wgmmas of a stage as one group; the first of them overwrite the sums unless `accumulates`."""
        self.set_stage(descriptors, stage, warpgroup)
        self.issue(accumulators, descriptors, self.k_steps, accumulates)

    @property
    def k_steps(self) -> range:
        """First products of the wgmmas of a K tile along the reduction."""
        return range(0, self.taps_per_copy * self.block_k, self.atom.k)

    def set_stage(self, descriptors: tuple[MatrixDescriptor, MatrixDescriptor], stage: Expr, warpgroup: Expr) -> None:
        """Have the descriptors point to this warpgroup's rows of A, and to B, in a stage; once for each K tile."""
        a_descriptor, b_descriptor = descriptors
        rows_per_warpgroup = self.m_atoms * self.rows_per_atom
        a_descriptor.set_address(
            stage + to_uint32(warpgroup * self.a.layout.operand_offset(rows_per_warpgroup, 0, self.atom.itemsize))
        )
        filters = self.resident_filters
        b_descriptor.set_address(filters.advance() if filters else stage + to_uint32(self.b.offset))

    def issue(
        self,
        accumulators: Buffer,
        descriptors: tuple[MatrixDescriptor, MatrixDescriptor],
        k_steps: range,
        accumulates: Expr,
        first_register: int = 0,
    ) -> None:
        """Issue wgmmas of a K tile as one group; the first of them overwrite the sums unless `accumulates`."""
        a_descriptor, b_descriptor = descriptors
        a_layout, b_layout, itemsize = self.a.layout, self.b.layout, self.atom.itemsize
        wgmma_fence()
        for k in k_steps:
            tap, channel = divmod(k, self.block_k)
            for m_atom in range(self.m_atoms):
                row, column = m_atom * self.rows_per_atom, tap * self.rows_per_tap
                a_operand, b_operand = (row + column, channel), (0, k)
                if self.shares_columns:
                    a_operand, b_operand = (row, k), (column, channel)
                first = first_register + m_atom * self.atom.num_accumulators
                self.atom.emit(
                    [accumulators[first + e] for e in range(self.atom.num_accumulators)],
                    a_descriptor.encode_operand(a_layout.operand_offset(*a_operand, itemsize)),
                    b_descriptor.encode_operand(b_layout.operand_offset(*b_operand, itemsize)),
                    True if k > k_steps[0] else accumulates,
                )
        wgmma_commit_group()


def _release_last_stage(pipeline: TmaPipeline, state: PipelineState, thread: ThreadPosition, step: int = 1) -> None:
    """Wait for all wgmmas of this warpgroup, and release the stage of the last K tile, `step` stages ago."""
    wgmma_wait_group(0)
    pipeline.consumer_release(state.index_before(step), thread)
