"""Kernels of `mma_sync`, composed from the layers of `..gemm`.

Source: CUTLASS, `include/cutlass/gemm/kernel/gemm_universal.h` (multistage pipeline).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

from tvmconv.workloads import Conv
from tvmconv.workloads.dtypes import ACCUMULATOR
from tvmconv.workloads.epilogue import STATS

from ....tir_builder import Buffer, Expr, allocate, if_, logical_and, serial_loop, to_uint32
from ..gemm.accumulators import Accumulators
from ..gemm.atoms import MmaSyncAtom, ThreadPosition
from ..gemm.channel_arguments import ChannelArgumentTile
from ..gemm.channel_stats import PartialStats
from ..gemm.channels_first_epilogue import ChannelsFirstOutput
from ..gemm.cp_async import CopyThreads, FilterGather, ImageGather
from ..gemm.cta import allocate_smem, allow_dependent_launch, open_cta
from ..gemm.epilogue_ops import EpilogueOps
from ..gemm.fma_mainloop import FmaPairAtom, KMajorFmaMainloop
from ..gemm.halo_image import HaloOutput
from ..gemm.halo_rows import BlockedFilterGather, HaloRows, HaloRowsMainloop
from ..gemm.mma_sync_mainloop import MmaSyncMainloop, OperandLoader, WarpTiling
from ..gemm.mn_major_operands import (
    FilterRows,
    MnMajorFilterMainloop,
    MnMajorImageMainloop,
    PixelRows,
    make_mn_major_layout,
)
from ..gemm.pipelines import CpAsyncPipeline
from ..gemm.smem_layout import SmemLayout
from ..gemm.staged_epilogue import StagedEpilogue
from ..gemm.staged_pixels_epilogue import StagedPixelsEpilogue, locate_pixels, store_partial_sums_of_pixels
from ..gemm.staged_stats import StagedStatsEpilogue, choose_block_rows
from ..gemm.tile_scheduler import KRange, TileScheduler, WorkTile
from ..gemm.workspace_reduction import OutputVector, WorkspaceReduction, store_partial_sums
from ..implicit_gemm_shape import ImplicitGemmShape
from .epilogue_split import compute_smem_bytes, compute_staged_itemsize, split_epilogue, stores_raw_accumulators
from .input_loader import CP_ASYNC, HaloTileConfig
from .tile_config import MmaSyncTileConfig

REDUCTION_THREADS = 256  # threads per CTA of the sum of parts


def emit_kernels(
    w: Conv,
    config: MmaSyncTileConfig,
    arguments: dict[str, Buffer],
    filter_loader: type[FilterGather | FilterRows] = FilterGather,
) -> None:
    """Emit the kernel, followed by the kernel that adds up partial sums if these go to a workspace."""
    if not config.uses_workspace_reduction:
        stats = make_stats(w, config)
        emit_kernel(w, config, arguments, None, filter_loader, stats)
        if stats:
            stats.emit_combination(arguments[STATS], uses_pdl=False)
        return
    shape = ImplicitGemmShape.from_workload(w)
    workspace = allocate("partial", config.split_k * shape.m * w.O, "float32", "global")
    emit_kernel(w, config, arguments, workspace, filter_loader)
    output = make_output(w, config) if config.stores_channels_first else None
    vector = output.vector if output else math.gcd(w.O, shape.output_vector)

    def locate(item: Expr) -> OutputVector:
        if output:
            return locate_pixels(item, vector, shape, output)
        index, channel = item * vector, item % (w.O // vector) * vector
        return OutputVector(channel, index, lambda part: part * (shape.m * w.O) + index)

    num_vectors = shape.m * w.O // vector
    reduction = WorkspaceReduction(
        *(num_vectors, vector, config.split_k, locate, REDUCTION_THREADS),
        has_vectors_of_pixels=output is not None,
    )
    reduction.emit(workspace, EpilogueOps.from_workload(w), arguments, "Y")


def emit_kernel(
    w: Conv,
    config: MmaSyncTileConfig,
    arguments: dict[str, Buffer],
    workspace: Buffer | None,
    filter_loader: type[FilterGather | FilterRows] = FilterGather,
    stats: PartialStats | None = None,
) -> None:
    """Emit the kernel that multiplies.

    `workspace` receives the partial sums of a split reduction, and `stats` the statistics of the output, if there are.
    """
    shape, tiles_per_cta = config.get_shape(w), int(config.tiles_per_block)
    num_ctas = int(config.num_blocks(shape)) // int(config.split_k)
    tiles = TileScheduler.of_product((shape.m, shape.n), (config.block_m, config.block_n), shape.groups, num_ctas)
    tiles = replace(tiles, tiles_per_cta=tiles_per_cta)  # all CTAs may have no tile in the last rounds
    splits_in_cluster = bool(config.uses_cluster_reduction)
    with open_cta(num_ctas, int(config.num_threads), config.split_k, splits_in_cluster=splits_in_cluster) as position:
        allow_dependent_launch()
        cta, split, smem = position.index, position.split, allocate_smem(int(compute_smem_bytes(w, config)))
        tiling = make_tiling(w.operand_dtypes, config, position.thread)
        accumulators = allocate("accumulators", tiling.num_accumulators, "float32")
        mainloop = make_conv_mainloop(w, config, tiling, arguments, split, smem, filter_loader)
        mainloop = add_promotion(w, config, mainloop, accumulators)
        further: dict[str, Any] = {"epilogue_type": StagedStatsEpilogue, "stats": stats} if stats else {}
        has_workspace = workspace is not None
        epilogue = make_epilogue(w, config, tiling, arguments, split, smem, has_workspace=has_workspace, **further)

        def start(tile: WorkTile) -> None:
            epilogue.prefetch_channel_args(tile)
            epilogue.init_accumulators(accumulators, tile)

        def compute(tile: WorkTile, next_tile: WorkTile | None = None, has_next_tile: Expr = False) -> None:
            mainloop.compute(accumulators, next_tile, has_next_tile)
            if workspace is None:
                epilogue.apply(accumulators, tile)
                return
            with if_(tiling.holds_sums):
                if config.stores_channels_first:
                    output = make_output(w, config)
                    store_partial_sums_of_pixels(workspace, accumulators, tiling, tile, split, shape, output)
                else:
                    store_partial_sums(workspace, accumulators, tiling, tile, split, shape)

        mainloop.locate(tiles.tile_at(cta))
        mainloop.fill()
        if tiles_per_cta == 1:  # epilogue arguments are requested before waiting for the first operands
            start(tiles.tile_at(cta))
            mainloop.start()
            compute(tiles.tile_at(cta))
            return
        mainloop.start()
        with serial_loop(tiles_per_cta, "round") as tile_round:
            tile_idx = cta + tile_round * num_ctas
            with if_(tiles.is_valid(tile_idx)):
                start(tiles.tile_at(tile_idx))
                has_next_tile = logical_and(tile_round + 1 < tiles_per_cta, tiles.is_valid(tile_idx + num_ctas))
                compute(tiles.tile_at(tile_idx), tiles.tile_at(tile_idx + num_ctas), has_next_tile)


def add_promotion(w: Conv, config: MmaSyncTileConfig, mainloop: MmaSyncMainloop, sums: Buffer) -> MmaSyncMainloop:
    """Return a mainloop of 8-bit operands whose accumulators become float32 sums; others accumulate there."""
    atom, itemsize = mainloop.tiling.atom, mainloop.tiling.atom.itemsize
    if itemsize > 1 or (atom.accumulator_dtype == "float32" and not config.promotion_interval):
        return mainloop
    count = mainloop.tiling.num_accumulators
    products = Accumulators.allocate(count, atom.accumulator_dtype, w.argument_dtypes[-1], sums)
    return replace(mainloop, products=products, promotion_k_tiles=int(config.promotion_k_tiles))


def make_stats(w: Conv, config: MmaSyncTileConfig) -> PartialStats | None:
    """Return the statistics of the output's channels if the workload has them."""
    if STATS not in w.epilogue:
        return None
    shape = ImplicitGemmShape.from_workload(w)
    rows = choose_block_rows(config.block_m, config.block_n, int(config.num_threads), shape.output_itemsize)
    return PartialStats.with_workspace(shape.m, shape.groups * shape.n, rows)


def make_tiling(dtypes: tuple[str, str], config: MmaSyncTileConfig, thread: ThreadPosition) -> WarpTiling:
    """Return the division of a tile among warps, which multiply float32 on the FMA units."""
    atom = cast("MmaSyncAtom", FmaPairAtom()) if dtypes[0] == ACCUMULATOR else MmaSyncAtom(*dtypes)
    return WarpTiling(
        atom,
        config.warps_m,
        config.warps_n,
        config.warps_k,
        mmas_m=config.block_m // config.warps_m // atom.m,
        mmas_n=config.block_n // config.warps_n // atom.n,
        mmas_k=config.block_k * atom.itemsize // atom.k_bytes // config.warps_k,
        thread=thread,
    )


def make_output(w: Conv, config: MmaSyncTileConfig) -> ChannelsFirstOutput:
    """Return a channels-first output, whose pixels have the numbers of the rows of the product."""
    if isinstance(config, HaloTileConfig):
        return HaloOutput.from_image(config.image)
    return ChannelsFirstOutput.from_workload(w)


def make_mainloop(
    config: MmaSyncTileConfig,
    tiling: WarpTiling,
    make_loaders: tuple[Callable[[CopyThreads], OperandLoader], Callable[[CopyThreads], OperandLoader]],
    k_range: KRange,
    smem: Expr,
    layouts: tuple[SmemLayout, SmemLayout] | None = None,
    mainloop_type: type[MmaSyncMainloop] = MmaSyncMainloop,
) -> MmaSyncMainloop:
    """Return the mainloop: layouts and loaders of the operands A and B, fragments and stages.

    Operands are K-major unless there are `layouts`. `make_loaders` has functions from the division of an operand among
    threads to its loader.
    """
    atom, row_bytes, fragment_dtype = tiling.atom, config.block_k * tiling.atom.itemsize, "uint32"
    if isinstance(atom, FmaPairAtom):
        mainloop_type, fragment_dtype = KMajorFmaMainloop, ACCUMULATOR
    layouts = layouts or (SmemLayout(config.block_m, row_bytes), SmemLayout(config.block_n, row_bytes))
    copies = (CopyThreads(layout, tiling.num_threads, tiling.thread.thread) for layout in layouts)
    a, b = (make_loader(copy) for make_loader, copy in zip(make_loaders, copies, strict=True))
    return mainloop_type(
        tiling,
        *layouts,
        a,
        b,
        config.block_k,
        k_range,
        CpAsyncPipeline(config.stages),
        smem,
        a_fragments=allocate("a_fragments", 2 * tiling.mmas_m * atom.a_registers, fragment_dtype),
        b_fragments=allocate("b_fragments", 2 * tiling.mmas_n * atom.b_registers, fragment_dtype),
    )


def make_conv_mainloop(
    w: Conv,
    config: MmaSyncTileConfig,
    tiling: WarpTiling,
    arguments: Mapping[str, Buffer],
    split: Expr,
    smem: Expr,
    filter_loader: type[FilterGather | FilterRows],
) -> MmaSyncMainloop:
    """Return the mainloop of a convolution's image and filters."""
    shape = ImplicitGemmShape.from_workload(w)
    if isinstance(config, HaloTileConfig):
        return make_halo_mainloop(w, config, tiling, arguments, split, smem)
    k_range = KRange(split, int(config.k_tiles_per_block(shape)), int(config.total_k_tiles(shape)))
    overhangs = shape.k % (config.block_k * k_range.tiles_per_split * config.split_k) != 0
    k_extent = shape.k if overhangs else None
    make_loaders = (
        lambda copy: ImageGather(w, arguments["X"], config.block_k, k_extent, copy, arguments.get(w.CACHE)),
        lambda copy: filter_loader(shape, w.weight_storage, arguments["K"], config.block_k, k_extent, copy),
    )
    image_layout = SmemLayout(config.block_m, config.block_k * shape.itemsize)
    filter_layout = SmemLayout(config.block_n, config.block_k * shape.itemsize)
    if config.input_loader == CP_ASYNC:
        load_pixels = functools.partial(PixelRows, w, arguments["X"])
        image_layout = make_mn_major_layout(config.block_k, config.block_m, shape.itemsize)
        loaders, layouts = (load_pixels, make_loaders[1]), (image_layout, filter_layout)
        return make_mainloop(config, tiling, loaders, k_range, smem, layouts, MnMajorImageMainloop)
    if filter_loader is not FilterRows:
        return make_mainloop(config, tiling, make_loaders, k_range, smem)
    filter_layout = make_mn_major_layout(config.block_k, config.block_n, shape.itemsize)
    layouts = image_layout, filter_layout
    return make_mainloop(config, tiling, make_loaders, k_range, smem, layouts, MnMajorFilterMainloop)


def make_halo_mainloop(
    w: Conv, config: HaloTileConfig, tiling: WarpTiling, arguments: Mapping[str, Buffer], split: Expr, smem: Expr
) -> HaloRowsMainloop:
    """Return the mainloop of a convolution's filters and of halo rows of a channels-first image."""
    shape, atom = ImplicitGemmShape.from_workload(w), tiling.atom
    blocks, row_bytes = int(config.blocks_per_cta(shape)), config.block_k * atom.itemsize
    a_layout, b_layout = SmemLayout(int(config.rows), row_bytes), SmemLayout(config.block_n, row_bytes)
    a_copy, b_copy = (CopyThreads(layout, tiling.num_threads, tiling.thread.thread) for layout in (a_layout, b_layout))
    padded_channels, stages = blocks * config.split_k * config.block_k, int(config.stages)
    boxes_address = smem + to_uint32(a_layout.nbytes + stages * b_layout.nbytes)
    rows = HaloRows(
        *(config.boxes, arguments["X"], shape.channels_per_group, padded_channels, blocks, split * blocks),
        *(int(config.box_stages), a_copy, (smem, boxes_address)),
    )
    filters = BlockedFilterGather(shape, w.storage, arguments["K"], config.block_k, None, b_copy)
    filters.padded_channels = padded_channels
    k_tiles = KRange(split, blocks * config.num_taps, blocks * config.num_taps * config.split_k)
    fragments = (2 * tiling.mmas_m * atom.a_registers, 2 * tiling.mmas_n * atom.b_registers)
    a_fragments, b_fragments = (
        allocate(name, size, "uint32") for name, size in zip(("a_fragments", "b_fragments"), fragments, strict=True)
    )
    return HaloRowsMainloop(
        *(tiling, a_layout, b_layout, rows, filters, config.block_k, k_tiles, CpAsyncPipeline(stages), smem),
        *(a_fragments, b_fragments),
    )


def make_epilogue(
    w: Conv,
    config: MmaSyncTileConfig,
    tiling: WarpTiling,
    arguments: Mapping[str, Buffer],
    split: Expr,
    smem: Expr,
    *,
    has_workspace: bool,
    epilogue_type: type[StagedEpilogue] = StagedEpilogue,
    **attributes: Any,
) -> StagedEpilogue:
    """Return the epilogue, of a type that may have further attributes; with a workspace it has no operations."""
    shape, stages_sums = config.get_shape(w), bool(stores_raw_accumulators(w, config))
    starts_with_residual, owns_sums = config.residual_add == "accumulator_init", not config.uses_cluster_reduction
    register_ops, vector_ops = ([], []) if has_workspace else split_epilogue(w, starts_with_residual, owns_sums)
    staged_itemsize = int(compute_staged_itemsize(w, config))
    output_dtype = w.argument_dtypes[-1]
    register_epilogue, vector_epilogue = (
        EpilogueOps(tuple(ops), dtype).bind_tensor_args(arguments, uses_registers=True)
        for ops, dtype in ((register_ops, "float32" if stages_sums else output_dtype), (vector_ops, output_dtype))
    )
    make_layer: Callable[..., StagedEpilogue] = epilogue_type
    if config.stores_channels_first:
        make_layer = functools.partial(StagedPixelsEpilogue, output=make_output(w, config))
    return make_layer(
        shape,
        tiling,
        arguments,
        register_epilogue,
        vector_epilogue,
        stages_sums,
        num_parts=config.split_k,
        split=split,
        smem=smem,
        # With several tiles per CTA, the staged tile lies behind the stages, which hold the next tile's operands.
        tile_offset=0 if config.tiles_per_block == 1 else int(config.stages * config.stage_bytes(shape)),
        pitch_bytes=int(config.pitch_bytes(staged_itemsize)),
        channel_args=ChannelArgumentTile(
            [op.name for op in register_ops if op.argument_kind == "channel"],
            config.block_n,
            smem + to_uint32(int(config.stage_and_tile_smem_bytes(shape, staged_itemsize))),
        ),
        **attributes,
    )
