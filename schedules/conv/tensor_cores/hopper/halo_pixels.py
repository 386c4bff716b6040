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
from dataclasses import dataclass

from tvm.s_tir import Schedule

from tvmconv.registry import schedule
from tvmconv.requirements import CHANNELS_LAST_LAYOUT, Requirement, all_of
from tvmconv.space import Knobs
from tvmconv.target import WARP_SIZE, WARPGROUP_SIZE
from tvmconv.workloads import Conv
from tvmconv.workloads.dtypes import get_itemsize
from tvmconv.workloads.epilogue import get_ops

from ....primitives import disable_buffer_reuse
from ....tir_builder import Buffer, Expr, allocate, build_schedule, declare_tensor_map, if_, to_uint32
from ..gemm.atoms import ThreadPosition, WgmmaAtom
from ..gemm.channel_arguments import ChannelArguments
from ..gemm.cta import Cta, allocate_smem, open_cta
from ..gemm.epilogue_ops import EpilogueOps
from ..gemm.epilogue_tile import EpilogueTile
from ..gemm.filter_rows_epilogue import FilterArguments, FilterRowsEpilogueTile
from ..gemm.filter_rows_scatter_epilogue import SUBTILE_PIXELS, FilterRowsScatterEpilogue
from ..gemm.halo_pixels import HaloPixels, HaloPixelsMainloop
from ..gemm.pipelines import PipelineState, TmaPipeline, sync_cluster_relaxed
from ..gemm.problem import Operand
from ..gemm.prologue import emit_prologue
from ..gemm.scatter_epilogue import ScatterEpilogue
from ..gemm.smem_layout import SWIZZLE_ALIGNMENT_BYTES, SmemLayout
from ..gemm.tile_scheduler import Cluster, KRange, TileScheduler
from ..gemm.tma_loaders import FilterMatrix
from ..gemm.wgmma_mainloop import OperandTile
from ..implicit_gemm_shape import VECTOR_BYTES, ImplicitGemmShape
from .halo_pixel_config import HaloPixelConfig
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
        and sum(op.argument_kind == "output" for op in get_ops(w.epilogue)) <= 1
        and HaloPixels(w).has_consecutive_planes
        and HaloPixels(w).has_bounding_box
        and HaloPixelConfig.has_config(w)
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
    usage=HaloPixelConfig.compute_usage,
    condition=all_of(CHANNELS_LAST_LAYOUT, HALO_PIXELS),
    search_if=is_worth_trying,
    starting_configs=HaloPixelConfig.list_starting_configs,
    device_kinds=("cuda",),
    exact_arch=90,
)
def halo_hopper(s: Schedule, w: Conv, k: Knobs) -> Schedule:
    """Copy pixels with zeros between their lines once for all taps, and multiply them by streamed filters."""
    config = HaloPixelConfig.declare_knobs(w, k)
    built = build_schedule(w, lambda arguments: emit_kernel(config, arguments))
    disable_buffer_reuse(built)  # TVM does not see the accesses of TMA
    return built


def make_mainloop(config: HaloPixelConfig) -> HaloPixelsMainloop:
    """Return the mainloop of a config."""
    w, row_bytes, block_k = config.w, int(config.block_k_bytes), int(config.block_k)
    tile_filters, loaded_filters = int(config.tile_filters), int(config.tile_filters) // int(config.cluster_size)
    operand = Operand("K", w.operand_dtypes[1], FilterMatrix(w.weight_storage, w.O, w.kernel, w.C), rows_per_group=w.O)
    filters = OperandTile(operand, SmemLayout(tile_filters, row_bytes), 0, block_k, 1, loaded_filters)
    halo_layout = SmemLayout(config.image.num_planes * int(config.plane_rows), row_bytes)
    atom, m_atoms = WgmmaAtom(int(config.block_n), *w.operand_dtypes), int(config.wgmma_m_tiles)
    return HaloPixelsMainloop(atom, m_atoms, config.image, halo_layout, filters, block_k, bool(config.has_filter_rows))


@dataclass(frozen=True)
class HaloPixelsCta:
    """What the warps of a CTA share, whatever their roles."""

    cta: Cta  # position in the grid
    tiles: TileScheduler  # work tiles
    k_range: KRange  # blocks of channels
    halo: TmaPipeline  # stages of halo rows
    filters: TmaPipeline  # stages of filters
    halo_stage: PipelineState  # stage of halo rows that a thread fills or reads next
    filter_stage: PipelineState  # stage of filters that a thread fills or reads next


def emit_kernel(config: HaloPixelConfig, arguments: dict[str, Buffer]) -> None:
    """Emit the kernel."""
    mainloop, cluster_size = make_mainloop(config), int(config.cluster_size)
    consumer_warps = int(config.warpgroups) * (WARPGROUP_SIZE // WARP_SIZE)
    cluster_shape = (1, cluster_size) if mainloop.has_filter_rows else (cluster_size, 1)
    input_map = declare_tensor_map("X_map", arguments["X"], mainloop.input_map())
    filter_map = declare_tensor_map("K_map", arguments["K"], mainloop.filters.tensor_map())
    grid = int(config.num_blocks), int(config.num_threads)
    with open_cta(*grid, 1, splits_in_cluster=False, cluster_shape=cluster_shape) as cta:
        thread, cluster = cta.thread, cta.cluster
        smem = allocate_smem(int(config.smem_bytes), SWIZZLE_ALIGNMENT_BYTES)
        halo, filters = pipelines = make_pipelines(config, mainloop, smem, cluster)
        emit_prologue(thread, pipelines, (input_map, filter_map), consumer_warps * WARP_SIZE, cluster)
        stages = PipelineState("halo", halo.stages), PipelineState("filter", filters.stages)
        k_range = KRange(0, int(config.num_blocks_k), int(config.num_blocks_k))
        state = HaloPixelsCta(cta, make_tiles(config, cluster), k_range, halo, filters, *stages)
        with if_(thread.warp < consumer_warps):
            emit_consumer(mainloop, state, make_epilogue(config, mainloop, arguments, smem, thread))
        with thread.elect_in_warp(consumer_warps), state.tiles.work_tiles(cta.index) as tile:
            mainloop.produce_filters(tile, k_range, filter_map, filters, state.filter_stage)
        with thread.elect_in_warp(consumer_warps + 1), state.tiles.work_tiles(cta.index) as tile:
            mainloop.produce_pixels(tile, k_range, input_map, halo, state.halo_stage)
        if cluster_size > 1:  # a CTA must not exit before the others stop writing to its shared memory
            sync_cluster_relaxed()


def make_tiles(config: HaloPixelConfig, cluster: Cluster) -> TileScheduler:
    """Return the scheduler of work tiles, of which consecutive ones have the same pixels."""
    extents, block, raster_order = (config.image.num_rows, config.w.O), (int(config.block_m), int(config.block_n)), "n"
    if config.has_filter_rows:
        extents, raster_order = extents[::-1], "m"
    return TileScheduler.of_product(extents, block, 1, int(config.num_blocks), cluster, raster_order)


def make_pipelines(
    config: HaloPixelConfig, mainloop: HaloPixelsMainloop, smem: Expr, cluster: Cluster
) -> tuple[TmaPipeline, TmaPipeline]:
    """Return the pipelines of halo rows and of filters."""
    halo_stages, warpgroups = int(config.halo_stages), int(config.warpgroups)
    barriers = smem + to_uint32(int(config.barrier_offset_bytes))
    return (
        TmaPipeline(smem, int(config.halo_stage_bytes), barriers, halo_stages, mainloop.halo_layout.nbytes, warpgroups),
        TmaPipeline(
            smem + to_uint32(int(config.filters_offset_bytes)),
            *(int(config.filter_stage_bytes), barriers, int(config.stages), mainloop.filters.layout.nbytes, warpgroups),
            cluster=cluster,
            first_barrier=2 * halo_stages,
        ),
    )


def make_epilogue(
    config: HaloPixelConfig,
    mainloop: HaloPixelsMainloop,
    arguments: dict[str, Buffer],
    smem: Expr,
    thread: ThreadPosition,
) -> ScatterEpilogue | FilterRowsScatterEpilogue:
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
        return FilterRowsScatterEpilogue(rows_tile, ops, filters, stages, arguments, mainloop.pixels)
    channels = ChannelArguments(
        *(ops.channel_args, arguments, int(config.block_n), w.O, is_exact),
        smem + to_uint32(int(config.channel_args_offset_bytes)),
        thread.warpgroup,
    )
    tile = EpilogueTile(atom, m_atoms, warpgroups, w.storage, int(config.epilogue_row_bytes), stages=1)
    shape = ImplicitGemmShape.from_workload(w)
    return ScatterEpilogue(tile, ops, channels, stages, arguments, mainloop.pixels, shape, is_exact)


def emit_consumer(
    mainloop: HaloPixelsMainloop, state: HaloPixelsCta, epilogue: ScatterEpilogue | FilterRowsScatterEpilogue
) -> None:
    """Multiply and store work tiles; run by all threads of the warpgroups."""
    thread, pipelines, stages = state.cta.thread, (state.halo, state.filters), (state.halo_stage, state.filter_stage)
    accumulators = allocate("accumulators", mainloop.num_accumulators, "float32")
    with state.tiles.work_tiles(state.cta.index) as tile:
        epilogue.channels.prefetch(tile, thread)
        mainloop.consume(accumulators, state.k_range, pipelines, stages, thread, thread.warpgroup)
        sums = [accumulators[i] for i in range(mainloop.num_accumulators)]
        epilogue.store(sums, tile, state.halo_stage, thread, thread.warpgroup)
