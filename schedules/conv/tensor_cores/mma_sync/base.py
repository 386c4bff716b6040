"""What the parts of `mma_sync` have in common: numbers of a block, its arrays, the tile that it is at."""

from __future__ import annotations

import math
from contextlib import ExitStack

from tvmconv.arithmetic import ceil_div
from tvmconv.gpu_specs import WARP_SIZE
from tvmconv.workloads import Conv

from ....tir_builder import Buffer, Expr, allocate, logical_and, thread_axis, to_uint32
from ..implicit_gemm_shape import ACCUMULATOR_BYTES, VECTOR_BYTES, ImplicitGemmShape
from .epilogue_split import compute_staged_itemsize, split_epilogue, stores_raw_accumulators
from .tile_config import MMA_K_BYTES, MMA_M, MMA_N, MmaSyncTileConfig

SWIZZLE_CHUNKS = 8  # chunks among which a row's are permuted: 128 bytes, what all banks serve at a time


class MmaSyncKernelBase:
    """A block of the grid.

    Args:
        w: the workload.
        tiles: how it is cut up.
        arguments: by name.
        workspace: scratch memory for the sums of each block of a split reduction, if these meet there.
    """

    def __init__(
        self, w: Conv, tiles: MmaSyncTileConfig, arguments: dict[str, Buffer], workspace: Buffer | None
    ) -> None:
        self.w, self.config, self.gemm = w, tiles, ImplicitGemmShape.from_workload(w)
        self.arguments, self.workspace = arguments, workspace
        gemm, config = self.gemm, tiles
        self.chunk_elements = VECTOR_BYTES // gemm.itemsize
        self.contiguous_elements = math.gcd(
            gemm.channels_per_group, self.chunk_elements
        )  # elements that are neighbours in memory, for any tap
        self.k_tile_row_bytes = config.block_k * gemm.itemsize
        self.chunks_per_row = self.k_tile_row_bytes // VECTOR_BYTES  # of a row
        self.rows_per_pass = int(config.rows_per_pass(gemm.itemsize))
        self.stage_bytes = int(config.stage_bytes(gemm))
        self.k_tiles_per_block = int(config.k_tiles_per_block(gemm))
        self.num_work_blocks = int(config.num_blocks(gemm)) // int(config.split_k)
        self.output_tile_offset = (
            0 if config.tiles_per_block == 1 else int(config.stages) * self.stage_bytes
        )  # a finished tile is behind
        self.warp_mmas_m = config.block_m // config.warps_m // MMA_M  # of a warp
        self.warp_mmas_n = config.block_n // config.warps_n // MMA_N
        self.warp_mmas_k = self.k_tile_row_bytes // MMA_K_BYTES // config.warps_k  # in a step
        self.stores_raw_accumulators = bool(stores_raw_accumulators(w, config))
        self.staged_itemsize = int(compute_staged_itemsize(w, config))
        self.pitch_bytes = int(config.pitch_bytes(self.staged_itemsize))
        self.accum_ops, self.vector_ops = (
            split_epilogue(w, config.residual == "begin", not config.uses_cluster_reduction)
            if workspace is None
            else ([], [])
        )
        self.channel_arg_ops = [operation for operation in self.accum_ops if operation.argument_kind == "channel"]
        self.channel_args_offset = int(config.stage_and_tile_smem_bytes(gemm, self.staged_itemsize))  # in shared memory
        self.vector_elements = math.gcd(gemm.n, self.chunk_elements)  # output elements that are neighbours in memory

    def allocate_buffers(self) -> None:
        """Name the registers and the shared memory."""
        config, gemm = self.config, self.gemm
        rows_per_thread = [ceil_div(block, self.rows_per_pass) for block in (config.block_m, config.block_n)]
        self.accum = allocate("sums", self.warp_mmas_m * self.warp_mmas_n * 4, "float32")
        self.a_frag = allocate("a", 2 * self.warp_mmas_m * 4, "uint32")
        self.b_frag = allocate("b", 2 * self.warp_mmas_n * 2, "uint32")
        self.smem_pipe_slots = allocate(
            "slot", 2, "int32"
        )  # of the ring of stages: the one that is read, the one that is filled
        self.pixel_offset = allocate(
            "pixel", rows_per_thread[0], "int32"
        )  # where the first tap of a row's pixel lies in X
        self.first_tap_coords = [
            allocate(f"first_{axis}", rows_per_thread[0], "int32") for axis in range(self.w.spatial_ndim)
        ]  # its coordinates
        self.filter_offset = allocate("filter", rows_per_thread[1], "int32")  # where a row's filter lies in K
        self.smem_base = allocate("memory", 1, "uint32")  # the address of shared memory
        self.packed = allocate("words", 8, "uint32")
        self.values = allocate("value", 8, "float32")
        self.channel_arg_regs = {
            op.name: allocate(f"{op.name}_j", self.warp_mmas_n * 2, "float32") for op in self.channel_arg_ops
        }
        smem_bytes = int(config.dynamic_smem_bytes(gemm, self.staged_itemsize, len(self.channel_arg_ops)))
        self.smem = allocate("shared", smem_bytes // 4, "uint32", "shared.dyn")

    def bind_axes(self, axes: ExitStack) -> None:
        """Open the loops of blocks and threads."""
        config, bind = self.config, axes.enter_context
        self.split_k_idx = bind(thread_axis(int(config.split_k), "blockIdx.z"))
        if config.uses_cluster_reduction:
            bind(thread_axis(int(config.split_k), "clusterCtaIdx.z"))
        self.block_idx = bind(thread_axis(self.num_work_blocks, "blockIdx.x"))
        self.thread_idx = bind(thread_axis(int(config.num_threads), "threadIdx.x"))

    def set_work_tile(self, tile_idx: Expr) -> None:
        """Turn to a tile: the parts are about it."""
        self.tile_offset_m, self.tile_offset_n, self.group_idx = self.compute_tile_origin(tile_idx)

    def compute_tile_origin(self, tile_idx: Expr) -> tuple[Expr, Expr, Expr]:
        """The first pixel and the first channel of a tile, and its group."""
        num_tiles_n, num_tiles_m = (
            ceil_div(self.gemm.n, self.config.block_n),
            ceil_div(self.gemm.m, self.config.block_m),
        )
        return (
            tile_idx // num_tiles_n % num_tiles_m * self.config.block_m,
            tile_idx % num_tiles_n * self.config.block_n,
            tile_idx // (num_tiles_n * num_tiles_m),
        )

    def is_valid_tile(self, tile_idx: Expr) -> Expr:
        """Whether there is a tile of that number: the last blocks may have fewer than the others."""
        has_full_rounds = self.num_work_blocks * self.config.tiles_per_block == int(self.config.num_tiles(self.gemm))
        return True if has_full_rounds else tile_idx < int(self.config.num_tiles(self.gemm))

    def init_thread_coords(self) -> None:
        """Which rows and chunk a thread copies, and which part of the tile its warp computes."""
        config = self.config
        self.chunk_idx, self.row_idx = self.thread_idx % self.chunks_per_row, self.thread_idx // self.chunks_per_row
        self.lane_idx, warp_idx = self.thread_idx % WARP_SIZE, self.thread_idx // WARP_SIZE
        self.warp_m = warp_idx % config.warps_m
        self.warp_n = warp_idx // config.warps_m % config.warps_n
        self.warp_k = warp_idx // (config.warps_m * config.warps_n)

    def is_first_k_slice(self) -> Expr:
        """Whether this warp ends up with the sums of its part of the tile."""
        return self.warp_k == 0 if self.config.warps_k > 1 else True

    def swizzle_mask(self, row: Expr) -> Expr:
        """What the number of a chunk in a row is XORed with."""
        rows_per_128_bytes = max(SWIZZLE_CHUNKS // self.chunks_per_row, 1)  # that lie side by side in the banks
        return row // rows_per_128_bytes % min(self.chunks_per_row, SWIZZLE_CHUNKS)

    def channel_arg_address(self, arg_idx: int, channel: Expr) -> Expr:
        """The address of what the epilogue has for a channel of the tile, for one of its operations."""
        return (
            self.smem_base[0]
            + to_uint32(self.channel_args_offset + arg_idx * self.config.block_n * ACCUMULATOR_BYTES)
            + to_uint32(channel * ACCUMULATOR_BYTES)
        )

    def accum_pixel(self, mma_m: Expr, pixel_half: Expr) -> Expr:
        """The pixel of a sum of this thread, of the i-th mma of its warp in its h-th half."""
        return (
            self.tile_offset_m + (self.warp_m * self.warp_mmas_m + mma_m) * MMA_M + pixel_half * 8 + self.lane_idx // 4
        )

    def accum_channel(self, mma_n: Expr) -> Expr:
        """The channel, in its group, of the first of two neighbouring sums of this thread, of the j-th mma."""
        return self.tile_offset_n + (self.warp_n * self.warp_mmas_n + mma_n) * MMA_N + self.lane_idx % 4 * 2

    def is_inside_output(self, pixel: Expr, channel: Expr) -> Expr:
        """Whether the tile's pixel and channel are in the product, and not in its overhang."""
        gemm, config = self.gemm, self.config
        return logical_and(
            True if gemm.m % config.block_m == 0 else pixel < gemm.m,
            True if gemm.n % config.block_n == 0 else channel < gemm.n,
        )
