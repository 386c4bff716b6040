"""Tile config of `stem`, and the resources that it uses.

A `StemTileConfig` holds one config as numbers or many configs as columns, so that the kernel, the search limits and the
cost model use the same formulas.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tvmconv.arithmetic import ceil_div, round_up
from tvmconv.space.search_space import ResourceUsage
from tvmconv.target import WARP_SIZE
from tvmconv.workloads import Conv3d

from ...tile_config import TileConfig
from ..gemm.epilogue_ops import EpilogueOps
from .row_layout import ACCUMULATOR_BYTES, MMA_CHANNELS, MMA_PIXELS, VECTOR_BYTES, RowLayout
from .smem_layout import StemSmemLayout, choose_smem_layout


@dataclass(frozen=True)
class StemTileConfig(TileConfig):
    """Tile of a block, and number of blocks."""

    w: Conv3d  # the convolution, of three spatial axes
    block_p: Any  # output rows per tile
    warps: Any  # warps per block; each computes 16 pixels of every row
    block_n: Any  # output channels per tile, a multiple of 16
    stages: Any  # tiles whose inputs are in shared memory at a time
    max_ctas: Any  # maximum number of blocks, which share all tiles; 0 for one block per tile
    weights_in_registers: Any  # whether a warp keeps the weight in registers instead of loading it for each tile

    @property
    def row_layout(self) -> RowLayout:
        """Layout of the convolution in memory rows."""
        return RowLayout(self.w)

    @property
    def num_threads(self) -> Any:
        """Threads per block."""
        return self.warps * WARP_SIZE

    @property
    def block_q(self) -> Any:
        """Output columns per tile."""
        return self.warps * MMA_PIXELS

    @property
    def num_channel_tiles(self) -> Any:
        """Tiles along the output channels."""
        return ceil_div(self.w.O, self.block_n)

    @property
    def num_tiles_q(self) -> Any:
        """Tiles per output row."""
        return ceil_div(self.w.Q, self.block_q)

    @property
    def num_tiles_p(self) -> Any:
        """Tiles per output column."""
        return ceil_div(self.w.P, self.block_p)

    @property
    def num_pixel_tiles(self) -> Any:
        """Tiles of pixels in the whole batch."""
        return self.w.N * self.w.output_size[0] * self.num_tiles_p * self.num_tiles_q

    @property
    def num_pixel_ctas(self) -> Any:
        """Blocks along the tiles of pixels."""
        ctas_per_channel_tile = ceil_div(self.max_ctas, self.num_channel_tiles)
        return np.where(
            self.max_ctas == 0, self.num_pixel_tiles, np.minimum(self.num_pixel_tiles, ctas_per_channel_tile)
        )

    @property
    def tiles_per_cta(self) -> Any:
        """Maximum number of tiles per block."""
        return ceil_div(self.num_pixel_tiles, self.num_pixel_ctas)

    @property
    def num_input_buffers(self) -> Any:
        """Tiles whose inputs are in shared memory at a time, at most the tiles of a block."""
        return np.minimum(self.stages, self.tiles_per_cta)

    @property
    def num_prefetched_tiles(self) -> Any:
        """Tiles whose inputs are requested before the first tile is computed."""
        return np.maximum(1, self.num_input_buffers - 1)

    @property
    def num_accumulators(self) -> Any:
        """Accumulator registers per thread."""
        return self.block_p * self.block_n // 2

    @property
    def weight_registers(self) -> Any:
        """Registers per thread that hold the weight of all k-steps."""
        return self.row_layout.num_k_steps * self.block_n // MMA_CHANNELS * 2

    @property
    def mmas_per_warp(self) -> Any:
        """Unrolled mma instructions of a warp per tile."""
        return self.row_layout.num_k_steps * self.block_p * self.block_n // MMA_CHANNELS

    @property
    def smem_layout(self) -> StemSmemLayout:
        """Layout of the input rows in shared memory."""
        return choose_smem_layout(self.w, int(self.block_p), int(self.warps))

    @property
    def rows_per_plane(self) -> Any:
        """Rows of a plane that a tile needs."""
        return (self.block_p - 1) * self.w.stride[1] + self.w.window[1]

    @property
    def input_bytes(self) -> Any:
        """Shared memory of a tile's inputs in bytes."""
        row_counts, warp_counts = np.broadcast_arrays(self.block_p, self.warps)
        pairs = zip(row_counts.ravel().tolist(), warp_counts.ravel().tolist(), strict=True)
        row_bytes = np.array([choose_smem_layout(self.w, *pair).row_bytes for pair in pairs], dtype=np.int64).reshape(
            row_counts.shape
        )
        return round_up(self.row_layout.num_planes * self.rows_per_plane * row_bytes, VECTOR_BYTES)

    @property
    def weight_bytes(self) -> Any:
        """Shared memory of the spread weight in bytes, for all phases."""
        return self.row_layout.num_phases * self.block_n * self.row_layout.weight_row_bytes

    @property
    def filter_bytes(self) -> Any:
        """Shared memory of the unchanged filters in bytes."""
        return self.block_n * self.row_layout.filter_elements * self.row_layout.element_bytes

    @property
    def channel_args(self) -> list[str]:
        """Names of the per-channel arguments of the epilogue."""
        return EpilogueOps.from_workload(self.w).channel_args

    @property
    def argument_bytes(self) -> Any:
        """Shared memory of the per-channel arguments in bytes."""
        return self.block_n * ACCUMULATOR_BYTES * len(self.channel_args)

    @property
    def output_row_bytes(self) -> Any:
        """Distance in bytes between the outputs of neighbouring pixels, or of neighbouring channels if these come
        first.

        Padding shifts eight pixels, or four of every second channel, to different banks.
        """
        if self.row_layout.stores_channels_last:
            return self.block_n * self.row_layout.element_bytes + VECTOR_BYTES * self.row_layout.element_bytes // 2
        return MMA_PIXELS * self.row_layout.element_bytes + VECTOR_BYTES

    @property
    def output_bytes(self) -> Any:
        """Shared memory in bytes in which a warp arranges its outputs."""
        return self.output_row_bytes * (MMA_PIXELS if self.row_layout.stores_channels_last else self.block_n)

    @property
    def dynamic_smem_bytes(self) -> Any:
        """Dynamic shared memory per block in bytes; the last inputs and the outputs reuse the memory of the filters."""
        reused_bytes = (
            self.num_input_buffers - self.num_prefetched_tiles
        ) * self.input_bytes + self.warps * self.output_bytes
        fixed_bytes = self.weight_bytes + self.argument_bytes + self.num_prefetched_tiles * self.input_bytes
        return fixed_bytes + np.maximum(reused_bytes, self.filter_bytes)

    def compute_usage(self) -> ResourceUsage:
        """Return the resources that configs use."""
        num_ctas = self.num_pixel_ctas * self.num_channel_tiles
        staged_bytes = self.input_bytes + self.weight_bytes / self.tiles_per_cta
        return ResourceUsage(
            threads=self.num_threads,
            shared_bytes=np.zeros_like(num_ctas),
            accumulators=self.num_accumulators,
            blocks=num_ctas,
            dynamic_shared_bytes=self.dynamic_smem_bytes,
            steps=self.tiles_per_cta,
            products=self.mmas_per_warp,
            staged_bytes=staged_bytes / self.num_threads,
            traffic=self.num_pixel_tiles * self.num_channel_tiles * staged_bytes,
            all_threads=num_ctas * self.num_threads,
            live_registers=self.num_accumulators + np.where(self.weights_in_registers == 1, self.weight_registers, 0),
            layout_seconds=np.zeros_like(num_ctas, dtype=float),
            computed=self.num_pixel_tiles * self.block_p * self.block_q * self.num_channel_tiles * self.block_n,
        )
