"""A CTA of `stem`: its place in the grid, its threads, and its shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from ....tir_builder import Expr, block_axes, thread_axis, to_uint32
from ..gemm.atoms import ThreadPosition
from ..gemm.channel_arguments import ChannelArgumentTile
from ..gemm.cta import allocate_smem
from .row_layout import MMA_CHANNELS, MMA_PIXELS, RowLayout
from .smem_layout import StemSmemLayout
from .tile_config import StemTileConfig


@dataclass(frozen=True)
class StemCta:
    """Position of a thread in the grid, and addresses in the shared memory of its CTA.

    Shared memory has the spread weight, the per-channel arguments and the inputs of tiles. The filters as they are in
    memory lie where later the last inputs and the outputs of the warps are.
    """

    config: StemTileConfig
    channel_tile: Expr  # index of the tile of output channels
    index: Expr  # index of the CTA among those with the same channels
    thread: ThreadPosition  # position in the CTA
    smem: Expr  # address of shared memory

    @property
    def num_threads(self) -> int:
        """Threads per CTA."""
        return int(self.config.num_threads)

    @property
    def num_mma_n(self) -> int:
        """Instructions along the channels."""
        return self.config.block_n // MMA_CHANNELS

    @property
    def row_layout(self) -> RowLayout:
        """Layout of the convolution in memory rows."""
        return self.config.row_layout

    @property
    def smem_layout(self) -> StemSmemLayout:
        """Layout of the input rows in shared memory."""
        return self.config.smem_layout

    @property
    def phase(self) -> Expr:
        """Phase of the warp's pixels: even or odd, if these are aligned differently."""
        return self.thread.warp % self.row_layout.num_phases

    @property
    def first_channel(self) -> Expr:
        """First output channel of the tile."""
        return self.channel_tile * self.config.block_n

    @property
    def inputs_offset(self) -> int:
        """Offset of the inputs in bytes."""
        return self.config.weight_bytes + self.config.argument_bytes

    @property
    def filters_offset(self) -> int:
        """Offset of the unchanged filters in bytes."""
        return self.inputs_offset + int(self.config.num_prefetched_tiles) * int(self.config.input_bytes)

    @property
    def output_address(self) -> Expr:
        """Address at which the warp arranges its outputs."""
        offset = self.inputs_offset + int(self.config.num_input_buffers) * int(self.config.input_bytes)
        return self.smem + to_uint32(offset) + to_uint32(self.thread.warp * self.config.output_bytes)

    @property
    def channel_args(self) -> ChannelArgumentTile:
        """Per-channel arguments of the epilogue."""
        address = self.smem + to_uint32(self.config.weight_bytes)
        return ChannelArgumentTile(self.config.channel_args, self.config.block_n, address)

    def pixel_column(self, pixel: Expr) -> Expr:
        """Return the column within the tile of one of the warp's 16 pixels."""
        num_phases = self.row_layout.num_phases
        return (self.thread.warp // num_phases * MMA_PIXELS + pixel) * num_phases + self.phase

    def tile_at(self, tile_round: Expr) -> Expr:
        """Return the index of the CTA's tile in a round."""
        return tile_round * int(self.config.num_pixel_ctas) + self.index

    def tile_origin(self, tile_idx: Expr) -> tuple[Expr, Expr, Expr]:
        """Return the output plane, counted over all images, the first output row and the first column of a tile."""
        tiles_q, tiles_p = self.config.num_tiles_q, self.config.num_tiles_p
        row, column = tile_idx // tiles_q % tiles_p * self.config.block_p, tile_idx % tiles_q * self.config.block_q
        return tile_idx // (tiles_p * tiles_q), row, column

    def accumulator(self, output_row: Expr, mma_n: Expr) -> Expr:
        """Return the index of the first of a lane's four accumulators: two channels of each of its two pixels."""
        return (output_row * self.num_mma_n + mma_n) * 4


@contextmanager
def open_cta(config: StemTileConfig) -> Iterator[StemCta]:
    """Open the loops over CTAs and threads."""
    grid = block_axes(config.num_channel_tiles, int(config.num_pixel_ctas))
    with grid as (channel_tile, index), thread_axis(config.num_threads, "threadIdx.x") as thread:
        smem = allocate_smem(int(config.dynamic_smem_bytes))
        yield StemCta(config, channel_tile, index, ThreadPosition(thread), smem)


def join_halves(low: Expr, high: Expr) -> Expr:
    """Return a word from its two halves."""
    return T.Cast("uint32", low) | T.shift_left(T.Cast("uint32", high), T.uint32(16))
