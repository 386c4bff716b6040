"""Convolutions of channels-last pixels on Hopper's tensor cores whose taps share halo rows that TMA copies.

im2col copies each pixel once for each tap of a filter. With 64 to 256 filters, these copies from L2 take as long as the
products. Here a tile is a run of halo rows: pixels line by line, with a zero behind each line (`..gemm.halo_pixels`).
TMA copies them once for each block of channels, and the filters of each tap. A tile of 256 pixels of lines of 40, with
128 filters, copies 2.3 times fewer bytes than with im2col.

The kernel is persistent. One warp loads pixels and another one filters, which two CTAs of a cluster can share.
Warpgroups multiply, and store the pixels of their rows; the zeros between lines are multiplied as well, and not stored.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass

from tvm.s_tir import Schedule
from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.registry import schedule
from tvmconv.requirements import CHANNELS_LAST_LAYOUT, Requirement, all_of
from tvmconv.space import Knobs
from tvmconv.target import WARP_SIZE, WARPGROUP_SIZE
from tvmconv.workloads import Conv, epilogue
from tvmconv.workloads.dtypes import get_itemsize

from ....primitives import disable_buffer_reuse
from ....tir_builder import Buffer, Expr, allocate, build_schedule, declare_tensor_map, emit_call, if_, to_uint32
from ..gemm.atoms import ThreadPosition, WgmmaAtom
from ..gemm.channel_arguments import ChannelArguments
from ..gemm.cta import allocate_smem, allow_dependent_launch, open_cta
from ..gemm.epilogue_ops import EpilogueOps
from ..gemm.epilogue_tile import EpilogueTile
from ..gemm.filter_rows_epilogue import FilterArguments, FilterRowsEpilogueTile
from ..gemm.filter_rows_pixels import SUBTILE_PIXELS, FilterRowsPixelEpilogue
from ..gemm.halo_pixels import HaloPixels, HaloPixelsMainloop
from ..gemm.pipelines import PipelineState, TmaPipeline, fence_barrier_init, sync_cluster_relaxed
from ..gemm.problem import Operand
from ..gemm.residue_epilogue import ResidueEpilogue
from ..gemm.smem_layout import SWIZZLE_ALIGNMENT_BYTES, SmemLayout
from ..gemm.tile_scheduler import Cluster, KRange, TileScheduler
from ..gemm.tma import prefetch_tensor_maps
from ..gemm.tma_loaders import FilterMatrix
from ..gemm.wgmma_mainloop import OperandTile
from ..implicit_gemm_shape import VECTOR_BYTES, ImplicitGemmShape
from .halo_config import HaloConfig
from .schedule import WIDE_DTYPES
from .tma_requirements import can_load_by_tma, has_large_output, is_promising

MIN_PROMISING_PIXELS = 1 << 12  # output pixels; smaller layers have few tiles, and `hopper` splits their sums


def has_halo_pixels(w: Conv) -> bool:
    """Whether TMA can copy halo rows of one group that several taps read, and their tiles fit in shared memory."""
    return (
        w.groups == 1
        and w.reads_x_only
        and not w.returns_stats
        and not w.has_large_tensors
        and not has_large_output(w)
        and math.prod(w.kernel) > 1
        and can_load_by_tma(w)
        and w.O * get_itemsize(w.storage) % VECTOR_BYTES == 0
        and sum(op.argument_kind == "output" for op in epilogue.get_ops(w.epilogue)) <= 1
        and HaloPixels(w).has_consecutive_planes
        and HaloPixels(w).has_bounding_box
        and HaloConfig.has_config(w)
    )


HALO_PIXELS = Requirement(
    "one group with a filter of several taps, multiples of 16 bytes of channels, a residual at most, and lines of "
    "pixels that are in TMA's range and fit in shared memory",
    has_halo_pixels,
    lambda w: f"{w.groups} groups, filters of {math.prod(w.kernel)} taps × {w.C} × {w.O} channels",
)


def is_worth_trying(w: Conv) -> bool:
    """Return whether channels fill the rows of shared memory, and there are many pixels."""
    return (
        is_promising(w)
        and w.C * get_itemsize(w.storage) >= 128
        and w.N * math.prod(w.output_size) >= MIN_PROMISING_PIXELS
    )


@schedule(
    *("conv1d", "conv2d", "conv3d"),
    dtypes=WIDE_DTYPES,
    usage=HaloConfig.compute_usage,
    condition=all_of(CHANNELS_LAST_LAYOUT, HALO_PIXELS),
    search_if=is_worth_trying,
    starting_configs=HaloConfig.list_starting_configs,
    device_kinds=("cuda",),
    exact_arch=90,
)
def halo_hopper(s: Schedule, w: Conv, k: Knobs) -> Schedule:
    """Copy pixels with zeros between their lines once for all taps, and multiply them by streamed filters."""
    config = HaloConfig.declare_knobs(w, k)
    built = build_schedule(w, lambda arguments: emit_kernel(config, arguments))
    disable_buffer_reuse(built)  # TVM does not see the accesses of TMA
    return built


def make_mainloop(config: HaloConfig) -> HaloPixelsMainloop:
    """Return the mainloop of a config."""
    w, row_bytes, block_k, tile_filters = (
        config.w,
        int(config.block_k_bytes),
        int(config.block_k),
        int(config.tile_filters),
    )
    loader = FilterMatrix(w.weight_storage, w.O, w.kernel, w.C)
    filters = Operand("K", w.operand_dtypes[1], loader, rows_per_group=w.O)
    copied_filters = tile_filters // int(config.cluster_size)
    b = OperandTile(filters, SmemLayout(tile_filters, row_bytes), 0, block_k, 1, copied_filters)
    halo = SmemLayout(config.image.num_planes * int(config.plane_rows), row_bytes)
    atom, m_atoms = WgmmaAtom(int(config.block_n), *w.operand_dtypes), int(config.wgmma_m_tiles)
    return HaloPixelsMainloop(atom, m_atoms, config.image, halo, b, block_k, bool(config.has_filter_rows))


@dataclass(frozen=True)
class HaloPixelsCta:
    """What the warps of a CTA share, whatever their roles."""

    thread: ThreadPosition  # position in the CTA
    index: Expr  # index of the CTA
    tiles: TileScheduler  # work tiles
    num_blocks_k: int  # blocks of channels
    halo: TmaPipeline  # stages of halo rows
    filters: TmaPipeline  # stages of filters
    states: tuple[PipelineState, PipelineState]  # stages of both that a thread fills or reads next

    def elect_loader(self, warp: int) -> AbstractContextManager[None]:
        """Open what one thread runs of a warp behind those that multiply."""
        return self.thread.elect_in_warp(self.halo.num_consumers * WARPGROUP_SIZE // WARP_SIZE + warp)


def emit_kernel(config: HaloConfig, arguments: dict[str, Buffer]) -> None:
    """Emit the kernel."""
    mainloop, num_ctas, cluster_size = make_mainloop(config), int(config.num_blocks), int(config.cluster_size)
    cluster_shape = (1, cluster_size) if mainloop.has_filter_rows else (cluster_size, 1)
    input_map = declare_tensor_map("X_map", arguments["X"], mainloop.input_map())
    filter_map = declare_tensor_map("K_map", arguments["K"], mainloop.b.tensor_map())
    with open_cta(num_ctas, int(config.num_threads), 1, splits_in_cluster=False, cluster_shape=cluster_shape) as cta:
        smem = allocate_smem(int(config.smem_bytes), SWIZZLE_ALIGNMENT_BYTES)
        halo, filters = pipelines = make_pipelines(config, mainloop, smem, cta.cluster)
        emit_prologue(pipelines, (input_map, filter_map), cta.thread, int(config.warpgroups) * WARPGROUP_SIZE)
        extents, block = (config.image.num_rows, config.w.O), (int(config.block_m), int(config.block_n))
        if mainloop.has_filter_rows:
            extents = extents[::-1]
        raster_order = "m" if mainloop.has_filter_rows else "n"  # consecutive tiles have the same pixels
        tiles = TileScheduler.of_product(extents, block, 1, num_ctas, cta.cluster, raster_order)
        states = PipelineState("halo", halo.stages), PipelineState("filter", filters.stages)
        state = HaloPixelsCta(cta.thread, cta.index, tiles, int(config.num_blocks_k), halo, filters, states)
        with if_(cta.thread.thread < int(config.warpgroups) * WARPGROUP_SIZE):
            emit_consumer(mainloop, state, make_epilogue(config, mainloop, arguments, smem, cta.thread))
        with state.elect_loader(0), tiles.work_tiles(cta.index) as tile:
            mainloop.load_filters(tile, state.num_blocks_k, filter_map, filters, states[1])
        with state.elect_loader(1), tiles.work_tiles(cta.index) as tile:
            mainloop.load_pixels(tile, state.num_blocks_k, input_map, halo, states[0])
        if cluster_size > 1:  # a CTA must not exit before the others stop writing to its shared memory
            sync_cluster_relaxed()


def emit_prologue(
    pipelines: tuple[TmaPipeline, ...], tensor_maps: tuple[Expr, ...], thread: ThreadPosition, first_loader: int
) -> None:
    """Initialize the barriers, and wait for the results of the previous launch."""
    with if_(thread.thread == first_loader):
        prefetch_tensor_maps(tensor_maps)
    with if_(thread.thread == 0):
        for pipeline in pipelines:
            pipeline.init_barriers()
        fence_barrier_init()
    if pipelines[-1].cluster.size > 1:
        sync_cluster_relaxed()
    else:
        emit_call(T.cuda.cta_sync())
    allow_dependent_launch()


def make_pipelines(
    config: HaloConfig, mainloop: HaloPixelsMainloop, smem: Expr, cluster: Cluster
) -> tuple[TmaPipeline, TmaPipeline]:
    """Return the pipelines of halo rows and of filters."""
    halo_stages, warpgroups = int(config.halo_stages), int(config.warpgroups)
    barriers = smem + to_uint32(int(config.barrier_offset_bytes))
    return (
        TmaPipeline(smem, int(config.halo_stage_bytes), barriers, halo_stages, mainloop.a_layout.nbytes, warpgroups),
        TmaPipeline(
            smem + to_uint32(int(config.filters_offset_bytes)),
            *(int(config.filter_stage_bytes), barriers, int(config.stages), mainloop.b.layout.nbytes, warpgroups),
            cluster=cluster,
            first_barrier=2 * halo_stages,
        ),
    )


def make_epilogue(
    config: HaloConfig, mainloop: HaloPixelsMainloop, arguments: dict[str, Buffer], smem: Expr, thread: ThreadPosition
) -> ResidueEpilogue | FilterRowsPixelEpilogue:
    """Return the epilogue, which stores the pixels of halo rows."""
    w, warpgroups, atom, m_atoms = config.w, int(config.warpgroups), mainloop.atom, mainloop.m_atoms
    ops = EpilogueOps.from_workload(w).bind_tensor_args(arguments, uses_registers=True)
    buffers, stage_bytes = smem + to_uint32(int(config.epilogue_offset_bytes)), int(config.epilogue_stage_bytes)
    stages = TmaPipeline(buffers, stage_bytes, smem, warpgroups, tx_bytes=0, num_consumers=1)  # no barriers
    is_exact = w.O % int(config.tile_filters) == 0
    if mainloop.has_filter_rows:
        row_bytes = SUBTILE_PIXELS * get_itemsize(w.storage)
        rows_tile = FilterRowsEpilogueTile(atom, m_atoms, warpgroups, w.storage, row_bytes, stages=1)
        filters = FilterArguments(ops.channel_args, arguments, rows_tile, w.O, is_exact, thread.warpgroup)
        return FilterRowsPixelEpilogue(rows_tile, ops, filters, stages, arguments, mainloop.pixels)
    channels = ChannelArguments(
        *(ops.channel_args, arguments, int(config.block_n), w.O, is_exact),
        smem + to_uint32(int(config.channel_args_offset_bytes)),
        thread.warpgroup,
    )
    tile = EpilogueTile(atom, m_atoms, warpgroups, w.storage, int(config.epilogue_row_bytes), stages=1)
    shape = ImplicitGemmShape.from_workload(w)
    return ResidueEpilogue(tile, ops, channels, stages, arguments, mainloop.pixels, shape, is_exact)


def emit_consumer(
    mainloop: HaloPixelsMainloop, state: HaloPixelsCta, stored: ResidueEpilogue | FilterRowsPixelEpilogue
) -> None:
    """Multiply and store work tiles; run by all threads of the warpgroups."""
    thread = state.thread
    accumulators = allocate("accumulators", mainloop.num_accumulators, "float32")
    k_range = KRange(0, state.num_blocks_k, state.num_blocks_k)
    with state.tiles.work_tiles(state.index) as tile:
        stored.channels.prefetch(tile, thread)
        pipelines = state.halo, state.filters
        mainloop.consume(accumulators, k_range, pipelines, state.states, thread, thread.warpgroup)
        sums = [accumulators[i] for i in range(mainloop.num_accumulators)]
        stored.store(sums, tile, state.states[0], thread, thread.warpgroup)
