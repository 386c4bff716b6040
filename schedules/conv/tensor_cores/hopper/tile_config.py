"""How `hopper` cuts up a convolution, pixels × channels × taps, and what a block has of it.

A `HopperTileConfig` holds one config as numbers, or many configs as columns: each formula is written once, and serves
the program, the limits of a search and the choice of the defaults.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from tvmconv.arithmetic import ceil_div, round_up
from tvmconv.gpu_specs import REGISTERS_PER_MULTIPROCESSOR, WARP_SIZE
from tvmconv.space import Columns
from tvmconv.workloads import Conv, epilogue

from ..implicit_gemm_shape import ACCUMULATOR_BYTES, VECTOR_BYTES, ImplicitGemmShape
from .tma_requirements import WARPGROUP_THREADS, WGMMA_M, can_store_by_tma, compute_halo_width, find_residual

SWIZZLE_ALIGNMENT_BYTES = 1024  # bytes: 8 rows of 128, after which a swizzle repeats
BARRIER_BYTES = 8

WARPGROUP_CHOICES = (1, 2, 3)
WGMMA_M_TILES_CHOICES = (1, 2)
BLOCK_N_CHOICES = (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
BLOCK_K_BYTES_CHOICES = (32, 64, 128, 256)
MAX_SWIZZLE_BYTES = 128  # of a row that lie together, at most: the widest swizzle
STAGES_CHOICES = (2, 3, 4, 5, 6, 8)
SPLIT_K_CHOICES = (1, 2, 3, 4, 5, 6, 8)
CLUSTER_M_CHOICES, CLUSTER_N_CHOICES = (1, 2, 4), (1, 2)

# Blocks at a time, one on a multiprocessor, of an H100 SXM or an H200, by how many a cluster has. A cluster stays in
# one group of 16 or 18 multiprocessors, of which some are left over. Elsewhere some blocks wait for others. Those of 2,
# 4 and 8 are cuOccupancyMaxActiveClusters'; with one cluster of 3, 5 or 6 more than here kernels took twice as long.
NUM_MULTIPROCESSORS = 132
MAX_ACTIVE_CTAS = np.array([0, NUM_MULTIPROCESSORS, 66 * 2, 39 * 3, 30 * 4, 22 * 5, 17 * 6, 0, 15 * 8])
OVERHEAD_REGISTERS = 28  # of a thread, besides its accumulators
SM_SHARED_BYTES, RESERVED_SHARED_BYTES_PER_CTA = (
    228 << 10,
    1 << 10,
)  # of a multiprocessor, and of it the driver's for each block
MAX_RESIDENT_THREADS = 2048  # of a multiprocessor
MAX_EPILOGUE_ROW_BYTES = 128  # of channels that are stored at a time, at most
REDUCE_PIECE_M, REDUCE_PIECE_N = 4, 8  # pixels × channels whose sums lie together where sums meet


@dataclass(frozen=True)
class HopperTileConfig:
    """The tile of a block, and who works on it.

    Attributes:
        warpgroups: that multiply; each has 64 × `rows` pixels.
        rows: wgmmas of a warpgroup along the pixels.
        block_n: output channels of a block.
        row_bytes: of the reduction that a step stages for each pixel and channel, in panels as wide as a swizzle.
        stages: steps that are in shared memory at a time: being multiplied, or on their way.
        split_k: blocks of a cluster that share the sums of one output, each over a part of the steps.
        sharers_m: blocks of a cluster, of neighbouring pixels, that share the weights: each fetches a part for all.
        sharers_n: blocks of a cluster, of neighbouring channels, that share the input in the same way.
        taps: of a filter's line that read the same copy of the pixels, each a little further on: one, or all.
        halo_width: pixels by which the last of these taps is further on than the first.
    """

    warpgroups: Any
    rows: Any
    block_n: Any
    row_bytes: Any
    stages: Any
    split_k: Any
    sharers_m: Any
    sharers_n: Any
    taps: Any = 1
    halo_width: Any = 0

    @classmethod
    def from_columns(cls, columns: Columns, w: Conv) -> HopperTileConfig:
        """The tiles of many configs."""
        return cls(
            **{name: columns[name] for name in KNOB_NAMES},
            taps=columns.get("taps", 1),
            halo_width=compute_halo_width(w),
        )

    @property
    def block_m(self) -> Any:
        """Pixels of a block."""
        return self.warpgroups * self.rows * WGMMA_M

    @property
    def multicast_size(self) -> Any:
        """Blocks of a cluster that share operands."""
        return self.sharers_m * self.sharers_n

    @property
    def cluster_size(self) -> Any:
        """Blocks of a cluster."""
        return self.multicast_size * self.split_k

    @property
    def max_active_ctas(self) -> Any:
        """Blocks that run at a time, one on a multiprocessor."""
        return np.take(MAX_ACTIVE_CTAS, self.cluster_size, mode="clip")  # no more than eight are legal

    @property
    def num_accumulators(self) -> Any:
        """Sums of a thread."""
        return self.rows * self.block_n // 2

    @property
    def num_threads(self) -> Any:
        """Threads of a block, but for those that fetch a residual: the warpgroups, and the warp that copies."""
        return self.warpgroups * WARPGROUP_THREADS + WARP_SIZE

    def threads_with_residual_warp(self, w: Conv) -> Any:
        """Threads of a block, with the warp that fetches a residual where that comes by TMA."""
        return self.num_threads + np.where(self.uses_smem_reduction(w), 0, WARP_SIZE if find_residual(w) else 0)

    def block_k(self, itemsize: int) -> Any:
        """Elements of the reduction that a step stages."""
        return self.row_bytes // itemsize

    @property
    def swizzle_bytes(self) -> Any:
        """Bytes of a row that lie together, and among which chunks are swizzled."""
        return np.minimum(self.row_bytes, MAX_SWIZZLE_BYTES)

    def num_tiles_m(self, gemm: ImplicitGemmShape) -> Any:
        """Tiles along the pixels, of whole clusters."""
        return ceil_div(gemm.m, self.block_m * self.sharers_m) * self.sharers_m

    def num_tiles_n(self, gemm: ImplicitGemmShape) -> Any:
        """Tiles along the channels of a group, of whole clusters."""
        return ceil_div(gemm.n, self.block_n * self.sharers_n) * self.sharers_n

    def num_tiles(self, gemm: ImplicitGemmShape) -> Any:
        """Tiles of the output."""
        return gemm.groups * self.num_tiles_m(gemm) * self.num_tiles_n(gemm)

    def k_tiles_per_tap(self, gemm: ImplicitGemmShape) -> Any:
        """Steps that the channels under one tap take."""
        return ceil_div(gemm.channels_per_group, self.block_k(gemm.itemsize))

    def total_k_tiles(self, gemm: ImplicitGemmShape) -> Any:
        """Steps of the whole reduction."""
        return gemm.k // gemm.channels_per_group // self.taps * self.k_tiles_per_tap(gemm)

    def k_tiles_per_cta(self, gemm: ImplicitGemmShape) -> Any:
        """Steps of a block, for one tile."""
        return ceil_div(self.total_k_tiles(gemm), self.split_k)

    def stage_bytes(self) -> Any:
        """Shared memory of one stage: both operands."""
        return (self.smem_rows_per_wgmma * (self.block_m // WGMMA_M) + self.block_n * self.taps) * self.row_bytes

    @property
    def smem_rows_per_wgmma(self) -> Any:
        """Rows in shared memory of the 64 pixels of a wgmma, with those that further taps reach: whole swizzles."""
        return np.where(self.taps > 1, round_up(WGMMA_M + self.halo_width, 8), WGMMA_M)

    def epilogue_row_bytes(self, itemsize: int) -> Any:
        """Bytes of channels that are stored at a time: those that divide the block's, of a whole swizzle."""
        return np.gcd(self.block_n * itemsize, MAX_EPILOGUE_ROW_BYTES)

    def num_epilogue_tiles(self, itemsize: int) -> Any:
        """What a warpgroup stores one after another of a tile: 64 pixels × a slab of channels each."""
        return self.rows * (self.block_n * itemsize // self.epilogue_row_bytes(itemsize))

    def num_ctas(self, w: Conv) -> Any:
        """Blocks of the grid: as many as run at a time, if each takes tiles in turn."""
        gemm = ImplicitGemmShape.from_workload(w)
        persistent_ctas = np.minimum(self.num_tiles(gemm), self.max_active_ctas)
        return np.where(self.uses_smem_reduction(w), self.num_tiles(gemm) * self.split_k, persistent_ctas)

    def uses_smem_reduction(self, w: Conv) -> Any:
        """Whether sums meet in shared memory before they are stored: of several blocks, or where TMA cannot store."""
        return (self.split_k > 1) | np.asarray(not can_store_by_tma(w))

    @property
    def reduce_rows_per_cta(self) -> Any:
        """Pixels of a tile whose sums one block of its cluster adds up."""
        return ceil_div(self.block_m, self.split_k * REDUCE_PIECE_M) * REDUCE_PIECE_M

    def epilogue_stages(self, w: Conv) -> Any:
        """Slabs of a warpgroup in shared memory on their way out; with a residual, also on their way in."""
        epilogue_tiles = self.num_epilogue_tiles(ImplicitGemmShape.from_workload(w).itemsize)
        return np.minimum(epilogue_tiles, 4) if find_residual(w) else np.minimum(epilogue_tiles, 2)

    def epilogue_smem_bytes(self, w: Conv) -> Any:
        """Shared memory of the slabs."""
        epilogue_tile_bytes = WGMMA_M * self.epilogue_row_bytes(ImplicitGemmShape.from_workload(w).itemsize)
        return np.where(
            self.uses_smem_reduction(w),
            0,
            self.warpgroups
            * self.epilogue_stages(w)
            * ceil_div(epilogue_tile_bytes, SWIZZLE_ALIGNMENT_BYTES)
            * SWIZZLE_ALIGNMENT_BYTES,
        )

    def channel_arg_bytes(self, w: Conv) -> Any:
        """Shared memory of what the epilogue reads for each channel, of every warpgroup."""
        num_channel_args = sum(op.argument_kind == "channel" for op in epilogue.get_ops(w.epilogue))
        return np.where(
            self.uses_smem_reduction(w), 0, self.warpgroups * num_channel_args * self.block_n * ACCUMULATOR_BYTES
        )

    def num_barriers(self, w: Conv) -> Any:
        """mbarriers: two of each stage, and two of each slab that a residual comes in."""
        return 2 * self.stages + (2 * self.warpgroups * self.epilogue_stages(w) if find_residual(w) else 0)

    def mainloop_smem_bytes(self) -> Any:
        """Shared memory of all stages, in whole lines: slabs lie behind them."""
        return round_up(self.stages * self.stage_bytes(), SWIZZLE_ALIGNMENT_BYTES)

    def barrier_offset_bytes(self, w: Conv) -> Any:
        """Shared memory before the barriers: the stages, and what is stored behind them or, when sums meet, in them."""
        reduction_bytes = np.maximum(
            self.mainloop_smem_bytes(), self.split_k * self.reduce_rows_per_cta * self.block_n * ACCUMULATOR_BYTES
        )
        return np.where(
            self.uses_smem_reduction(w),
            round_up(reduction_bytes, VECTOR_BYTES),
            self.mainloop_smem_bytes() + self.epilogue_smem_bytes(w) + self.channel_arg_bytes(w),
        )

    def dynamic_smem_bytes(self, w: Conv) -> Any:
        """Dynamic shared memory of a block, with what it takes to begin at a whole line."""
        return SWIZZLE_ALIGNMENT_BYTES + self.barrier_offset_bytes(w) + self.num_barriers(w) * BARRIER_BYTES

    def estimate_registers(self) -> Any:
        """Registers of a thread, about."""
        return self.num_accumulators + OVERHEAD_REGISTERS

    def ctas_per_sm(self, w: Conv) -> Any:
        """Blocks that a multiprocessor runs at a time, if there are as many; of those that take tiles in turn, one."""
        gemm = ImplicitGemmShape.from_workload(w)
        occupancy = np.minimum(
            SM_SHARED_BYTES // (self.dynamic_smem_bytes(w) + RESERVED_SHARED_BYTES_PER_CTA),
            MAX_RESIDENT_THREADS // self.num_threads,
        )
        occupancy = np.minimum(
            occupancy, REGISTERS_PER_MULTIPROCESSOR // (round_up(self.estimate_registers(), 8) * self.num_threads)
        )
        needed_ctas = ceil_div(self.num_tiles(gemm) * self.split_k, self.max_active_ctas)
        return np.where(self.uses_smem_reduction(w), np.clip(np.minimum(occupancy, needed_ctas), 1, None), 1)


KNOB_NAMES = [field.name for field in fields(HopperTileConfig)][:-2]  # the knobs of every workload
KNOB_OPTIONS = (
    WARPGROUP_CHOICES,
    WGMMA_M_TILES_CHOICES,
    BLOCK_N_CHOICES,
    BLOCK_K_BYTES_CHOICES,
    STAGES_CHOICES,
    SPLIT_K_CHOICES,
    CLUSTER_M_CHOICES,
    CLUSTER_N_CHOICES,
)
