"""Kernel of `hopper` for a channels-first X whose filter taps share a tile of halo rows.

The roles of a CTA are consumer warpgroups, which multiply and store, a warp whose first thread loads filters by TMA,
and further warps for pixels of X. These load vectors and transpose them in registers, or one warp copies boxes, which
the others transpose in shared memory. No array is converted in global memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tvmconv.target import WARP_SIZE, WARPGROUP_SIZE
from tvmconv.workloads import Conv
from tvmconv.workloads.dtypes import get_itemsize

from ....tir_builder import (
    Buffer,
    Expr,
    Register,
    allocate,
    declare_tensor_map,
    emit_alternatives,
    if_,
    to_uint32,
)
from ..gemm.atoms import ThreadPosition, WgmmaAtom, elect_thread
from ..gemm.channel_arguments import ChannelArguments
from ..gemm.channels_first_epilogue import ChannelsFirstEpilogue
from ..gemm.column_reduction import ColumnReduction
from ..gemm.cta import Cta, allocate_smem, open_cta
from ..gemm.epilogue_ops import EpilogueOps
from ..gemm.epilogue_tile import EpilogueTile
from ..gemm.halo_image import HaloOutput
from ..gemm.halo_loader import HaloLoader
from ..gemm.halo_mainloop import HaloMainloop
from ..gemm.halo_transpose import HaloTranspose
from ..gemm.pipelines import AsyncPipeline, PipelineState, TmaPipeline
from ..gemm.plane_epilogue import PlaneEpilogue, can_store_planes, make_plane_map
from ..gemm.plane_gather import PendingArrivals
from ..gemm.problem import make_fprop
from ..gemm.prologue import emit_prologue
from ..gemm.smem_layout import SWIZZLE_ALIGNMENT_BYTES, SmemLayout
from ..gemm.tile_scheduler import KRange, TileScheduler, WorkTile
from ..gemm.wgmma_mainloop import OperandTile
from .halo_tile import HALO_STAGES, HaloTile
from .tile_config import HopperTileConfig


def make_halo_mainloop(tile: HaloTile) -> HaloMainloop:
    """Return the mainloop of a config."""
    config = tile.config
    problem = make_fprop(tile.image.w, config.block_m)  # its filters have the taps of the halo rows
    atom, row_bytes = WgmmaAtom(config.block_n, problem.a.dtype, problem.b.dtype), config.block_k_bytes
    block_k = int(config.block_k(atom.itemsize))
    filters = OperandTile(problem.b, SmemLayout(config.block_n, row_bytes), 0, block_k, 1, config.block_n)
    return HaloMainloop(atom, config.wgmma_m_tiles, tile.image, SmemLayout(tile.rows, row_bytes), filters, block_k)


@dataclass(frozen=True)
class HaloCta:
    """What the warps of a CTA share, whatever their roles."""

    halo: HaloTile  # formulas of the config
    cta: Cta  # position in the grid
    tiles: TileScheduler  # work tiles
    k_range: KRange  # channel blocks
    smem: Expr  # address of the dynamic shared memory
    rows: AsyncPipeline  # stages of halo rows
    filters: TmaPipeline  # stages of filters
    states: tuple[PipelineState, PipelineState]  # stages of both that a thread fills or reads next

    @property
    def filter_warp(self) -> int:
        """Warp that loads filters; those behind it load pixels."""
        return self.halo.config.warpgroups * WARPGROUP_SIZE // WARP_SIZE


def emit_halo_kernel(w: Conv, config: HopperTileConfig, arguments: dict[str, Buffer]) -> None:
    """Emit the kernel.

    Args:
        w: The convolution, channels last.
        config: The tile config.
        arguments: Argument buffers by name; X, residuals and Y are channels first.
    """
    halo = HaloTile(w, config)
    mainloop, split_k = make_halo_mainloop(halo), int(config.split_k)
    filter_map = declare_tensor_map("K_map", arguments["K"], mainloop.filters.tensor_map())
    pixel_map = declare_tensor_map("X_map", arguments["X"], halo.boxes.tensor_map()) if halo.copies_by_tma else None
    output_map = declare_output_map(halo, arguments["Y"])
    with open_cta(int(halo.num_ctas), int(halo.num_threads), split_k, splits_in_cluster=split_k > 1) as cta:
        thread, state = cta.thread, allocate_halo_state(halo, cta, mainloop)
        boxes = make_box_pipeline(halo, state.smem) if halo.uses_boxes else None
        pipelines = [state.rows, state.filters, *([boxes] if boxes else [])]
        tensor_maps = [each for each in (filter_map, pixel_map, output_map) if each is not None]
        emit_prologue(thread, pipelines, tensor_maps, first_loader=state.filter_warp * WARP_SIZE)
        accumulators = allocate("accumulators", mainloop.num_accumulators, "float32")
        epilogue = make_halo_epilogue(halo, mainloop.atom, arguments, state.smem, thread, output_map)
        pixel_loaders = list_pixel_loaders(state, mainloop, arguments["X"], boxes, pixel_map)
        emit_alternatives(
            [
                (thread.warp < state.filter_warp, lambda: emit_halo_consumer(state, mainloop, accumulators, epilogue)),
                (thread.warp == state.filter_warp, lambda: emit_filter_loader(state, mainloop, filter_map)),
                *pixel_loaders,
            ]
        )
        if split_k > 1:
            num_threads = state.filter_warp * WARP_SIZE
            reduction = ColumnReduction(mainloop.atom, mainloop.m_atoms, split_k, num_threads)
            sums = reduction.reduce(accumulators, cta.split, thread, state.smem)
            with if_(thread.warp < state.filter_warp):
                tile = select_columns(state.tiles.tile_at(cta.index), halo, cta.split)
                epilogue.store(sums, tile, state.states[0], thread, thread.warpgroup)
                epilogue.finish(thread)


def declare_output_map(halo: HaloTile, output: Buffer) -> Expr:
    """Declare the tensor map of the output if TMA stores it; None if threads do."""
    if not can_store_planes(halo.image):
        return None
    return declare_tensor_map("Y_map", output, make_plane_map(halo.image.w, halo.subtile_columns))


def allocate_halo_state(halo: HaloTile, cta: Cta, mainloop: HaloMainloop) -> HaloCta:
    """Allocate shared memory, and the registers that say where a thread is in the pipelines."""
    smem = allocate_smem(int(halo.smem_bytes), SWIZZLE_ALIGNMENT_BYTES)
    k_range = KRange(cta.split, int(halo.blocks_per_cta), int(halo.num_channel_blocks))
    states = PipelineState("halo", HALO_STAGES), PipelineState("filter", halo.config.stages)
    return HaloCta(halo, cta, make_halo_tiles(halo), k_range, smem, *make_halo_pipelines(halo, mainloop, smem), states)


def emit_halo_consumer(
    state: HaloCta, mainloop: HaloMainloop, accumulators: Buffer, epilogue: ChannelsFirstEpilogue
) -> None:
    """Multiply work tiles, and store them unless the CTAs of a cluster have to add partial sums."""
    cta, thread = state.cta, state.cta.thread
    with state.tiles.work_tiles(cta.index) as tile:
        epilogue.channels.prefetch(select_columns(tile, state.halo, cta.split), thread)
        pipelines = state.rows, state.filters
        mainloop.consume(accumulators, state.k_range, pipelines, state.states, thread, thread.warpgroup)
        if state.halo.config.split_k == 1:
            sums = [accumulators[i] for i in range(mainloop.num_accumulators)]
            epilogue.store(sums, tile, state.states[0], thread, thread.warpgroup)
    epilogue.finish(thread)


def emit_filter_loader(state: HaloCta, mainloop: HaloMainloop, filter_map: Expr) -> None:
    """Load the filters of work tiles; run by a warp."""
    with if_(state.cta.thread.lane == 0), state.tiles.work_tiles(state.cta.index) as tile:
        mainloop.produce_filters(tile, state.k_range, filter_map, state.filters, state.states[1])


def list_pixel_loaders(
    state: HaloCta, mainloop: HaloMainloop, source: Buffer, boxes: TmaPipeline | None, pixel_map: Expr
) -> list[tuple[Expr, Callable[[], None]]]:
    """Return the roles of the warps behind that of the filters: the condition of each, and what emits it.

    Args:
        state: The state of the CTA.
        mainloop: The mainloop.
        source: The array X.
        boxes: Stages of channels-first pixels, which warps transpose; None if threads load vectors.
        pixel_map: Tensor map of these pixels, if TMA copies them.
    """
    halo, cta, thread, k_range, rows_state = state.halo, state.cta, state.cta.thread, state.k_range, state.states[0]
    channels, first_warp, num_warps = halo.shape.channels_per_group, state.filter_warp + 1, int(halo.num_loader_warps)
    if boxes is None:
        loader = HaloLoader(halo.image, mainloop.halo_layout, halo.config.block_m, source, channels, num_warps)

        def load_vectors() -> None:
            index = thread.thread - first_warp * WARP_SIZE
            with state.tiles.work_tiles(cta.index) as tile:
                mainloop.produce_input(loader, tile, k_range, index, state.rows, rows_state)

        return [(thread.warp >= first_warp, load_vectors)]
    transpose = HaloTranspose(halo.boxes, mainloop.halo_layout, channels, mainloop.block_k, num_warps)
    boxes_state = PipelineState("box", halo.boxes.num_stages)

    def copy_boxes() -> None:
        if not isinstance(boxes, AsyncPipeline):
            with elect_thread(), state.tiles.work_tiles(cta.index) as tile:
                transpose.produce_pixels(tile, k_range, pixel_map, boxes, boxes_state)
            return
        arrivals = PendingArrivals(boxes, 1)
        with state.tiles.work_tiles(cta.index) as tile:
            transpose.gather_pixels(tile, k_range, source, thread.lane, boxes, boxes_state, arrivals)
        arrivals.drain()

    def transpose_boxes() -> None:
        index = Register("loader_thread", value=thread.thread - (first_warp + 1) * WARP_SIZE).value
        unused = state.smem + to_uint32(int(halo.unused_offset_bytes))
        with state.tiles.work_tiles(cta.index) as tile:
            pipelines, states = (boxes, state.rows), (boxes_state, rows_state)
            transpose.produce_rows(tile, k_range, index, pipelines, states, unused)

    return [(thread.warp == first_warp, copy_boxes), (thread.warp > first_warp, transpose_boxes)]


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
    halo: HaloTile,
    atom: WgmmaAtom,
    arguments: dict[str, Buffer],
    smem: Expr,
    thread: ThreadPosition,
    output_map: Expr,
) -> ChannelsFirstEpilogue:
    """Return the epilogue, which stores the columns of a CTA."""
    w, config, ops, columns = halo.w, halo.config, EpilogueOps.from_workload(halo.w), int(halo.stored_columns)
    is_exact = halo.shape.n % config.block_n == 0
    channels = ChannelArguments(
        *(ops.channel_args, arguments, columns, halo.shape.n, is_exact),
        smem + to_uint32(int(halo.channel_args_offset_bytes)),
        thread.warpgroup,
    )
    row_bytes = halo.subtile_columns * get_itemsize(w.storage)
    tile = EpilogueTile(
        *(replace(atom, n=columns), config.wgmma_m_tiles, config.warpgroups, w.storage),
        row_bytes,
        stages=1,
    )
    buffers, stage_bytes = smem + to_uint32(int(halo.epilogue_offset_bytes)), int(halo.epilogue_stage_bytes)
    stages = TmaPipeline(buffers, stage_bytes, smem, config.warpgroups, tx_bytes=0, num_consumers=1)  # no barriers
    output = HaloOutput.from_image(halo.image)
    layers = tile, ops, channels, stages, arguments, output, (False, is_exact)
    if output_map is not None:
        return PlaneEpilogue(halo.image, output_map, *layers)
    return ChannelsFirstEpilogue(*layers)


def make_halo_pipelines(halo: HaloTile, mainloop: HaloMainloop, smem: Expr) -> tuple[AsyncPipeline, TmaPipeline]:
    """Return the pipelines of halo rows and of filters."""
    config, barriers = halo.config, smem + to_uint32(int(halo.barrier_offset_bytes))
    row_pipeline = AsyncPipeline(
        smem,
        int(halo.input_bytes) // HALO_STAGES,
        barriers,
        HALO_STAGES,
        0,
        config.warpgroups,
        num_producers=int(halo.num_loader_warps) * WARP_SIZE,
    )
    filter_pipeline = TmaPipeline(
        smem + to_uint32(int(halo.input_bytes)),
        int(halo.filter_stage_bytes),
        barriers,
        config.stages,
        mainloop.filters.layout.nbytes,
        config.warpgroups,
        first_barrier=2 * HALO_STAGES,
    )
    return row_pipeline, filter_pipeline


def make_box_pipeline(halo: HaloTile, smem: Expr) -> TmaPipeline:
    """Return the pipeline of channels-first pixels, which TMA copies, or else a warp."""
    stages = (
        smem + to_uint32(int(halo.boxes_offset_bytes)),
        halo.boxes.nbytes,
        smem + to_uint32(int(halo.barrier_offset_bytes)),
        halo.boxes.num_stages,
    )
    num_consumers = int(halo.num_loader_warps)
    first_barrier = 2 * (HALO_STAGES + halo.config.stages)
    if halo.copies_by_tma:
        return TmaPipeline(*stages, halo.boxes.tx_bytes, num_consumers, first_barrier=first_barrier)
    return AsyncPipeline(
        *(*stages, 0, num_consumers),
        first_barrier=first_barrier,
        num_producers=WARP_SIZE,
        fenced_by="none",
    )
