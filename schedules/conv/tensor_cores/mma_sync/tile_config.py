"""How `mma_sync` cuts up a product of matrices, pixels × channels × taps.

A `MmaSyncTileConfig` holds one config as numbers, or many configs as columns: each formula is written once, and serves
the program, the limits of a search and the cost model.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from tvmconv.arithmetic import ceil_div
from tvmconv.gpu_specs import WARP_SIZE
from tvmconv.space import Columns

from ..implicit_gemm_shape import ACCUMULATOR_BYTES, VECTOR_BYTES, ImplicitGemmShape

MMA_M = 16  # pixels of an mma
MMA_N = 8  # channels of an mma
MMA_K_BYTES = 32  # of the reduction, of an mma

BLOCK_M_CHOICES = (16, 32, 48, 64, 96, 128, 256)
BLOCK_N_CHOICES = (16, 32, 64, 96, 128, 256)
BLOCK_K_BYTES_CHOICES = (64, 128, 256)
WARPS_CHOICES = (1, 2, 4)  # along an axis of the tile
SLICED_K_WARPS = (1, 2, 4)  # of a step's reduction, for as many warps
STAGES_CHOICES = (2, 3, 4, 6)
SPLIT_K_CHOICES = (1, 2, 4, 8)
TILES_PER_BLOCK = (1, 2, 4)

MAX_ACCUMULATORS = 128  # of a thread
OVERHEAD_REGISTERS = 26  # of a thread, besides those that there is a formula for


@dataclass(frozen=True)
class MmaSyncTileConfig:
    """The tile of a block, and how its warps share it.

    Attributes:
        block_m: pixels of a block.
        block_n: output channels of a block.
        block_k: elements of the reduction that a step stages.
        warps_m: warps along the pixels.
        warps_n: warps along the channels.
        warps_k: warps that share the sums of one output, each over a part of every step.
        stages: steps that are in shared memory at a time: being multiplied, or on their way.
        split_k: blocks that share the sums of one output, each over a part of the steps.
        meet: where these blocks' sums meet: in the shared memory of a "cluster", or in "scratch" memory.
        tiles_per_block: tiles that a block computes, one after another.
        residual: where a residual is added: at the "begin" of a sum, or at its "end"; "none" where there is none that a
            sum could begin with.
    """

    block_m: Any
    block_n: Any
    block_k: Any
    warps_m: Any
    warps_n: Any
    warps_k: Any
    stages: Any
    split_k: Any
    meet: Any
    tiles_per_block: Any
    residual: Any = "none"

    @classmethod
    def from_columns(cls, columns: Columns) -> MmaSyncTileConfig:
        """The tiles of many configs."""
        return cls(**{field.name: columns[field.name] for field in fields(cls) if field.name in columns})

    @property
    def is_warp_tile_exact(self) -> Any:
        """Whether the tile falls into whole tiles of warps."""
        return (self.block_m % (self.warps_m * MMA_M) == 0) & (self.block_n % (self.warps_n * 2 * MMA_N) == 0)

    @property
    def num_threads(self) -> Any:
        """Threads of a block."""
        return self.warps_m * self.warps_n * self.warps_k * WARP_SIZE

    @property
    def num_accumulators(self) -> Any:
        """Sums of a thread."""
        return self.block_m * self.block_n // (self.warps_m * self.warps_n * WARP_SIZE)

    def estimate_registers(self, itemsize: int, spatial_ndim: int) -> Any:
        """Registers of a thread, about: sums, two sets of fragments, where the rows are that it copies, and others."""
        fragment_regs = self.block_m // self.warps_m // MMA_M * 4 + self.block_n // self.warps_n // MMA_N * 2
        rows_per_pass = self.rows_per_pass(itemsize)
        address_regs = ceil_div(self.block_m, rows_per_pass) * (1 + spatial_ndim) + ceil_div(
            self.block_n, rows_per_pass
        )
        return self.num_accumulators + 2 * fragment_regs + address_regs + OVERHEAD_REGISTERS

    @property
    def uses_cluster_reduction(self) -> Any:
        """Whether blocks of a cluster add up their sums."""
        return (self.split_k > 1) & (self.meet == "cluster")

    @property
    def uses_workspace_reduction(self) -> Any:
        """Whether a step of its own adds up sums in scratch memory."""
        return (self.split_k > 1) & (self.meet == "scratch")

    def rows_per_pass(self, itemsize: int) -> Any:
        """Rows of an operand that the threads copy at a time."""
        return self.num_threads * VECTOR_BYTES // (self.block_k * itemsize)

    def num_tiles(self, gemm: ImplicitGemmShape) -> Any:
        """Tiles of the output."""
        return gemm.groups * ceil_div(gemm.m, self.block_m) * ceil_div(gemm.n, self.block_n)

    def num_blocks(self, gemm: ImplicitGemmShape) -> Any:
        """Blocks of the grid."""
        return ceil_div(self.num_tiles(gemm), self.tiles_per_block) * self.split_k

    def total_k_tiles(self, gemm: ImplicitGemmShape) -> Any:
        """Steps of the whole reduction."""
        return ceil_div(gemm.k, self.block_k)

    def k_tiles_per_block(self, gemm: ImplicitGemmShape) -> Any:
        """Steps of a block."""
        return ceil_div(self.total_k_tiles(gemm), self.split_k)

    def stage_bytes(self, gemm: ImplicitGemmShape) -> Any:
        """Shared memory of one stage: both operands."""
        return (self.block_m + self.block_n) * self.block_k * gemm.itemsize

    def pitch_bytes(self, itemsize: Any) -> Any:
        """Bytes from one pixel to the next of the tile in shared memory, for elements of a size.

        A warp stores 8 rows of 4 pairs at a time: of 16-bit elements a word each, of floats two, half a warp at a time.
        These lie in distinct banks where rows are apart by 4 words, or by 8, beside a multiple of the banks.
        """
        return self.block_n * itemsize + 8 * itemsize

    def dynamic_smem_bytes(self, gemm: ImplicitGemmShape, staged_itemsize: Any, num_channel_args: Any) -> Any:
        """Dynamic shared memory of a block: what `stage_and_tile_smem_bytes` tells, and behind it what there is for
        each channel.

        Args:
            gemm: the product.
            staged_itemsize: bytes of an element of the tile in shared memory.
            num_channel_args: how many numbers each channel has there, of the epilogue.
        """
        return (
            self.stage_and_tile_smem_bytes(gemm, staged_itemsize) + num_channel_args * self.block_n * ACCUMULATOR_BYTES
        )

    def stage_and_tile_smem_bytes(self, gemm: ImplicitGemmShape, staged_itemsize: Any) -> Any:
        """Shared memory for the stages; after the last step, the warps' sums, and then the tile.

        The tile has room of its own where the stages are already filled for the next one.
        """
        mainloop_bytes = self.stages * self.stage_bytes(gemm)
        reduction_bytes = self.block_m * self.block_n * ACCUMULATOR_BYTES * (self.warps_k - 1)
        output_tile_bytes = self.block_m * self.pitch_bytes(staged_itemsize) * (1 - self.uses_workspace_reduction)
        return np.where(
            self.tiles_per_block > 1,
            mainloop_bytes + output_tile_bytes,
            np.maximum(np.maximum(mainloop_bytes, reduction_bytes), output_tile_bytes),
        )


KNOB_NAMES = [
    field.name for field in fields(MmaSyncTileConfig) if field.name != "residual"
]  # the knobs of every workload
