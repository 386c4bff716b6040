"""Mainloop whose filter taps share a tile of halo rows: X is loaded once per block of channels, not once per tap.

Threads fill the stages of the halo rows, and TMA those of the filters, one tap per stage. A warpgroup waits for the
halo rows of a block of channels, and multiplies the taps as their filters arrive.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from ....tir_builder import Buffer, Expr, Register, if_, serial_loop, to_uint32
from .atoms import ThreadPosition, WgmmaAtom, wgmma_commit_group, wgmma_fence, wgmma_wait_group
from .halo_image import HaloImage
from .halo_loader import HaloLoader
from .pipelines import AsyncPipeline, PipelineState, TmaPipeline
from .smem_layout import MatrixDescriptor, SmemLayout
from .tile_scheduler import Cluster, KRange, WorkTile
from .tma import TmaCopy
from .wgmma_mainloop import OperandTile

Operands = TypeVar("Operands")


@dataclass(frozen=True)
class HaloMainloop:
    """Loads and multiplies the channel blocks of a work tile."""

    atom: WgmmaAtom  # the wgmma instruction
    m_atoms: int  # instructions of a warpgroup along M
    image: HaloImage  # the halo rows
    halo_layout: SmemLayout  # layout of a stage of halo rows, in one box
    filters: OperandTile  # tile of the filters of a tap, in one box
    block_k: int  # channels per block

    @property
    def num_accumulators(self) -> int:
        """Accumulator registers per thread."""
        return self.m_atoms * self.atom.num_accumulators

    @property
    def num_taps(self) -> int:
        """Taps of the filter."""
        return math.prod(self.image.w.kernel)

    def order_operands(self, halo: Operands, filters: Operands) -> tuple[Operands, Operands]:
        """Return what belongs to the operands A and B of the product: halo rows and filters."""
        return halo, filters

    @property
    def plane_rows(self) -> int:
        """Halo rows of a plane in shared memory."""
        return self.halo_layout.rows // self.image.num_planes

    @property
    def operand_layouts(self) -> tuple[SmemLayout, SmemLayout]:
        """Layouts of the operands A and B in shared memory."""
        return self.order_operands(self.halo_layout, self.filters.layout)

    def split_tap(self, tap: Expr) -> list[Expr]:
        """Return a tap along each spatial axis from its index."""
        kernel = self.image.w.kernel
        return [tap // math.prod(kernel[axis + 1 :]) % size for axis, size in enumerate(kernel)]

    def produce_input(
        self,
        loader: HaloLoader,
        tile: WorkTile,
        k_range: KRange,
        thread: Expr,
        pipeline: AsyncPipeline,
        state: PipelineState,
    ) -> None:
        """Load the halo rows of the channel blocks of a work tile; run by all loading threads."""
        first_vector = loader.locate(tile.m)
        with serial_loop(k_range.count, "k_block") as k_block:
            channel, stage = (k_range.first + k_block) * self.block_k, (state.index, state.phase)
            loader.load(tile.m, first_vector, tile.group, channel, thread, pipeline, stage)
            pipeline.producer_commit(state.index)
            state.advance()

    def locate_filters(self, tile: WorkTile, cluster: Cluster) -> tuple[Expr, Expr, Expr]:
        """Return the first filter of a work tile, the part of its filters that a CTA loads, and their multicast mask.

        The mask has the CTAs of a cluster with the same filters; it is None if there is only this one.
        """
        return tile.n, cluster.rank_m, cluster.b_multicast_mask()

    def produce_filters(
        self, tile: WorkTile, k_range: KRange, tensor_map: Expr, pipeline: TmaPipeline, state: PipelineState
    ) -> None:
        """Load the filters of all taps of each channel block; run by one thread.

        The CTAs of a cluster with the same filters load equal parts of them, and send each part to all of them.
        """
        filters, (first_filter, part, mask) = self.filters, self.locate_filters(tile, pipeline.cluster)
        (position,) = filters.locate(first_filter, tile.group, part)
        offset = to_uint32(part * (filters.copy_rows * filters.layout.row_bytes))
        with (
            serial_loop(k_range.count, "k_block") as k_block,
            serial_loop(self.num_taps, "tap") as tap,
        ):
            pipeline.producer_acquire(state.index, state.phase)
            copy = TmaCopy(tensor_map, pipeline.full_barrier(state.index), mask)
            k = ((k_range.first + k_block) * self.block_k, *self.split_tap(tap))
            filters.operand.loader.load(pipeline.stage_address(state.index) + offset, copy, position, k)
            state.advance()

    def consume(
        self,
        accumulators: Buffer,
        k_range: KRange,
        pipelines: tuple[TmaPipeline, TmaPipeline],
        states: tuple[PipelineState, PipelineState],
        thread: ThreadPosition,
        warpgroup: Expr,
    ) -> None:
        """Multiply the channel blocks of a work tile as they arrive; run by all threads of a warpgroup.

        The wgmmas of one tap are in flight while those of the next are issued. A stage is released one tap after its
        use: the halo rows of a block when those of the next one have arrived, in another stage.

        Args:
            accumulators: Sums of this thread.
            k_range: Channel blocks of this CTA.
            pipelines: Stages of the halo rows, and of the filters.
            states: Stages that are read next.
            thread: Position of this thread.
            warpgroup: Index of the warpgroup in the CTA.
        """
        (halo_pipeline, filter_pipeline), (halo_state, filter_state) = pipelines, states
        descriptors = tuple(MatrixDescriptor(*each) for each in zip("ab", self.operand_layouts, strict=True))
        halo, row_bytes = Register("halo", "uint32"), self.halo_layout.row_bytes
        with serial_loop(k_range.count, "k_block") as k_block:
            halo_pipeline.consumer_wait(halo_state.index, halo_state.phase)
            halo.set(halo_pipeline.stage_address(halo_state.index))
            with serial_loop(self.num_taps, "tap") as tap:
                filter_pipeline.consumer_wait(filter_state.index, filter_state.phase)
                tap_row = self.image.tap_row(self.split_tap(tap), self.plane_rows)
                tap_halo = halo.value + to_uint32(tap_row * row_bytes)
                tap_filters = filter_pipeline.stage_address(filter_state.index)
                a_address, b_address = self.order_operands(tap_halo, tap_filters)
                first_row = warpgroup * (self.m_atoms * self.atom.m)
                descriptors[0].set_address(a_address + to_uint32(first_row * row_bytes))
                descriptors[1].set_address(b_address)
                self._multiply(accumulators, descriptors, k_block + tap > 0)
                with if_(k_block + tap > 0):
                    wgmma_wait_group(1)
                    filter_pipeline.consumer_release(filter_state.previous_index, thread)
                    with if_(tap == 0):
                        halo_pipeline.consumer_release(halo_state.previous_index, thread)
                filter_state.advance()
            halo_state.advance()
        wgmma_wait_group(0)
        filter_pipeline.consumer_release(filter_state.previous_index, thread)
        halo_pipeline.consumer_release(halo_state.previous_index, thread)

    def _multiply(self, accumulators: Buffer, descriptors: Sequence[MatrixDescriptor], accumulates: Expr) -> None:
        """Issue the wgmmas of a tap as one group; the first of them overwrite the sums unless `accumulates`."""
        (a_descriptor, b_descriptor), (a_layout, b_layout) = descriptors, self.operand_layouts
        atom = self.atom
        wgmma_fence()
        for k in range(0, self.block_k, atom.k):
            for m_atom in range(self.m_atoms):
                first = m_atom * atom.num_accumulators
                atom.emit(
                    [accumulators[first + e] for e in range(atom.num_accumulators)],
                    a_descriptor.encode_operand(a_layout.operand_offset(m_atom * atom.m, k, atom.itemsize)),
                    b_descriptor.encode_operand(b_layout.operand_offset(0, k, atom.itemsize)),
                    True if k else accumulates,
                )
        wgmma_commit_group()
