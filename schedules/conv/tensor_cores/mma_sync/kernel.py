"""Kernels of `mma_sync`, assembled from their parts."""

from __future__ import annotations

import math
from contextlib import ExitStack

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.workloads import Conv

from ....tir_builder import Buffer, Expr, allocate, emit_call, if_, serial_loop, store
from .epilogue import MmaSyncEpilogue
from .mainloop import MmaSyncMainloop
from .split_k_reduce import emit_split_k_reduction
from .tile_config import MmaSyncTileConfig


def emit_kernels(w: Conv, config: MmaSyncTileConfig, arguments: dict[str, Buffer]) -> None:
    """Emit the kernel, followed by the split-K reduction kernel if partial sums go to a workspace."""
    workspace = None
    if config.uses_workspace_reduction:
        workspace = allocate("partial", config.split_k * w.N * math.prod(w.output_size) * w.O, "float32", "global")
    MmaSyncKernel(w, config, arguments, workspace).emit()
    if workspace is not None:
        emit_split_k_reduction(w, config.split_k, arguments, workspace)


class MmaSyncKernel(MmaSyncMainloop, MmaSyncEpilogue):
    """The multiplying kernel: its parts in execution order."""

    def emit(self) -> None:
        """Emit the kernel."""
        config = self.config
        self.allocate_buffers()
        with ExitStack() as axes:
            self.bind_axes(axes)
            self.init_thread_coords()
            store(self.smem_base, 0, T.cuda.cvta_generic_to_shared(self.smem.access_ptr("rw")))
            self.init_row_pointers(self.block_idx)
            for k_tile in range(config.stages - 1):
                if k_tile < self.k_tiles_per_block:
                    self.load_input(k_tile, k_tile)
                    self.load_weights(k_tile, k_tile)
                emit_call(T.ptx.cp.async_.commit_group())
            store(self.smem_pipe_slots, 0, 0)
            store(self.smem_pipe_slots, 1, config.stages - 1)
            if config.tiles_per_block == 1:  # epilogue arguments are requested before waiting for the first operands
                self.start_tile(self.block_idx)
            self.wait_stage()
            self.load_fragments(0, 0, 0)
            if config.tiles_per_block == 1:
                self.compute_tile(None)
                return
            with serial_loop(int(config.tiles_per_block), "turn") as tile_round:
                tile_idx = self.block_idx + tile_round * self.num_work_blocks
                with if_(self.is_valid_tile(tile_idx)):
                    self.start_tile(tile_idx)
                    self.compute_tile(tile_idx + self.num_work_blocks, tile_round + 1 < config.tiles_per_block)

    def start_tile(self, tile_idx: Expr) -> None:
        """Set the work tile, prefetch its epilogue arguments and initialize its accumulators."""
        self.set_work_tile(tile_idx)
        self.prefetch_channel_args()
        self.init_accumulators()

    def compute_tile(self, next_tile_idx: Expr, has_next_tile: Expr = False) -> None:
        """Compute and store the work tile, whose first operands are in shared memory.

        Args:
            next_tile_idx: Index of the tile that this block computes next.
            has_next_tile: Whether the block computes a next tile if its index is valid.
        """
        config = self.config
        self.run_mainloop(next_tile_idx, has_next_tile)
        if config.tiles_per_block == 1:  # the output tile reuses the memory of the stages
            emit_call(T.ptx.cp.async_.wait_group(0))
            emit_call(T.cuda.cta_sync())
        if config.warps_k > 1:
            self.reduce_sliced_k()
        if self.workspace is not None:
            with if_(self.is_first_k_slice()):
                self.store_partials_to_workspace(self.workspace)
            return
        with if_(self.is_first_k_slice()):
            self.store_accumulators_to_smem()
        if config.split_k > 1:
            emit_call(T.cuda.cluster_sync())
        else:
            emit_call(T.cuda.cta_sync())
        self.store_tile()
        if config.split_k > 1:  # a block must not exit before the others have read its shared memory
            emit_call(T.cuda.cluster_sync())
