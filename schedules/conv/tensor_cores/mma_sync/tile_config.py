"""Tile config of `mma_sync`: how blocks and warps divide the matrix product pixels × channels × taps.

A `MmaSyncTileConfig` holds one config as numbers or many configs as columns, so that the kernel, the search limits and
the cost model use the same formulas.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tvmconv.arithmetic import ceil_div
from tvmconv.target import MAX_REGISTERS_PER_THREAD, REGISTERS_PER_MULTIPROCESSOR, WARP_SIZE
from tvmconv.workloads import Conv

from ...tile_config import TileConfig
from ..implicit_gemm_shape import ACCUMULATOR_BYTES, VECTOR_BYTES, ImplicitGemmShape

MMA_M = 16  # pixels per mma
MMA_N = 8  # channels per mma
MMA_K_BYTES = 32  # bytes of the reduction per mma

BLOCK_M_CHOICES = (16, 32, 48, 64, 96, 128, 256)
BLOCK_N_CHOICES = (16, 32, 64, 96, 128, 256)
BLOCK_K_BYTES_CHOICES = (64, 128, 256)
WARPS_CHOICES = (1, 2, 4)
SLICED_K_WARPS = (1, 2, 4)
STAGES_CHOICES = (2, 3, 4, 6)
SPLIT_K_CHOICES = (1, 2, 4, 8)
TILES_PER_BLOCK = (1, 2, 4)

MAX_ACCUMULATORS = 128  # per thread
CHANNEL_PADDING_BYTES = 16  # from the end of a channel to the next one in the tile of a channels-first output
OVERHEAD_REGISTERS = 26  # registers per thread besides those that `estimate_registers` counts


@dataclass(frozen=True)
class MmaSyncTileConfig(TileConfig):
    """Tile of a block, and its division among warps."""

    block_m: Any  # pixels per block
    block_n: Any  # output channels per block
    block_k: Any  # elements of the reduction per k-tile
    warps_m: Any  # warps along the pixels
    warps_n: Any  # warps along the channels
    warps_k: Any  # warps that share the reduction of an output (sliced-K), each with a part of every k-tile
    stages: Any  # pipeline stages in shared memory
    split_k: Any  # blocks that share the reduction of an output (split-K), each with a part of the k-tiles
    # Where split-K partial sums are reduced: in the shared memory of a "cluster", or in a "workspace".
    split_k_reduction: Any
    tiles_per_block: Any  # tiles that a block computes one after another
    # Where a residual is added: "accumulator_init" or "epilogue"; "none" without such a residual.
    residual_add: Any = "none"
    # Products of 8-bit floats after which accumulators are added to float32 sums, in whole k-tiles; 0: never.
    promotion_interval: Any = 0
    stores_channels_first: Any = False  # whether the output is channels first, which is no knob
    input_loader: Any = "converted"  # how a channels-first X is loaded; X is channels last where there is no such knob

    @property
    def is_warp_tile_exact(self) -> Any:
        """Whether the block's tile divides evenly into the warps' tiles."""
        return (self.block_m % (self.warps_m * MMA_M) == 0) & (self.block_n % (self.warps_n * 2 * MMA_N) == 0)

    @property
    def num_threads(self) -> Any:
        """Threads per block."""
        return self.warps_m * self.warps_n * self.warps_k * WARP_SIZE

    @property
    def num_accumulators(self) -> Any:
        """Accumulator registers per thread."""
        return self.block_m * self.block_n // (self.warps_m * self.warps_n * WARP_SIZE)

    @property
    def promotion_k_tiles(self) -> Any:
        """Number of k-tiles after which the accumulators of 8-bit floats are promoted; 0 if they are not."""
        k_tiles = np.maximum(1, self.promotion_interval * self.warps_k // self.block_k)
        return np.where(np.greater(self.promotion_interval, 0), k_tiles, 0)

    @property
    def promoted_products(self) -> Any:
        """Number of products that a warp adds before a promotion; 0 if there is none."""
        return self.promotion_k_tiles * self.block_k // self.warps_k

    def estimate_registers(self, itemsize: int, spatial_ndim: int) -> Any:
        """Return the estimated registers per thread: accumulators, two fragment sets, row addresses and overhead."""
        fragment_regs = self.block_m // self.warps_m // MMA_M * 4 + self.block_n // self.warps_n // MMA_N * 2
        rows_per_pass = self.rows_per_pass(itemsize)
        address_regs = ceil_div(self.block_m, rows_per_pass) * (1 + spatial_ndim) + ceil_div(
            self.block_n, rows_per_pass
        )
        num_sums = self.num_accumulators * np.where(np.greater(self.promotion_interval, 0), 2, 1)
        return num_sums + 2 * fragment_regs + address_regs + OVERHEAD_REGISTERS

    def fits_registers(self, itemsize: int, spatial_ndim: int) -> Any:
        """Return whether the estimated registers of all threads fit."""
        registers = self.estimate_registers(itemsize, spatial_ndim)
        is_within_sm = registers * self.num_threads <= REGISTERS_PER_MULTIPROCESSOR
        return (registers <= MAX_REGISTERS_PER_THREAD) & is_within_sm

    @property
    def uses_cluster_reduction(self) -> Any:
        """Whether the blocks of a cluster reduce partial sums."""
        return (self.split_k > 1) & (self.split_k_reduction == "cluster")

    @property
    def uses_workspace_reduction(self) -> Any:
        """Whether a second kernel reduces partial sums in a workspace."""
        return (self.split_k > 1) & (self.split_k_reduction == "workspace")

    def rows_per_pass(self, itemsize: int) -> Any:
        """Return the number of operand rows that the threads copy at a time."""
        return self.num_threads * VECTOR_BYTES // (self.block_k * itemsize)

    def num_tiles(self, gemm: ImplicitGemmShape) -> Any:
        """Return the number of output tiles."""
        return gemm.num_products * ceil_div(gemm.m, self.block_m) * ceil_div(gemm.n, self.block_n)

    def num_blocks(self, gemm: ImplicitGemmShape) -> Any:
        """Return the number of blocks in the grid."""
        return ceil_div(self.num_tiles(gemm), self.tiles_per_block) * self.split_k

    def get_shape(self, w: Conv) -> ImplicitGemmShape:
        """Return the matrix product whose rows are divided into tiles."""
        return ImplicitGemmShape.from_workload(w)

    def total_k_tiles(self, gemm: ImplicitGemmShape) -> Any:
        """Return the number of k-tiles of the whole reduction."""
        return ceil_div(gemm.k, self.block_k)

    def k_tiles_per_block(self, gemm: ImplicitGemmShape) -> Any:
        """Return the number of k-tiles per block."""
        return ceil_div(self.total_k_tiles(gemm), self.split_k)

    def has_k_tile_in_each_part(self, gemm: ImplicitGemmShape) -> Any:
        """Return whether each block of a split reduction has a k-tile."""
        return self.k_tiles_per_block(gemm) * (self.split_k - 1) < self.total_k_tiles(gemm)

    def stage_bytes(self, gemm: ImplicitGemmShape) -> Any:
        """Return the shared memory of one pipeline stage in bytes, for both operands."""
        return (self.block_m + self.block_n) * self.block_k * gemm.itemsize

    def mainloop_bytes(self, gemm: ImplicitGemmShape) -> Any:
        """Return the shared memory of the mainloop in bytes."""
        return self.stages * self.stage_bytes(gemm)

    def copied_bytes(self, gemm: ImplicitGemmShape) -> Any:
        """Return the bytes that are copied for a k-tile."""
        return self.stage_bytes(gemm)

    def moved_bytes(self, gemm: ImplicitGemmShape) -> Any:
        """Return the bytes that a k-tile stores to shared memory or moves there."""
        return self.stage_bytes(gemm)

    def transpose_us(self, _gemm: ImplicitGemmShape) -> Any:
        """Return the time that a block transposes operands in shared memory in microseconds."""
        return 0.0

    def pitch_bytes(self, itemsize: Any) -> Any:
        """Return the bytes from one pixel to the next of the tile in shared memory, or from one channel to the next.

        A warp stores 8 rows of 4 pairs at a time: one word per pair of 16-bit elements, or two words per pair of
        floats, half a warp at a time. The pairs lie in distinct banks if the pitch is 4 words, or 8 words, past a
        multiple of all banks.

        If the output is channels first, a warp stores 8 neighbouring pixels of 4 channels at a time, every second one.
        Their elements lie in distinct banks if the pitch is 4 words past a multiple of half of the banks.
        """
        channel_pitch = self.block_m * itemsize + CHANNEL_PADDING_BYTES
        return np.where(self.stores_channels_first, channel_pitch, self.block_n * itemsize + 8 * itemsize)

    def tile_bytes(self, itemsize: Any) -> Any:
        """Return the bytes of the output tile in shared memory."""
        return np.where(self.stores_channels_first, self.block_n, self.block_m) * self.pitch_bytes(itemsize)

    def dynamic_smem_bytes(self, gemm: ImplicitGemmShape, staged_itemsize: Any, num_channel_args: Any) -> Any:
        """Return the dynamic shared memory per block in bytes: stages and tile, then the per-channel arguments."""
        return (
            self.stage_and_tile_smem_bytes(gemm, staged_itemsize) + num_channel_args * self.block_n * ACCUMULATOR_BYTES
        )

    def stage_and_tile_smem_bytes(self, gemm: ImplicitGemmShape, staged_itemsize: Any) -> Any:
        """Return the shared memory in bytes for the stages, then for the warps' partial sums, and then for the output
        tile.

        These reuse the same memory. The output tile has separate memory if the stages already receive the next tile's
        operands.
        """
        mainloop_bytes = self.mainloop_bytes(gemm)
        reduction_bytes = self.block_m * self.block_n * ACCUMULATOR_BYTES * (self.warps_k - 1)
        output_tile_bytes = self.tile_bytes(staged_itemsize) * (1 - self.uses_workspace_reduction)
        return np.where(
            self.tiles_per_block > 1,
            mainloop_bytes + output_tile_bytes,
            np.maximum(np.maximum(mainloop_bytes, reduction_bytes), output_tile_bytes),
        )


def list_options(itemsize: int) -> dict[str, tuple[Any, ...]]:
    """Return the options of the knobs of every workload."""
    return {
        "block_m": BLOCK_M_CHOICES,
        "block_n": BLOCK_N_CHOICES,
        "block_k": tuple(nbytes // itemsize for nbytes in BLOCK_K_BYTES_CHOICES),
        "warps_m": WARPS_CHOICES,
        "warps_n": WARPS_CHOICES,
        "warps_k": SLICED_K_WARPS,
        "stages": STAGES_CHOICES,
        "split_k": SPLIT_K_CHOICES,
        "split_k_reduction": ("workspace", "cluster"),
        "tiles_per_block": TILES_PER_BLOCK,
    }
