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
from .tile_scheduler import KRange, WorkTile
from .tma import TmaCopy
from .wgmma_mainloop import OperandTile

Operands = TypeVar("Operands")


@dataclass(frozen=True)
class HaloMainloop:
    """Loads and multiplies the channel blocks of a work tile."""

    atom: WgmmaAtom  # the wgmma instruction
    m_atoms: int  # instructions of a warpgroup along M
    image: HaloImage  # the halo rows
    a_layout: SmemLayout  # layout of a stage of halo rows, in one box
    b: OperandTile  # tile of the filters of a tap, in one box
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
    def operand_layouts(self) -> tuple[SmemLayout, SmemLayout]:
        """Layouts of the operands A and B in shared memory."""
        return self.order_operands(self.a_layout, self.b.layout)

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

    def produce_filters(
        self, tile: WorkTile, k_range: KRange, tensor_map: Expr, pipeline: TmaPipeline, state: PipelineState
    ) -> None:
        """Load the filters of all taps of each channel block; run by one thread."""
        (position,) = self.b.locate(tile.n, tile.group, 0)
        with (
            serial_loop(k_range.count, "k_block") as k_block,
            serial_loop(self.num_taps, "tap") as tap,
        ):
            pipeline.producer_acquire(state.index, state.phase)
            copy = TmaCopy(tensor_map, pipeline.full_barrier(state.index))
            k = ((k_range.first + k_block) * self.block_k, *self.split_tap(tap))
            self.b.operand.loader.load(pipeline.stage_address(state.index), copy, position, k)
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
        use.

        Args:
            accumulators: Sums of this thread.
            k_range: Channel blocks of this CTA.
            pipelines: Stages of the halo rows, and of the filters.
            states: Stages that are read next.
            thread: Position of this thread.
            warpgroup: Index of the warpgroup in the CTA.
        """
        (a_pipeline, b_pipeline), (a_state, b_state) = pipelines, states
        descriptors = tuple(MatrixDescriptor(*each) for each in zip("ab", self.operand_layouts, strict=True))
        halo, row_bytes = Register("halo", "uint32"), self.a_layout.row_bytes
        plane_rows = self.a_layout.rows // self.image.num_planes
        with serial_loop(k_range.count, "k_block") as k_block:
            a_pipeline.consumer_wait(a_state.index, a_state.phase)
            halo.set(a_pipeline.stage_address(a_state.index))
            with serial_loop(self.num_taps, "tap") as tap:
                b_pipeline.consumer_wait(b_state.index, b_state.phase)
                tap_row = self.image.tap_row(self.split_tap(tap), plane_rows)
                tap_halo = halo.value + to_uint32(tap_row * row_bytes)
                a_address, b_address = self.order_operands(tap_halo, b_pipeline.stage_address(b_state.index))
                first_row = warpgroup * (self.m_atoms * self.atom.m)
                descriptors[0].set_address(a_address + to_uint32(first_row * row_bytes))
                descriptors[1].set_address(b_address)
                self._multiply(accumulators, descriptors, k_block + tap > 0)
                with if_(k_block + tap > 0):
                    wgmma_wait_group(1)
                    b_pipeline.consumer_release(b_state.previous_index, thread)
                    with if_(tap == 0):
                        a_pipeline.consumer_release(a_state.previous_index, thread)
                b_state.advance()
            a_state.advance()
        wgmma_wait_group(0)
        b_pipeline.consumer_release(b_state.previous_index, thread)
        a_pipeline.consumer_release(a_state.previous_index, thread)

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
