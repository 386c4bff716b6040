"""Epilogue of a Hopper kernel: subtiles of the accumulators pass through shared memory, and TMA stores them.

Source: CUTLASS, `include/cutlass/epilogue/collective/sm90_epilogue_tma_warpspecialized.hpp`.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvmconv.target import WARP_SIZE, WARPGROUP_SIZE
from tvmconv.tensor_map import CHUNK_BYTES
from tvmconv.workloads.dtypes import get_itemsize

from ....tir_builder import (
    Expr,
    allocate,
    if_,
    load_shared,
    store_shared,
    to_uint32,
    unrolled_loop,
)
from .atoms import ThreadPosition, ldmatrix_x4, named_barrier_sync, stmatrix_x4, sync_warp
from .channel_arguments import ChannelArguments
from .channel_stats import SubtileStats
from .epilogue_ops import EpilogueOps, apply_to_columns
from .epilogue_tile import EpilogueTile
from .pipelines import PipelineState, TmaPipeline
from .tile_scheduler import WorkTile
from .tma import tma_load, tma_store, tma_store_fence, tma_store_wait


class TmaEpilogue:
    """Applies the epilogue to a warpgroup's accumulators and stores them by TMA, one subtile while the next is made.

    A residual is loaded by TMA into the stages that become the output: a warp of its own fills each stage as
    soon as the store has read it. The pipeline has the stages of all warpgroups, one after another.

    Args:
        tile: Division into subtiles.
        ops: The epilogue, with one residual at most.
        channels: Per-channel arguments.
        pipeline: Stages of all warpgroups. Its barriers are used only with a residual.
        tensor_maps: Tensor maps of the output and, if there is one, of the residual.
        stats: What adds up the stored columns, if the kernel returns their statistics; there is no residual then.
    """

    def __init__(
        self,
        tile: EpilogueTile,
        ops: EpilogueOps,
        channels: ChannelArguments,
        pipeline: TmaPipeline,
        tensor_maps: Sequence[Expr],
        stats: SubtileStats | None = None,
    ) -> None:
        self._tile, self._ops, self.channels, self._pipeline = tile, ops, channels, pipeline
        self._stats = stats
        self._output_map, *self._residual_maps = tensor_maps
        self._packed, self._values = allocate("packed", 4, "uint32"), allocate("output_values", 4, "float32")
        self._residual = allocate("residual", tile.row_bytes // 8, "uint32") if self._residual_maps else None

    @property
    def dtype(self) -> str:
        """Storage dtype of the output."""
        return self._ops.dtype

    def store(
        self,
        accumulators: Sequence[Expr],
        tile: WorkTile,
        state: PipelineState,
        thread: ThreadPosition,
        warpgroup: Expr,
    ) -> None:
        """Store a warpgroup's part of a work tile; `warpgroup` is its index among those that share the tile."""
        epilogue_tile, is_leader = self._tile, thread.is_warpgroup_leader
        self.channels.wait(thread)
        for m_atom in range(epilogue_tile.m_atoms):
            for n_idx in range(epilogue_tile.subtiles_n):
                stage_idx = thread.warpgroup * epilogue_tile.stages + state.index
                buffer = self._pipeline.stage_address(stage_idx)
                if self._residual is not None:
                    self._pipeline.consumer_wait(stage_idx, state.phase)
                else:
                    with if_(is_leader):
                        tma_store_wait(epilogue_tile.stages - 1)
                    named_barrier_sync(1 + thread.warpgroup, WARPGROUP_SIZE)
                self._copy_to_smem(accumulators, m_atom, n_idx, buffer, thread)
                tma_store_fence()
                named_barrier_sync(1 + thread.warpgroup, WARPGROUP_SIZE)
                with if_(is_leader):
                    column, row = tile.n + n_idx * epilogue_tile.n, epilogue_tile.row(tile, warpgroup, m_atom)
                    coordinates, evicts_first = epilogue_tile.coordinates(tile, column, row), epilogue_tile.evicts_first
                    tma_store(self._output_map, coordinates, buffer, evicts_first=evicts_first)
                    if self._residual is not None:
                        tma_store_wait(0)
                        self._pipeline.consumer_arrive(stage_idx)
                if self._stats:
                    self._stats.add(buffer, tile, warpgroup, m_atom, n_idx, thread)
                state.advance()

    def finish(self, thread: ThreadPosition) -> None:
        """Wait until TMA has read all subtiles from shared memory."""
        with if_(thread.is_warpgroup_leader):
            tma_store_wait(0)

    def load_residual(self, tile: WorkTile, state: PipelineState, first_warpgroup: Expr = 0) -> None:
        """Load the residual of a work tile, each subtile as soon as its stage has been stored; run by one thread.

        Args:
            tile: The work tile.
            state: Stage that is filled next, of each warpgroup that shares the tile.
            first_warpgroup: First of the warpgroups that share the tile.
        """
        epilogue_tile, pipeline = self._tile, self._pipeline
        subtiles = unrolled_loop(epilogue_tile.m_atoms, "i"), unrolled_loop(epilogue_tile.subtiles_n, "j")
        with subtiles[0] as m_atom, subtiles[1] as n_idx:
            for warpgroup in range(epilogue_tile.warpgroups):
                stage_idx = (first_warpgroup + warpgroup) * epilogue_tile.stages + state.index
                pipeline.producer_acquire(stage_idx, state.phase)
                column, row = tile.n + n_idx * epilogue_tile.n, epilogue_tile.row(tile, warpgroup, m_atom)
                coordinates = epilogue_tile.coordinates(tile, column, row)
                barrier = pipeline.full_barrier(stage_idx)
                tma_load(pipeline.stage_address(stage_idx), self._residual_maps[0], coordinates, barrier)
            state.advance()

    def _copy_to_smem(
        self, accumulators: Sequence[Expr], m_atom: int, n_idx: int, buffer: Expr, thread: ThreadPosition
    ) -> None:
        """Apply the epilogue to a subtile and copy the results to shared memory."""
        values, channel = self._tile.select_fragment(accumulators, m_atom, n_idx, thread)
        has_words = self._tile.interleaved or get_itemsize(self._tile.dtype) == 2
        copy = self._copy_words if has_words else self._copy_pairs
        copy(values, channel, buffer, thread)

    def _copy_words(self, accumulators: Sequence[Expr], channel: Expr, buffer: Expr, thread: ThreadPosition) -> None:
        """Copy words of two 16-bit or four 8-bit results by stmatrix, 16 rows × 32 bytes of a warp at a time."""
        row = thread.warpgroup_thread // WARP_SIZE * 16 + thread.lane % 16
        addresses = [
            buffer + self._tile.layout.swizzled_offset(row, columns * 2 + thread.lane // 16)
            for columns in range(self._tile.row_bytes // (2 * CHUNK_BYTES))
        ]
        if self._residual is not None:
            for columns, address in enumerate(addresses):
                ldmatrix_x4([self._residual[columns * 4 + e] for e in range(4)], address)
            sync_warp()
        itemsize = get_itemsize(self._tile.dtype)
        for columns, address in enumerate(addresses):
            for word in range(4):
                chunk, half = columns * 2 + word // 2, word % 2
                if half == 0:
                    channel_values = self.channels.load(channel + chunk * CHUNK_BYTES // itemsize)
                first, residuals = chunk * 8 // itemsize + half * 2, {}
                if self._residual is not None:
                    residuals = {name: [self._residual[columns * 4 + word]] for name in self._ops.residuals}
                sums = [accumulators[first + pair * 4 + e] for pair in range(2 // itemsize) for e in range(2)]
                apply_to_columns(self._ops, sums, channel_values, residuals, self._values, self._packed, word)
            stmatrix_x4(address, [self._packed[e] for e in range(4)])

    def _copy_pairs(self, accumulators: Sequence[Expr], channel: Expr, buffer: Expr, thread: ThreadPosition) -> None:
        """Copy results of any size, each thread two neighbouring columns at a time."""
        warp_row = thread.warpgroup_thread // WARP_SIZE * 16
        pair_bytes = 2 * get_itemsize(self._tile.dtype)
        for columns in range(self._tile.n // 8):
            channel_values = self.channels.load(channel + columns * 8)
            for half in range(2):
                row, column_bytes = warp_row + thread.lane // 4 + half * 8, (columns * 4 + thread.lane % 4) * pair_bytes
                offset = self._tile.layout.swizzled_offset(row, column_bytes // CHUNK_BYTES)
                address = buffer + offset + to_uint32(column_bytes % CHUNK_BYTES)
                first, residuals = columns * 4 + half * 2, {}
                if self._residual is not None:
                    load_shared(self._residual, address, pair_bytes)
                    residuals = {name: [self._residual[e] for e in range(2)] for name in self._ops.residuals}
                sums = accumulators[first : first + 2]
                apply_to_columns(self._ops, sums, channel_values, residuals, self._values, self._packed)
                store_shared(address, self._packed, pair_bytes)
