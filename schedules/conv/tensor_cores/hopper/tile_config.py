"""Tile config of `hopper`: how CTAs and warpgroups divide a convolution, pixels × channels × taps.

A `HopperTileConfig` holds one config as numbers or many configs as columns, so that the kernel, the search limits and
the latency estimate use the same formulas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tvmconv.arithmetic import ceil_div, round_up
from tvmconv.space import Columns
from tvmconv.target import H200, WARP_SIZE
from tvmconv.tensor_map import MAX_BOX_ELEMENTS
from tvmconv.workloads import Conv, epilogue
from tvmconv.workloads.dtypes import get_numpy_dtype

from ...tile_config import TileConfig
from ..implicit_gemm_shape import ACCUMULATOR_BYTES, VECTOR_BYTES, ImplicitGemmShape
from ..latency_model import count_ctas_per_sm
from ..promotion import ALTERNATING, SIMULTANEOUS
from .tma_requirements import (
    WARPGROUP_THREADS,
    WGMMA_K_BYTES,
    WGMMA_M,
    can_store_by_tma,
    can_store_rows_by_tma,
    count_padding_rows,
    describe_lines,
    find_tma_residual,
)

SWIZZLE_ALIGNMENT_BYTES = 1024  # period of the 128-byte swizzle: 8 rows
BARRIER_BYTES = 8
SWIZZLE_ROWS = 8  # rows of a swizzle atom

WARPGROUP_CHOICES = (1, 2, 3)
WGMMA_M_TILES_CHOICES = (1, 2)
REALLOCATED_WGMMA_M_TILES_CHOICES = (*WGMMA_M_TILES_CHOICES, 3)  # with `setmaxnreg`
BLOCK_N_CHOICES = (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
BLOCK_K_BYTES_CHOICES = (32, 64, 128, 256)
MAX_SWIZZLE_BYTES = 128  # the widest swizzle
STAGES_CHOICES = (2, 3, 4, 5, 6, 8)
MAX_TILES_AHEAD = 4  # tiles of which a CTA that computes several has k-tiles in shared memory
SPLIT_K_CHOICES = (1, 2, 3, 4, 5, 6, 8)
K_SLICES_CHOICES, MIN_SLICED_STAGES = (1, 2), 4  # of wgrads; each slice has a stage to read and one that is filled
CLUSTER_M_CHOICES, CLUSTER_N_CHOICES = (1, 2, 4), (1, 2)
COOPERATIVE, COOPERATIVE_SETMAXNREG, PINGPONG = "cooperative", "cooperative_setmaxnreg", "pingpong"
KERNEL_SCHEDULES = (COOPERATIVE, COOPERATIVE_SETMAXNREG, PINGPONG)
RASTER_ORDERS = ("n", "m")
DATA_PARALLEL, SPLIT_LAST_WAVE, NARROW_LAST_WAVE = "data_parallel", "split_last_wave", "narrow_last_wave"
DECOMPOSITIONS = DATA_PARALLEL, SPLIT_LAST_WAVE, NARROW_LAST_WAVE
SUM_DECOMPOSITIONS = DATA_PARALLEL, SPLIT_LAST_WAVE  # of kernels whose results are partial sums
OUTPUT_STAGES_CHOICES, RESIDUAL_STAGES = (2, 4, 8), 4  # epilogue tiles per warpgroup in shared memory
OUTPUT_BOXES = SWIZZLED, WIDE = "swizzled", "wide"  # rows of the boxes that TMA stores
OUTPUT_EVICTIONS = NORMAL, FIRST = "normal", "first"  # when lines of the output leave L2
FILTER_COPIES = STREAMED, RESIDENT = "streamed", "resident"  # how often a CTA loads filters: per work tile, or once
CONVERTED, TMA, CP_ASYNC = "converted", "tma", "cp_async"  # loaders of a channels-first X
HALO_LOADERS = HALO, HALO_SMEM = "halo", "halo_smem"
PRODUCER_WARPGROUPS_CHOICES = (1, 2)  # of halo rows
MAX_LAST_WAVE_PARTS = 8  # CTAs that divide a tile of the last wave
NARROW_PARTS, MIN_NARROW_N = (
    (2, 4, 8),
    32,
)  # parts of a tile of the last wave along the channels, and channels of a part
# Registers per thread of the producer and of the consumers after `setmaxnreg`, by the number of consumer warpgroups.
# Source: CUTLASS, `include/cutlass/gemm/kernel/sm90_gemm_tma_warpspecialized_cooperative.hpp`.
REALLOCATED_REGISTERS = {2: (40, 232), 3: (32, 160)}

# Maximum number of active CTAs, one per SM, on an H100 SXM or H200, by cluster size. A cluster stays within a GPC of 16
# or 18 SMs, some of which remain unused. The values for 2, 4 and 8 are those of cuOccupancyMaxActiveClusters; with one
# more cluster of 3, 5 or 6 CTAs than listed here, kernels took twice as long.
NUM_MULTIPROCESSORS = H200.multiprocessors
MAX_ACTIVE_CTAS = np.array([0, NUM_MULTIPROCESSORS, 66 * 2, 39 * 3, 30 * 4, 22 * 5, 17 * 6, 0, 15 * 8])
OVERHEAD_REGISTERS = 28  # registers per thread besides the accumulators
STATS_OVERHEAD_REGISTERS = 12  # registers per thread of statistics, besides sums
MIN_SWIZZLE_BYTES = 32  # width of the narrowest swizzle
MAX_EPILOGUE_ROW_BYTES = 128  # maximum bytes of channels per epilogue tile
REDUCE_PIECE_M = 4  # pixels that are contiguous in shared memory for a reduction


@dataclass(frozen=True)
class HopperTileConfig(TileConfig):
    """Tile of a CTA, and its division among warpgroups and the CTAs of a cluster."""

    warpgroups: Any  # consumer warpgroups, each of which computes 64 × `wgmma_m_tiles` pixels of a tile
    wgmma_m_tiles: Any  # number of wgmma tiles of a warpgroup along the pixels
    block_n: Any  # output channels per tile
    # Bytes of the reduction per k-tile, for each pixel and channel; stored in atoms as wide as a swizzle.
    block_k_bytes: Any
    stages: Any  # pipeline stages in shared memory
    split_k: Any  # CTAs of a cluster that share the reduction of an output, each with a part of the k-tiles
    cluster_m: Any  # CTAs of a cluster with neighbouring pixels, which share the weights; each multicasts a slice
    cluster_n: Any  # CTAs of a cluster with neighbouring channels, which share the input; each multicasts a slice
    # Taps of a filter row that read the same copy of the pixels at different offsets: one or all.
    taps_per_copy: Any = 1
    halo_width: Any = 0  # distance in pixels from the first to the last of these taps
    # Pixels of an output row, and with the padding that it has if taps share copies; equal if there is no padding.
    line: Any = 1
    padded_line: Any = 1
    # How the warpgroups share the work. In "cooperative" they compute one tile together, and in
    # "cooperative_setmaxnreg" the consumers also receive registers of the producer. In "pingpong" two or three
    # warpgroups compute tiles of their own in turn, with the same registers.
    kernel_schedule: Any = COOPERATIVE
    # Mode along which consecutive tiles are neighbours: "n" (channels) or "m" (pixels).
    raster_order: Any = RASTER_ORDERS[0]
    # How CTAs divide the work. In "data_parallel" a CTA computes whole tiles. In "split_last_wave" several CTAs also
    # divide the k-tiles of each tile of the last wave, and in "narrow_last_wave" its channels.
    decomposition: Any = DATA_PARALLEL
    # Products of 8-bit floats after which accumulators are added to float32 sums: whole k-tiles, or a part of one; 0:
    # never.
    promotion_interval: Any = 0
    promotion_buffers: Any = 1  # sets of accumulators; of two, one is promoted while the wgmmas of the other run
    promotion_order: Any = SIMULTANEOUS  # whether the warpgroups of a tile promote at the same time, or in turn
    input_loader: Any = CONVERTED  # how a channels-first X is loaded where there is a choice; see `input_loader.py`
    producer_warpgroups: Any = 1  # warpgroups whose warps load filters and halo rows
    # Consumer warpgroups among which the k-tiles of a tile are divided, one to each in turn, and which then add their
    # sums in shared memory.
    k_slices: Any = 1
    output_eviction: Any = NORMAL  # "first": stores go to lines that leave L2 before those of the operands
    filters: Any = STREAMED  # "resident": the work tiles of a CTA have the same channels, whose filters it loads once
    taps: Any = 1  # taps of a filter
    channel_bytes: Any = 0  # bytes of the channels of a tap
    has_filter_rows: Any = False  # whether rows of the product are filters, so that taps share copies of its columns
    output_boxes: Any = SWIZZLED  # "wide": TMA stores wider boxes without a swizzle, if swizzled ones are narrow
    output_stages: Any = 2  # epilogue tiles per warpgroup in shared memory, of outputs without a residual

    @classmethod
    def of_workload(cls, columns: Columns, w: Conv) -> HopperTileConfig:
        """Return the configs of columns for a workload."""
        return cls.from_columns(columns, **describe_lines(w))

    @property
    def is_pingpong(self) -> Any:
        """Whether each warpgroup computes tiles of its own."""
        return self.kernel_schedule == PINGPONG

    @property
    def reallocates_registers(self) -> Any:
        """Whether the consumers receive registers of the producer, which is a whole warpgroup then."""
        return self.kernel_schedule != COOPERATIVE

    @property
    def warpgroups_per_tile(self) -> Any:
        """Consumer warpgroups that compute a tile together."""
        return self.warpgroups // self.k_slices - self.is_pingpong * (self.warpgroups - 1)

    @property
    def keeps_filters(self) -> Any:
        """Whether a CTA keeps the filters of its channels in shared memory."""
        return np.equal(self.filters, RESIDENT)

    @property
    def block_m(self) -> Any:
        """Pixels per tile."""
        return self.warpgroups_per_tile * self.wgmma_m_tiles * WGMMA_M

    @property
    def multicast_size(self) -> Any:
        """CTAs of a cluster that share operands."""
        return self.cluster_m * self.cluster_n

    @property
    def cluster_size(self) -> Any:
        """CTAs per cluster."""
        return self.multicast_size * self.split_k

    @property
    def max_active_ctas(self) -> Any:
        """Maximum number of CTAs that run at a time, one per SM."""
        return np.take(MAX_ACTIVE_CTAS, self.cluster_size, mode="clip")  # legal clusters have at most eight CTAs

    @property
    def gathers_input(self) -> Any:
        """Whether threads copy a channels-first X by cp.async."""
        return np.equal(self.input_loader, CP_ASYNC)

    @property
    def num_accumulators(self) -> Any:
        """Accumulator registers per thread."""
        return self.wgmma_m_tiles * self.block_n // 2

    @property
    def num_sums(self) -> Any:
        """Registers per thread of accumulators and of promoted sums."""
        return self.num_accumulators * np.where(np.greater(self.promotion_interval, 0), 1 + self.promotion_buffers, 1)

    def products_per_k_tile(self, itemsize: int) -> Any:
        """Return the number of products that a k-tile adds to each sum."""
        return self.block_k(itemsize) * self.taps_per_copy

    def promotion_k_tiles(self, itemsize: int) -> Any:
        """Return the number of k-tiles after which accumulators are promoted; 0 if they are not."""
        k_tiles = np.maximum(1, self.promotion_interval // self.products_per_k_tile(itemsize))
        return np.where(np.greater(self.promotion_interval, 0), k_tiles, 0)

    def promotions_per_k_tile(self, itemsize: int) -> Any:
        """Return the number of promotions in a k-tile, each after at most as many products as the interval has."""
        interval = np.maximum(self.promotion_interval, WGMMA_K_BYTES // itemsize)
        promotions = ceil_div(self.products_per_k_tile(itemsize), interval)
        return np.where(np.greater(self.promotion_interval, 0), promotions, 1)

    @property
    def alternates_promotions(self) -> Any:
        """Whether the warpgroups of a tile promote at different times."""
        return np.equal(self.promotion_order, ALTERNATING)

    def promotion_steps(self, itemsize: int) -> Any:
        """Return the wgmmas along the reduction before each promotion if warpgroups alternate, else 0."""
        steps = np.maximum(self.promotion_interval // (WGMMA_K_BYTES // itemsize), 1)
        return np.where(self.alternates_promotions, steps, 0)

    def max_k_tiles_per_interval(self, itemsize: int) -> Any:
        """Return the largest number of k-tiles of which an interval between promotions in turn has products."""
        steps_per_k_tile = self.products_per_k_tile(itemsize) * itemsize // WGMMA_K_BYTES
        return ceil_div(self.promotion_steps(itemsize) + steps_per_k_tile - 1, steps_per_k_tile)

    def promoted_products(self, itemsize: int) -> Any:
        """Return the number of products that are added before a promotion; 0 if there is none."""
        wgmma_k = WGMMA_K_BYTES // itemsize
        num_wgmmas = ceil_div(self.products_per_k_tile(itemsize) // wgmma_k, self.promotions_per_k_tile(itemsize))
        products = self.promotion_k_tiles(itemsize) * num_wgmmas * wgmma_k
        return np.where(self.alternates_promotions, self.promotion_steps(itemsize) * wgmma_k, products)

    @property
    def num_threads(self) -> Any:
        """Threads per CTA without the residual warp: the consumer warpgroups, and a producer warp or warpgroup."""
        has_producer_warpgroup = np.logical_or(self.reallocates_registers, self.gathers_input)
        producers = WARP_SIZE + has_producer_warpgroup * (WARPGROUP_THREADS - WARP_SIZE)
        return self.warpgroups * WARPGROUP_THREADS + producers

    def threads_with_residual_warp(self, w: Conv) -> Any:
        """Return the threads per CTA, including the warp that loads a residual by TMA; a producer warpgroup has it."""
        has_no_further_warp = self.uses_smem_reduction(w) | self.reallocates_registers
        return self.num_threads + np.where(has_no_further_warp, 0, WARP_SIZE if find_tma_residual(w) else 0)

    def block_k(self, itemsize: int) -> Any:
        """Return the elements of the reduction per k-tile."""
        return self.block_k_bytes // itemsize

    @property
    def swizzle_bytes(self) -> Any:
        """Width of the swizzle in bytes."""
        return np.minimum(self.block_k_bytes, MAX_SWIZZLE_BYTES)

    def num_tiles_m(self, gemm: ImplicitGemmShape) -> Any:
        """Return the number of tiles along the pixels, rounded up to whole clusters."""
        pixels = np.where(self.pads_lines, gemm.m // self.line * self.padded_line, gemm.m)
        return ceil_div(pixels, self.block_m * self.cluster_m) * self.cluster_m

    @property
    def pads_lines(self) -> Any:
        """Whether output rows are padded to whole wgmmas."""
        return np.greater(self.taps_per_copy, 1) & np.not_equal(self.line, self.padded_line)

    def num_tiles_n(self, gemm: ImplicitGemmShape) -> Any:
        """Return the number of tiles along the channels of a group, rounded up to whole clusters."""
        return ceil_div(gemm.n, self.block_n * self.cluster_n) * self.cluster_n

    def num_tiles(self, gemm: ImplicitGemmShape) -> Any:
        """Return the number of output tiles."""
        return gemm.num_products * self.num_tiles_m(gemm) * self.num_tiles_n(gemm)

    def computes_several_tiles(self, gemm: ImplicitGemmShape) -> Any:
        """Return whether some CTA computes several tiles."""
        return self.num_tiles(gemm) > self.max_active_ctas

    @property
    def splits_last_wave(self) -> Any:
        """Whether several CTAs divide each tile of the last wave."""
        return self.decomposition == SPLIT_LAST_WAVE

    @property
    def narrows_last_wave(self) -> Any:
        """Whether several CTAs divide the channels of each tile of the last wave."""
        return self.decomposition == NARROW_LAST_WAVE

    @property
    def divides_last_wave(self) -> Any:
        """Whether several CTAs divide each tile of the last wave, in any way."""
        return np.not_equal(self.decomposition, DATA_PARALLEL)

    def narrow_parts(self, gemm: ImplicitGemmShape) -> Any:
        """Return the number of CTAs among which the channels of each tile of the last wave can be divided."""
        rest, best = self.num_tiles(gemm) % self.max_active_ctas, np.ones_like(self.block_n)
        for parts in NARROW_PARTS:
            has_parts = (self.block_n % (16 * parts) == 0) & (self.block_n >= parts * MIN_NARROW_N)
            best = np.where(has_parts & (rest * parts <= self.max_active_ctas), parts, best)
        return np.where(rest > 0, best, 1)

    def last_wave_parts(self, gemm: ImplicitGemmShape) -> Any:
        """Return the number of CTAs among which each tile of the last wave can be divided, each with some k-tiles."""
        rest, k_tiles = self.num_tiles(gemm) % self.max_active_ctas, self.total_k_tiles(gemm)
        parts = np.clip(self.max_active_ctas // np.maximum(rest, 1), 1, np.minimum(MAX_LAST_WAVE_PARTS, k_tiles))
        return np.where(rest > 0, ceil_div(k_tiles, ceil_div(k_tiles, parts)), 1)

    def k_tiles_per_tap(self, gemm: ImplicitGemmShape) -> Any:
        """Return the number of k-tiles per tap."""
        return ceil_div(gemm.channels_per_group, self.block_k(gemm.itemsize))

    def total_k_tiles(self, gemm: ImplicitGemmShape) -> Any:
        """Return the number of k-tiles of the whole reduction."""
        return gemm.k // gemm.channels_per_group // self.taps_per_copy * self.k_tiles_per_tap(gemm)

    def k_tiles_per_cta(self, gemm: ImplicitGemmShape) -> Any:
        """Return the number of k-tiles per CTA and tile."""
        return ceil_div(self.total_k_tiles(gemm), self.split_k)

    def useful_stages(self, gemm: ImplicitGemmShape) -> Any:
        """Return the number of stages beyond which more hardly serve: those of the k-tiles that a CTA loads ahead."""
        k_tiles = self.k_tiles_per_cta(gemm)
        return np.where(self.computes_several_tiles(gemm), MAX_TILES_AHEAD * k_tiles, k_tiles) + 1

    def stage_bytes(self) -> Any:
        """Return the shared memory of one pipeline stage in bytes, for both operands unless filters are resident."""
        return (self.a_stage_rows + self.b_streamed_rows) * self.block_k_bytes

    @property
    def b_streamed_rows(self) -> Any:
        """Rows of operand B that are copied to each stage."""
        return np.where(self.keeps_filters, 0, self.b_stage_rows)

    def resident_bytes(self) -> Any:
        """Return the shared memory of filters that a CTA keeps in bytes."""
        filter_bytes = self.taps * round_up(self.channel_bytes, self.block_k_bytes)
        return np.where(self.keeps_filters, self.block_n * filter_bytes, 0)

    @property
    def a_stage_rows(self) -> Any:
        """Rows of operand A of a stage."""
        shared_rows = self.smem_rows_per_wgmma * (self.block_m // WGMMA_M)
        return np.where(self.has_filter_rows, self.block_m * self.taps_per_copy, shared_rows)

    @property
    def b_stage_rows(self) -> Any:
        """Rows of operand B of a stage."""
        shares_columns = np.logical_and(self.has_filter_rows, np.greater(self.taps_per_copy, 1))
        shared_rows = self.num_column_copies * round_up(self.rows_per_column_copy, SWIZZLE_ROWS)
        return np.where(shares_columns, shared_rows, self.block_n * self.taps_per_copy)

    @property
    def num_column_copies(self) -> Any:
        """Copies of the columns that taps share, and of the halo of further taps."""
        return ceil_div(self.block_n + self.halo_width, MAX_BOX_ELEMENTS)

    @property
    def rows_per_column_copy(self) -> Any:
        """Rows of such a copy, of whole swizzles if there are several."""
        rows = ceil_div(self.block_n + self.halo_width, self.num_column_copies)
        return np.where(self.num_column_copies > 1, round_up(rows, SWIZZLE_ROWS), rows)

    @property
    def smem_rows_per_wgmma(self) -> Any:
        """Rows in shared memory for the 64 pixels of a wgmma and the halo of further taps, in whole swizzles."""
        shares_rows = np.logical_and(np.logical_not(self.has_filter_rows), np.greater(self.taps_per_copy, 1))
        return np.where(shares_rows, round_up(WGMMA_M + self.halo_width, SWIZZLE_ROWS), WGMMA_M)

    def epilogue_row_bytes(self, itemsize: int) -> Any:
        """Return the bytes of channels per epilogue tile, which divide the CTA's channels.

        They are a whole swizzle. Rows of wide boxes are the largest odd multiple of 32 bytes instead, so that eight of
        them are in four parts of the banks, two in each.
        """
        row_bytes = self.block_n * itemsize
        odd_multiple = row_bytes // (row_bytes & -row_bytes) * MIN_SWIZZLE_BYTES
        return np.where(self.stores_wide_boxes, odd_multiple, np.gcd(row_bytes, MAX_EPILOGUE_ROW_BYTES))

    @property
    def stores_wide_boxes(self) -> Any:
        """Whether TMA stores boxes without a swizzle."""
        return np.equal(self.output_boxes, WIDE)

    def num_epilogue_tiles(self, itemsize: int) -> Any:
        """Return the number of epilogue tiles (64 pixels × some channels) that a warpgroup stores per tile."""
        return self.wgmma_m_tiles * (self.block_n * itemsize // self.epilogue_row_bytes(itemsize))

    def count_stats_registers(self, w: Conv) -> Any:
        """Return the registers per thread of statistics: three for each column that it adds up, and the elements."""
        itemsize = get_numpy_dtype(w.argument_dtypes[-1]).itemsize
        num_columns = self.block_n * itemsize // self.epilogue_row_bytes(itemsize) * (ACCUMULATOR_BYTES // itemsize)
        return 3 * num_columns + STATS_OVERHEAD_REGISTERS

    def num_ctas(self, w: Conv) -> Any:
        """Return the number of CTAs in the grid; a persistent grid has as many as run at a time."""
        gemm = ImplicitGemmShape.from_workload(w)
        persistent_ctas = np.minimum(self.num_tiles(gemm), self.active_ctas(gemm))
        return np.where(self.uses_smem_reduction(w), self.num_tiles(gemm) * self.split_k, persistent_ctas)

    def active_ctas(self, gemm: ImplicitGemmShape) -> Any:
        """Return the number of CTAs that run at a time, of which each channel has as many if they keep filters."""
        tiles_n = self.num_tiles_n(gemm)
        whole_ctas = np.maximum(self.max_active_ctas // tiles_n, 1) * tiles_n
        return np.where(self.keeps_filters, whole_ctas, self.max_active_ctas)

    def uses_smem_reduction(self, w: Conv) -> Any:
        """Return whether partial sums are reduced in shared memory before the store.

        This is the case if the reduction is split over CTAs or warpgroups, or if TMA cannot store the output.
        """
        return (self.split_k > 1) | np.greater(self.k_slices, 1) | np.asarray(not can_store_by_tma(w))

    @property
    def reduce_rows_per_cta(self) -> Any:
        """Pixels of a tile that one CTA of the cluster reduces."""
        return ceil_div(self.block_m, self.split_k * REDUCE_PIECE_M) * REDUCE_PIECE_M

    def epilogue_stages(self, w: Conv) -> Any:
        """Return the epilogue tiles per warpgroup in shared memory, for stores and for residual loads."""
        epilogue_tiles = self.num_epilogue_tiles(get_numpy_dtype(w.argument_dtypes[-1]).itemsize)
        if not can_store_rows_by_tma(w):
            return np.minimum(epilogue_tiles, 1)
        return np.minimum(epilogue_tiles, RESIDUAL_STAGES if find_tma_residual(w) else self.output_stages)

    def epilogue_smem_bytes(self, w: Conv) -> Any:
        """Return the shared memory of the epilogue stages in bytes."""
        epilogue_tile_bytes = WGMMA_M * self.epilogue_row_bytes(get_numpy_dtype(w.argument_dtypes[-1]).itemsize)
        return np.where(
            self.uses_smem_reduction(w),
            0,
            self.warpgroups
            * self.epilogue_stages(w)
            * ceil_div(epilogue_tile_bytes, SWIZZLE_ALIGNMENT_BYTES)
            * SWIZZLE_ALIGNMENT_BYTES,
        )

    def channel_arg_bytes(self, w: Conv) -> Any:
        """Return the shared memory of the per-channel epilogue arguments of all warpgroups in bytes."""
        num_channel_args = sum(op.argument_kind == "channel" for op in epilogue.get_ops(w.epilogue))
        return np.where(
            self.uses_smem_reduction(w), 0, self.warpgroups * num_channel_args * self.block_n * ACCUMULATOR_BYTES
        )

    def num_barriers(self, w: Conv) -> Any:
        """Return the number of mbarriers.

        There are two per mainloop stage, two per epilogue stage with a residual, in ping-pong one of each warpgroup for
        the turns, and one for resident filters.
        """
        residual_barriers = 2 * self.warpgroups * self.epilogue_stages(w) if find_tma_residual(w) else 0
        return 2 * self.stages + residual_barriers + self.warpgroups * self.is_pingpong + self.keeps_filters

    def mainloop_smem_bytes(self) -> Any:
        """Return the shared memory of all mainloop stages, and of resident filters behind them, in bytes, aligned for
        the epilogue stages that follow.
        """
        return round_up(self.stages * self.stage_bytes() + self.resident_bytes(), SWIZZLE_ALIGNMENT_BYTES)

    def barrier_offset_bytes(self, w: Conv) -> Any:
        """Return the shared-memory offset of the barriers in bytes.

        They follow the mainloop stages, the epilogue stages and the per-channel arguments. Partial sums of a reduction
        reuse the memory of the mainloop stages.
        """
        reduced_rows = self.k_slices * self.split_k * self.reduce_rows_per_cta + count_padding_rows(w)
        reduction_bytes = np.maximum(self.mainloop_smem_bytes(), reduced_rows * self.block_n * ACCUMULATOR_BYTES)
        return np.where(
            self.uses_smem_reduction(w),
            round_up(reduction_bytes, VECTOR_BYTES),
            self.mainloop_smem_bytes() + self.epilogue_smem_bytes(w) + self.channel_arg_bytes(w),
        )

    def dynamic_smem_bytes(self, w: Conv) -> Any:
        """Return the dynamic shared memory per CTA in bytes, including the alignment of its start."""
        return SWIZZLE_ALIGNMENT_BYTES + self.barrier_offset_bytes(w) + self.num_barriers(w) * BARRIER_BYTES

    def estimate_registers(self) -> Any:
        """Return the estimated registers per thread of a consumer."""
        return self.num_sums + OVERHEAD_REGISTERS

    def ctas_per_sm(self, w: Conv) -> Any:
        """Return the number of resident CTAs per SM; a persistent grid has one."""
        num_ctas = self.num_tiles(ImplicitGemmShape.from_workload(w)) * self.split_k
        ctas_per_sm = count_ctas_per_sm(
            num_ctas, self.max_active_ctas, self.dynamic_smem_bytes(w), self.estimate_registers(), self.num_threads
        )
        return np.where(self.uses_smem_reduction(w), ctas_per_sm, 1)


KNOB_OPTIONS: dict[str, Sequence[int]] = {  # of every workload, in the order of the search space
    "warpgroups": WARPGROUP_CHOICES,
    "wgmma_m_tiles": WGMMA_M_TILES_CHOICES,
    "block_n": BLOCK_N_CHOICES,
    "block_k_bytes": BLOCK_K_BYTES_CHOICES,
    "stages": STAGES_CHOICES,
    "split_k": SPLIT_K_CHOICES,
    "cluster_m": CLUSTER_M_CHOICES,
    "cluster_n": CLUSTER_N_CHOICES,
}
