"""Common state of the `hopper` kernel: sizes of a CTA, its buffers and barriers, and its current work tile."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv import tensor_map as maps
from tvmconv.arithmetic import ceil_div, round_up
from tvmconv.target import WARP_SIZE
from tvmconv.workloads import Conv, epilogue

from ....tir_builder import (
    Buffer,
    Expr,
    allocate,
    declare_tensor_map,
    emit_call,
    emit_ptx,
    if_,
    serial_loop,
    store,
    thread_axis,
    to_uint32,
)
from ..implicit_gemm_shape import ACCUMULATOR_BYTES, VECTOR_BYTES, ImplicitGemmShape
from .tile_config import BARRIER_BYTES, SWIZZLE_ALIGNMENT_BYTES, HopperTileConfig
from .tma_requirements import WARPGROUP_THREADS, WGMMA_M, find_residual

TMA_LOAD_MNEMONIC = "cp.async.bulk.tensor.{rank}d.shared::cluster.global{mode}.mbarrier::complete_tx::bytes{multicast}"


class HopperKernelBase:
    """State that the parts of the `hopper` kernel share for one CTA.

    Args:
        w: The workload.
        tiles: The tile config.
        arguments: Argument buffers by name.
    """

    def __init__(self, w: Conv, tiles: HopperTileConfig, arguments: dict[str, Buffer]) -> None:
        self.w, self.config, self.gemm = w, tiles, ImplicitGemmShape.from_workload(w)
        self.arguments = arguments
        gemm, config = self.gemm, tiles
        self.block_m, self.block_k = int(config.block_m), int(config.block_k(gemm.itemsize))
        # Rows of each operand that this CTA loads and multicasts.
        self.multicast_slice_m = self.block_m // config.cluster_n
        self.multicast_slice_n = config.block_n // config.cluster_m
        self.swizzle_bytes = int(config.swizzle_bytes)
        self.num_k_atoms, self.atom_k = config.block_k_bytes // self.swizzle_bytes, self.swizzle_bytes // gemm.itemsize
        self.taps_share_copy = config.taps_per_copy > 1  # all taps of a filter row read the same copy
        self.num_input_copies = self.block_m // WGMMA_M if self.taps_share_copy else 1  # input copies per k-tile
        self.pixels_per_copy = WGMMA_M + config.halo_width if self.taps_share_copy else self.multicast_slice_m
        self.input_copy_bytes = int(config.smem_rows_per_wgmma) * self.swizzle_bytes
        self.input_bytes = int(config.smem_rows_per_wgmma) * (self.block_m // WGMMA_M) * config.block_k_bytes
        self.stage_bytes = int(config.stage_bytes())
        self.transaction_bytes = (
            self.num_input_copies * self.pixels_per_copy * config.cluster_n + config.block_n * config.taps_per_copy
        ) * config.block_k_bytes
        self.k_tile_taps_shape = (*w.kernel[:-1], 1) if self.taps_share_copy else w.kernel  # taps that k-tiles visit
        self.num_k_tile_taps = math.prod(self.k_tile_taps_shape)
        self.k_tiles_per_cta, self.total_k_tiles = int(config.k_tiles_per_cta(gemm)), int(config.total_k_tiles(gemm))
        self.k_tiles_per_tap = int(config.k_tiles_per_tap(gemm))
        self.num_tiles_m, self.num_tiles_n = int(config.num_tiles_m(gemm)), int(config.num_tiles_n(gemm))
        self.num_tiles = int(config.num_tiles(gemm))
        self.uses_smem_reduction = bool(config.uses_smem_reduction(w))
        self.num_work_ctas = int(config.num_ctas(w)) // config.split_k
        self.tiles_per_cta = 1 if self.uses_smem_reduction else ceil_div(self.num_tiles, self.num_work_ctas)
        self.epilogue_ops = epilogue.get_ops(w.epilogue)
        self.residual_name = None if self.uses_smem_reduction else find_residual(w)
        self.channel_args = [
            o.name for o in self.epilogue_ops if o.argument_kind == "channel" and not self.uses_smem_reduction
        ]
        self.epilogue_row_bytes = int(config.epilogue_row_bytes(gemm.itemsize))
        self.epilogue_stages = int(config.epilogue_stages(w))
        self.epilogue_tile_n = self.epilogue_row_bytes // gemm.itemsize  # channels
        self.epilogue_stage_bytes = round_up(WGMMA_M * self.epilogue_row_bytes, SWIZZLE_ALIGNMENT_BYTES)
        self.channel_args_offset = int(config.mainloop_smem_bytes() + config.epilogue_smem_bytes(w))
        self.barriers_offset = int(config.barrier_offset_bytes(w))
        self.num_consumer_threads = config.warpgroups * WARPGROUP_THREADS
        self.vector_channels = math.gcd(gemm.n, VECTOR_BYTES // ACCUMULATOR_BYTES)

    def bind_axes(self, axes: ExitStack) -> None:
        """Open the loops over CTAs and threads."""
        config, bind = self.config, axes.enter_context
        self.split_k_idx = bind(thread_axis(int(config.split_k), "blockIdx.z"))
        if config.split_k > 1:
            bind(thread_axis(int(config.split_k), "clusterCtaIdx.z"))
        self.cta_idx = bind(thread_axis(self.num_work_ctas, "blockIdx.x"))
        self.cta_rank = (
            bind(thread_axis(int(config.multicast_size), "clusterCtaIdx.x")) if config.multicast_size > 1 else 0
        )
        self.thread_idx = bind(
            thread_axis(self.num_consumer_threads + WARP_SIZE * (2 if self.residual_name else 1), "threadIdx.x")
        )

    def declare_tensor_maps(self) -> None:
        """Declare the TMA descriptors of the arrays."""
        w, gemm = self.w, self.gemm
        dtype, itemsize = w.storage, gemm.itemsize
        channels, extents = w.C, tuple(reversed(w.input_size))
        self.is_pointwise = (
            math.prod((*w.kernel, *w.stride)) == 1
            and w.output_size == w.input_size
            and self.multicast_slice_m <= maps.MAX_BOX_ELEMENTS
        )
        if self.taps_share_copy:  # tiled copies of image row segments, zero-filled outside the image
            sizes = (channels, *extents, w.N)
            row_strides = tuple(math.prod(sizes[:axis]) for axis in range(1, len(sizes)))
            input_box = (self.atom_k, self.pixels_per_copy, *(1,) * w.spatial_ndim)
            input_map = maps.make_tiled_map(dtype, itemsize, sizes, row_strides, input_box, self.swizzle_bytes)
        elif self.is_pointwise:  # the pixels of all images are the rows of one matrix
            pixel_box = (self.atom_k, self.multicast_slice_m)
            input_map = maps.make_tiled_map(
                dtype, itemsize, (channels, gemm.m), (channels,), pixel_box, self.swizzle_bytes
            )
        else:
            input_map = maps.make_im2col_map(
                dtype,
                itemsize,
                (channels, *extents, w.N),
                (self.atom_k, self.multicast_slice_m),
                tuple(reversed(w.stride)),
                tuple(-pad_low for pad_low in reversed(w.pad_low)),
                tuple(reversed(w.output_size)),
                self.swizzle_bytes,
            )
        self.input_map = declare_tensor_map("X_map", self.arguments["X"], input_map)
        weight_shape = (gemm.channels_per_group, math.prod(w.kernel), w.O)
        weight_box = (self.atom_k, 1, self.multicast_slice_n)
        tensor_map = maps.make_tiled_map(
            dtype, itemsize, weight_shape, (gemm.channels_per_group, gemm.k), weight_box, self.swizzle_bytes
        )
        self.weight_map = declare_tensor_map("K_map", self.arguments["K"], tensor_map)
        self.tensor_maps = [self.input_map, self.weight_map]
        if self.uses_smem_reduction:
            return
        tensor_map = maps.make_tiled_map(
            dtype,
            itemsize,
            (gemm.n, gemm.m, gemm.groups),
            (w.O, gemm.n),
            (self.epilogue_tile_n, WGMMA_M, 1),
            int(self.epilogue_row_bytes),
        )
        self.output_map = declare_tensor_map("Y_map", self.arguments["Y"], tensor_map)
        if self.residual_name:
            self.residual_map = declare_tensor_map(
                f"{self.residual_name}_map", self.arguments[self.residual_name], tensor_map
            )
            self.tensor_maps.append(self.residual_map)
        self.tensor_maps.append(self.output_map)

    def allocate_buffers(self) -> None:
        """Allocate registers and shared memory."""
        config, w = self.config, self.w
        self.lane_idx, self.warpgroup_idx = self.thread_idx % WARP_SIZE, self.thread_idx // WARPGROUP_THREADS
        self.accum = allocate("sums", int(config.num_accumulators), "float32")
        self.smem_base = allocate("memory", 1, "uint32")  # address of shared memory, aligned for swizzles
        self.mainloop_state = allocate("slot", 2, "int32")  # mainloop pipeline: stage index and phase bit
        self.epilogue_state = allocate("out", 2, "int32")  # epilogue pipeline: stage index and phase bit
        # Image coordinates of each copy's first pixel at the first tap, and its image index.
        self.pixel_coords = allocate("first", self.num_input_copies * (w.spatial_ndim + 1), "int32")
        self.tap_coords = allocate("tap", w.spatial_ndim, "int32")
        self.channel_offset = allocate("depth", 1, "int32")  # first channel of the k-tile
        self.descriptor_low = allocate("operand", 2, "uint32")  # lower halves of the matrix descriptors
        self.remote_address = allocate("remote", 1, "uint32")  # shared-memory address in another CTA of the cluster
        self.packed = allocate("words", 8, "uint32")
        self.values = allocate("value", max(8, 4 + 2 * len(self.channel_args)), "float32")
        self.residual_words = allocate("read", 16, "uint32")
        regs_per_thread = ceil_div(config.block_n, WARPGROUP_THREADS)
        self.channel_arg_regs = {
            name: allocate(f"{name}_held", regs_per_thread, "float32") for name in self.channel_args
        }
        self.smem = allocate("shared", int(config.dynamic_smem_bytes(w)) // 4, "uint32", "shared.dyn")

    def emit_prologue(self) -> None:
        """Initialize the barriers and wait for the results of the previous launch."""
        config = self.config
        smem_address = T.cuda.cvta_generic_to_shared(self.smem.access_ptr("rw"))
        store(
            self.smem_base,
            0,
            (smem_address + to_uint32(SWIZZLE_ALIGNMENT_BYTES - 1))
            & T.uint32(0xFFFFFFFF - (SWIZZLE_ALIGNMENT_BYTES - 1)),
        )
        store(self.mainloop_state, 0, 0)
        store(self.mainloop_state, 1, 0)
        store(self.epilogue_state, 0, 0)
        store(self.epilogue_state, 1, 0)
        num_writer_ctas = config.cluster_m + config.cluster_n - 1  # CTAs that copy into a stage of this CTA
        with if_(self.thread_idx == self.num_consumer_threads):  # the producer prefetches during the initialization
            for tensor_map in self.tensor_maps:
                emit_ptx("prefetch.tensormap", tensor_map)
        with if_(self.thread_idx == 0):
            for stage in range(config.stages):
                emit_ptx("mbarrier.init.shared.b64", self.full_barrier(stage), T.uint32(1))
                emit_ptx(
                    "mbarrier.init.shared.b64", self.empty_barrier(stage), T.uint32(config.warpgroups * num_writer_ctas)
                )
            if self.residual_name:
                for buffer in range(config.warpgroups * self.epilogue_stages):
                    emit_ptx("mbarrier.init.shared.b64", self.residual_full_barrier(buffer), T.uint32(1))
                    emit_ptx("mbarrier.init.shared.b64", self.residual_empty_barrier(buffer), T.uint32(1))
            emit_call(T.ptx.fence.mbarrier_init.release.cluster())
        if config.multicast_size > 1:
            emit_call(T.cuda.cluster_sync())
        else:
            emit_call(T.cuda.cta_sync())
        emit_ptx("griddepcontrol.wait")
        emit_ptx("griddepcontrol.launch_dependents")

    def for_each_work_tile(self, emit_body: Callable[[], None]) -> None:
        """Emit a body for each work tile of this CTA; tiles are ordered by channels, then pixels, then groups."""
        if self.tiles_per_cta == 1:
            self.set_work_tile(self.cta_idx)
            emit_body()
            return
        with serial_loop(self.tiles_per_cta, "round") as tile_round:
            tile_idx = self.cta_idx + tile_round * self.num_work_ctas
            has_full_rounds = self.num_work_ctas * self.tiles_per_cta == self.num_tiles
            with if_(True if has_full_rounds else tile_idx < self.num_tiles):
                self.set_work_tile(tile_idx)
                emit_body()

    def set_work_tile(self, tile_idx: Expr) -> None:
        """Set the work tile that the following statements compute; the tiles of a cluster are neighbours."""
        config = self.config
        cluster_tiles_n, cluster_tiles_m = self.num_tiles_n // config.cluster_n, self.num_tiles_m // config.cluster_m
        cluster_tile_idx = tile_idx // config.multicast_size
        self.cta_rank_m, self.cta_rank_n = self.cta_rank // config.cluster_n, self.cta_rank % config.cluster_n
        self.tile_offset_m = (
            cluster_tile_idx // cluster_tiles_n % cluster_tiles_m * config.cluster_m + self.cta_rank_m
        ) * self.block_m
        self.tile_offset_n = (cluster_tile_idx % cluster_tiles_n * config.cluster_n + self.cta_rank_n) * config.block_n
        self.group_idx = cluster_tile_idx // (cluster_tiles_n * cluster_tiles_m)

    def num_own_k_tiles(self) -> Expr:
        """Return the number of k-tiles that this CTA computes of a tile."""
        if self.total_k_tiles % self.k_tiles_per_cta == 0:
            return self.k_tiles_per_cta
        return T.min(self.k_tiles_per_cta, self.total_k_tiles - self.split_k_idx * self.k_tiles_per_cta)

    def compute_cta_rank(self, rank_m: Any, rank_n: Any) -> Expr:
        """Return a CTA's cluster rank from its ranks along pixels and channels; True stands for this CTA's rank."""
        return (self.cta_rank_m if rank_m is True else rank_m) * self.config.cluster_n + (
            self.cta_rank_n if rank_n is True else rank_n
        )

    def stage_address(self) -> Expr:
        """Return the shared-memory address of the current mainloop stage."""
        return self.smem_base[0] + to_uint32(self.mainloop_state[0] * self.stage_bytes)

    def barrier_address(self, barrier_idx: Expr) -> Expr:
        """Return the shared-memory address of an mbarrier."""
        return self.smem_base[0] + to_uint32(self.barriers_offset) + to_uint32(barrier_idx * BARRIER_BYTES)

    def full_barrier(self, stage: Expr) -> Expr:
        """Return the barrier that signals that a stage's operands have arrived."""
        return self.barrier_address(stage)

    def empty_barrier(self, stage: Expr) -> Expr:
        """Return the barrier that signals that all CTAs that share a stage's operands have multiplied them."""
        return self.barrier_address(self.config.stages + stage)

    def residual_full_barrier(self, stage: Expr) -> Expr:
        """Return the barrier that signals that an epilogue stage's residual has arrived."""
        return self.barrier_address(2 * self.config.stages + stage)

    def residual_empty_barrier(self, stage: Expr) -> Expr:
        """Return the barrier that signals that an epilogue stage has been stored."""
        return self.barrier_address(2 * self.config.stages + self.config.warpgroups * self.epilogue_stages + stage)

    def advance_pipeline_state(self, state: Buffer, num_stages: int) -> None:
        """Advance a pipeline state to the next stage; the phase bit flips at each wrap-around."""
        store(state, 0, state[0] + 1)
        with if_(state[0] == num_stages):
            store(state, 0, 0)
            store(state, 1, state[1] ^ 1)

    def sync_warpgroup(self) -> None:
        """Synchronize the threads of this warpgroup by a named barrier; barrier 0 is that of the whole CTA."""
        emit_ptx("bar.sync", to_uint32(1 + self.warpgroup_idx), T.uint32(WARPGROUP_THREADS))

    def emit_tma_load(
        self,
        ndim: int,
        mode: str,
        destination: Expr,
        tensor_map: Expr,
        coords: Sequence[Expr],
        full_barrier: Expr,
        offsets: Sequence[Expr],
        multicast_mask: Expr,
    ) -> None:
        """Emit a TMA load to this CTA, or to several CTAs of its cluster if `multicast_mask` is given."""
        multicast = multicast_mask is not None
        mnemonic = TMA_LOAD_MNEMONIC.format(rank=ndim, mode=mode, multicast=".multicast::cluster" if multicast else "")
        emit_ptx(
            mnemonic, destination, tensor_map, *coords, full_barrier, *offsets, *([multicast_mask] if multicast else [])
        )
