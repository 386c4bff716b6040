"""Common state of the `mma_sync` kernel: sizes of a block, its buffers, and its current work tile."""

from __future__ import annotations

import math
from contextlib import ExitStack

from tvmconv.arithmetic import ceil_div
from tvmconv.target import WARP_SIZE
from tvmconv.workloads import Conv

from ....tir_builder import Buffer, Expr, allocate, logical_and, thread_axis, to_uint32
from ..implicit_gemm_shape import ACCUMULATOR_BYTES, VECTOR_BYTES, ImplicitGemmShape
from .epilogue_split import compute_staged_itemsize, split_epilogue, stores_raw_accumulators
from .tile_config import MMA_K_BYTES, MMA_M, MMA_N, MmaSyncTileConfig

SWIZZLE_CHUNKS = 8  # 16-byte chunks that a swizzle permutes: 128 bytes, which all banks serve in one access


class MmaSyncKernelBase:
    """State that the parts of the `mma_sync` kernel share for one block of the grid.

    Args:
        w: The workload.
        tiles: The tile config.
        arguments: Argument buffers by name.
        workspace: Buffer in global memory for the partial sums of a split reduction; None without one.
    """

    def __init__(
        self, w: Conv, tiles: MmaSyncTileConfig, arguments: dict[str, Buffer], workspace: Buffer | None
    ) -> None:
        self.w, self.config, self.gemm = w, tiles, ImplicitGemmShape.from_workload(w)
        self.arguments, self.workspace = arguments, workspace
        gemm, config = self.gemm, tiles
        self.chunk_elements = VECTOR_BYTES // gemm.itemsize
        # Elements that are contiguous in memory for any tap.
        self.contiguous_elements = math.gcd(gemm.channels_per_group, self.chunk_elements)
        self.k_tile_row_bytes = config.block_k * gemm.itemsize
        self.chunks_per_row = self.k_tile_row_bytes // VECTOR_BYTES
        self.rows_per_pass = int(config.rows_per_pass(gemm.itemsize))
        self.stage_bytes = int(config.stage_bytes(gemm))
        self.k_tiles_per_block = int(config.k_tiles_per_block(gemm))
        self.num_work_blocks = int(config.num_blocks(gemm)) // int(config.split_k)
        # With several tiles per block, the output tile lies behind the stages, which hold the next tile's operands.
        self.output_tile_offset = 0 if config.tiles_per_block == 1 else int(config.stages) * self.stage_bytes
        self.warp_mmas_m = config.block_m // config.warps_m // MMA_M  # mma tiles per warp
        self.warp_mmas_n = config.block_n // config.warps_n // MMA_N
        self.warp_mmas_k = self.k_tile_row_bytes // MMA_K_BYTES // config.warps_k  # mma steps per warp and k-tile
        self.stores_raw_accumulators = bool(stores_raw_accumulators(w, config))
        self.staged_itemsize = int(compute_staged_itemsize(w, config))
        self.pitch_bytes = int(config.pitch_bytes(self.staged_itemsize))
        self.accum_ops, self.vector_ops = (
            split_epilogue(w, config.residual_add == "accumulator_init", not config.uses_cluster_reduction)
            if workspace is None
            else ([], [])
        )
        self.channel_arg_ops = [operation for operation in self.accum_ops if operation.argument_kind == "channel"]
        self.channel_args_offset = int(config.stage_and_tile_smem_bytes(gemm, self.staged_itemsize))  # bytes, in smem
        self.vector_elements = math.gcd(gemm.n, self.chunk_elements)  # contiguous output elements per store

    def allocate_buffers(self) -> None:
        """Allocate registers and shared memory."""
        config, gemm = self.config, self.gemm
        rows_per_thread = [ceil_div(block, self.rows_per_pass) for block in (config.block_m, config.block_n)]
        self.accum = allocate("sums", self.warp_mmas_m * self.warp_mmas_n * 4, "float32")
        self.a_frag = allocate("a", 2 * self.warp_mmas_m * 4, "uint32")
        self.b_frag = allocate("b", 2 * self.warp_mmas_n * 2, "uint32")
        # Indices of the pipeline stage that is read and of the stage that is written.
        self.smem_pipe_slots = allocate("slot", 2, "int32")
        # Offset of each row's pixel in X at the first tap, and the coordinates of that tap.
        self.pixel_offset = allocate("pixel", rows_per_thread[0], "int32")
        self.first_tap_coords = [
            allocate(f"first_{axis}", rows_per_thread[0], "int32") for axis in range(self.w.spatial_ndim)
        ]
        self.filter_offset = allocate("filter", rows_per_thread[1], "int32")  # offset of each row's filter in K
        self.smem_base = allocate("memory", 1, "uint32")  # address of shared memory
        self.packed = allocate("words", 8, "uint32")
        self.values = allocate("value", 8, "float32")
        self.channel_arg_regs = {
            op.name: allocate(f"{op.name}_j", self.warp_mmas_n * 2, "float32") for op in self.channel_arg_ops
        }
        smem_bytes = int(config.dynamic_smem_bytes(gemm, self.staged_itemsize, len(self.channel_arg_ops)))
        self.smem = allocate("shared", smem_bytes // 4, "uint32", "shared.dyn")

    def bind_axes(self, axes: ExitStack) -> None:
        """Open the loops over blocks and threads."""
        config, bind = self.config, axes.enter_context
        self.split_k_idx = bind(thread_axis(int(config.split_k), "blockIdx.z"))
        if config.uses_cluster_reduction:
            bind(thread_axis(int(config.split_k), "clusterCtaIdx.z"))
        self.block_idx = bind(thread_axis(self.num_work_blocks, "blockIdx.x"))
        self.thread_idx = bind(thread_axis(int(config.num_threads), "threadIdx.x"))

    def set_work_tile(self, tile_idx: Expr) -> None:
        """Set the work tile that the following statements compute."""
        self.tile_offset_m, self.tile_offset_n, self.group_idx = self.compute_tile_origin(tile_idx)

    def compute_tile_origin(self, tile_idx: Expr) -> tuple[Expr, Expr, Expr]:
        """Return the first pixel, the first channel and the group of a tile."""
        gemm, config = self.gemm, self.config
        num_tiles_n, num_tiles_m = ceil_div(gemm.n, config.block_n), ceil_div(gemm.m, config.block_m)
        offset_m, offset_n = (
            tile_idx // num_tiles_n % num_tiles_m * config.block_m,
            tile_idx % num_tiles_n * config.block_n,
        )
        return offset_m, offset_n, tile_idx // (num_tiles_n * num_tiles_m)

    def is_valid_tile(self, tile_idx: Expr) -> Expr:
        """Return whether a tile index is in range; in the last round some blocks have no tile."""
        has_full_rounds = self.num_work_blocks * self.config.tiles_per_block == int(self.config.num_tiles(self.gemm))
        return True if has_full_rounds else tile_idx < int(self.config.num_tiles(self.gemm))

    def init_thread_coords(self) -> None:
        """Compute the rows and the chunk that a thread copies, and the position of its warp in the tile."""
        config = self.config
        self.chunk_idx, self.row_idx = self.thread_idx % self.chunks_per_row, self.thread_idx // self.chunks_per_row
        self.lane_idx, warp_idx = self.thread_idx % WARP_SIZE, self.thread_idx // WARP_SIZE
        self.warp_m = warp_idx % config.warps_m
        self.warp_n = warp_idx // config.warps_m % config.warps_n
        self.warp_k = warp_idx // (config.warps_m * config.warps_n)

    def is_first_k_slice(self) -> Expr:
        """Return whether this warp holds the final sums of its part of the tile."""
        return self.warp_k == 0 if self.config.warps_k > 1 else True

    def swizzle_mask(self, row: Expr) -> Expr:
        """Return the number with which the chunk index of a row is XORed."""
        rows_per_128_bytes = max(SWIZZLE_CHUNKS // self.chunks_per_row, 1)
        return row // rows_per_128_bytes % min(self.chunks_per_row, SWIZZLE_CHUNKS)

    def channel_arg_address(self, arg_idx: int, channel: Expr) -> Expr:
        """Return the shared-memory address of a per-channel epilogue argument."""
        return (
            self.smem_base[0]
            + to_uint32(self.channel_args_offset + arg_idx * self.config.block_n * ACCUMULATOR_BYTES)
            + to_uint32(channel * ACCUMULATOR_BYTES)
        )

    def accum_pixel(self, mma_m: Expr, pixel_half: Expr) -> Expr:
        """Return the pixel of this thread's accumulators in half `pixel_half` of an mma tile."""
        return (
            self.tile_offset_m + (self.warp_m * self.warp_mmas_m + mma_m) * MMA_M + pixel_half * 8 + self.lane_idx // 4
        )

    def accum_channel(self, mma_n: Expr) -> Expr:
        """Return the first channel, within its group, of two neighbouring accumulators of this thread."""
        return self.tile_offset_n + (self.warp_n * self.warp_mmas_n + mma_n) * MMA_N + self.lane_idx % 4 * 2

    def is_inside_output(self, pixel: Expr, channel: Expr) -> Expr:
        """Return whether a pixel and a channel of the tile lie inside the product."""
        gemm, config = self.gemm, self.config
        return logical_and(
            True if gemm.m % config.block_m == 0 else pixel < gemm.m,
            True if gemm.n % config.block_n == 0 else channel < gemm.n,
        )
