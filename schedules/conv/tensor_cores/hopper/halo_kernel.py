"""Kernel of `hopper` for a channels-first X whose filter taps share a tile of halo rows.

The roles of a CTA are consumer warpgroups, which multiply and store, a warp whose first thread loads filters by TMA,
and three warps that load pixels of X and transpose them in registers. No array is converted in global memory.
"""

from __future__ import annotations

import math
from dataclasses import replace

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.target import WARP_SIZE, WARPGROUP_SIZE
from tvmconv.workloads import Conv
from tvmconv.workloads.dtypes import get_itemsize

from ....tir_builder import (
    Buffer,
    Expr,
    allocate,
    declare_tensor_map,
    emit_alternatives,
    emit_call,
    emit_ptx,
    if_,
    to_uint32,
)
from ..gemm.atoms import ThreadPosition, WgmmaAtom
from ..gemm.channel_arguments import ChannelArguments
from ..gemm.channels_first_epilogue import ChannelsFirstEpilogue
from ..gemm.column_reduction import ColumnReduction
from ..gemm.cta import allocate_smem, open_cta
from ..gemm.epilogue_ops import EpilogueOps
from ..gemm.epilogue_tile import EpilogueTile
from ..gemm.halo_image import HaloOutput
from ..gemm.halo_loader import HaloLoader
from ..gemm.halo_mainloop import HaloMainloop
from ..gemm.pipelines import AsyncPipeline, PipelineState, TmaPipeline, fence_barrier_init
from ..gemm.problem import make_fprop
from ..gemm.smem_layout import SWIZZLE_ALIGNMENT_BYTES, SmemLayout
from ..gemm.tile_scheduler import KRange, TileScheduler, WorkTile
from ..gemm.tma import prefetch_tensor_maps
from ..gemm.wgmma_mainloop import OperandTile
from .halo_tile import HALO_STAGES, NUM_LOADER_WARPS, HaloTile
from .tile_config import MAX_EPILOGUE_ROW_BYTES, HopperTileConfig


def make_halo_mainloop(tile: HaloTile) -> HaloMainloop:
    """Return the mainloop of a config."""
    w, config = tile.w, tile.config
    problem = make_fprop(w, config.block_m)
    atom, row_bytes = WgmmaAtom(config.block_n, problem.a.dtype, problem.b.dtype), config.block_k_bytes
    block_k = int(config.block_k(atom.itemsize))
    b = OperandTile(problem.b, SmemLayout(config.block_n, row_bytes), 0, block_k, 1, config.block_n)
    return HaloMainloop(atom, config.wgmma_m_tiles, tile.image, SmemLayout(tile.rows, row_bytes), b, block_k)


def emit_halo_kernel(w: Conv, config: HopperTileConfig, arguments: dict[str, Buffer]) -> None:
    """Emit the kernel.

    Args:
        w: The convolution, channels last.
        config: The tile config.
        arguments: Argument buffers by name; X, residuals and Y are channels first.
    """
    halo = HaloTile(w, config)
    mainloop, filter_warp = make_halo_mainloop(halo), config.warpgroups * WARPGROUP_SIZE // WARP_SIZE
    filter_map = declare_tensor_map("K_map", arguments["K"], mainloop.b.tensor_map())
    num_ctas, split_k, num_threads = int(halo.num_ctas), int(config.split_k), int(halo.num_threads)
    with open_cta(num_ctas, num_threads, split_k, splits_in_cluster=split_k > 1) as cta:
        thread, smem = cta.thread, allocate_smem(int(halo.smem_bytes), SWIZZLE_ALIGNMENT_BYTES)
        a_pipeline, b_pipeline = make_halo_pipelines(halo, mainloop, smem)
        tiles = make_halo_tiles(halo)
        k_range = KRange(cta.split, int(halo.blocks_per_cta), int(halo.num_channel_blocks))
        a_state, b_state = PipelineState("halo", HALO_STAGES), PipelineState("filter", config.stages)
        emit_halo_prologue(a_pipeline, b_pipeline, filter_map, thread, filter_warp)
        accumulators = allocate("accumulators", mainloop.num_accumulators, "float32")
        epilogue = make_halo_epilogue(halo, mainloop.atom, arguments, smem, thread)
        loader = HaloLoader(
            *(halo.image, mainloop.a_layout, config.block_m, arguments["X"]),
            halo.shape.channels_per_group,
            NUM_LOADER_WARPS,
        )

        def emit_consumer() -> None:
            with tiles.work_tiles(cta.index) as tile:
                epilogue.channels.prefetch(select_columns(tile, halo, cta.split), thread)
                pipelines, states = (a_pipeline, b_pipeline), (a_state, b_state)
                mainloop.consume(accumulators, k_range, pipelines, states, thread, thread.warpgroup)
                if split_k == 1:
                    sums = [accumulators[i] for i in range(mainloop.num_accumulators)]
                    epilogue.store(sums, tile, a_state, thread, thread.warpgroup)

        def emit_filter_loader() -> None:
            with if_(thread.lane == 0), tiles.work_tiles(cta.index) as tile:
                mainloop.produce_filters(tile, k_range, filter_map, b_pipeline, b_state)

        def emit_input_loader() -> None:
            index = thread.thread - (filter_warp + 1) * WARP_SIZE
            with tiles.work_tiles(cta.index) as tile:
                mainloop.produce_input(loader, tile, k_range, index, a_pipeline, a_state)

        emit_alternatives(
            [
                (thread.warp < filter_warp, emit_consumer),
                (thread.warp == filter_warp, emit_filter_loader),
                (thread.warp > filter_warp, emit_input_loader),
            ]
        )
        if split_k > 1:
            reduction = ColumnReduction(mainloop.atom, mainloop.m_atoms, split_k, filter_warp * WARP_SIZE)
            sums = reduction.reduce(accumulators, cta.split, thread, smem)
            with if_(thread.warp < filter_warp):
                tile = select_columns(tiles.tile_at(cta.index), halo, cta.split)
                epilogue.store(sums, tile, a_state, thread, thread.warpgroup)


def emit_halo_prologue(
    a_pipeline: AsyncPipeline, b_pipeline: TmaPipeline, filter_map: Expr, thread: ThreadPosition, filter_warp: int
) -> None:
    """Initialize the barriers and wait for the results of the previous launch."""
    with if_(thread.is_first_of_warp(filter_warp)):
        prefetch_tensor_maps([filter_map])
    with if_(thread.thread == 0):
        a_pipeline.init_barriers()
        b_pipeline.init_barriers()
        fence_barrier_init()
    emit_call(T.cuda.cta_sync())
    emit_ptx("griddepcontrol.wait")
    emit_ptx("griddepcontrol.launch_dependents")


def select_columns(tile: WorkTile, halo: HaloTile, split: Expr) -> WorkTile:
    """Return the part of a work tile that a CTA of a cluster stores."""
    return tile if halo.config.split_k == 1 else replace(tile, n=tile.n + split * int(halo.stored_columns))


def make_halo_tiles(halo: HaloTile) -> TileScheduler:
    """Return the scheduler of work tiles."""
    shape, config = halo.shape, halo.config
    extents, block = (shape.m, shape.n), (config.block_m, config.block_n)
    num_ctas, raster_order = int(halo.num_ctas), config.raster_order
    return TileScheduler.of_product(extents, block, shape.groups, num_ctas, raster_order=raster_order)


def make_halo_epilogue(
    halo: HaloTile, atom: WgmmaAtom, arguments: dict[str, Buffer], smem: Expr, thread: ThreadPosition
) -> ChannelsFirstEpilogue:
    """Return the epilogue, which stores the columns of a CTA."""
    w, config, ops, columns = halo.w, halo.config, EpilogueOps.from_workload(halo.w), int(halo.stored_columns)
    is_exact = halo.shape.n % config.block_n == 0
    channels = ChannelArguments(
        *(ops.channel_args, arguments, columns, halo.shape.n, is_exact),
        smem + to_uint32(int(halo.channel_args_offset_bytes)),
        thread.warpgroup,
    )
    row_bytes = math.gcd(columns * get_itemsize(w.storage), MAX_EPILOGUE_ROW_BYTES)
    tile = EpilogueTile(
        *(replace(atom, n=columns), config.wgmma_m_tiles, config.warpgroups, w.storage),
        row_bytes,
        stages=1,
    )
    buffers, stage_bytes = smem + to_uint32(int(halo.epilogue_offset_bytes)), int(halo.epilogue_stage_bytes)
    stages = TmaPipeline(buffers, stage_bytes, smem, config.warpgroups, tx_bytes=0, num_consumers=1)  # no barriers
    output = HaloOutput.from_image(halo.image)
    return ChannelsFirstEpilogue(tile, ops, channels, stages, arguments, output, (False, is_exact))


def make_halo_pipelines(halo: HaloTile, mainloop: HaloMainloop, smem: Expr) -> tuple[AsyncPipeline, TmaPipeline]:
    """Return the pipelines of halo rows and of filters."""
    config, barriers = halo.config, smem + to_uint32(int(halo.barrier_offset_bytes))
    a_pipeline = AsyncPipeline(
        smem,
        int(halo.input_bytes) // HALO_STAGES,
        barriers,
        HALO_STAGES,
        0,
        config.warpgroups,
        num_producers=NUM_LOADER_WARPS * WARP_SIZE,
    )
    b_pipeline = TmaPipeline(
        smem + to_uint32(int(halo.input_bytes)),
        int(halo.filter_stage_bytes),
        barriers,
        config.stages,
        mainloop.b.layout.nbytes,
        config.warpgroups,
        first_barrier=2 * HALO_STAGES,
    )
    return a_pipeline, b_pipeline
