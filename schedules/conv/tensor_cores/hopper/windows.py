"""Convolutions of images and volumes with few channels on Hopper's tensor cores: all taps read one window of pixels.

With 32 or 64 channels, im2col copies each pixel nine times from L2 for little arithmetic, and `hopper` is bound by
these copies. Here a CTA keeps all filters in shared memory, and TMA copies the window of a tile of output pixels once
(`..gemm.shared_windows`). Tiles of 16 × 32 pixels read 1.4 times their pixels, copies to whole swizzle atoms included.
A tile of a volume is in one slice, and has a window for each tap along the depth.

The kernel is persistent. A warp loads windows, and warpgroups multiply and store patches of 8 × 8 pixels. CTAs are
small, so that several share an SM, and one stores while others multiply.
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
from ....tir_builder import (
    Buffer,
    Expr,
    allocate,
    build_schedule,
    declare_tensor_map,
    if_,
    to_uint32,
)
from ..eight_bit_requirements import PAIRED_EIGHT_BITS
from ..gemm.accumulators import Accumulators
from ..gemm.atoms import WgmmaAtom
from ..gemm.channel_arguments import ChannelArguments
from ..gemm.cta import Cta, allocate_smem, open_cta
from ..gemm.epilogue_ops import EpilogueOps
from ..gemm.pipelines import PipelineState, TmaPipeline
from ..gemm.problem import Operand
from ..gemm.prologue import emit_prologue
from ..gemm.shared_windows import PatchEpilogueTile, WindowMainloop
from ..gemm.smem_layout import SWIZZLE_ALIGNMENT_BYTES, SmemLayout
from ..gemm.tile_scheduler import TileScheduler
from ..gemm.tma_epilogue import TmaEpilogue
from ..gemm.tma_loaders import INTERLEAVED_FILTERS, FilterMatrix, InterleavedFilters
from ..gemm.wgmma_mainloop import OperandTile
from ..implicit_gemm_shape import VECTOR_BYTES
from .schedule import DTYPES
from .tma_requirements import has_large_output
from .window_config import (
    EPILOGUE_STAGES,
    MAX_FILTERS,
    MIN_ROW_BYTES,
    WindowConfig,
    count_block_n,
    count_row_bytes,
    get_output_itemsize,
)

MAX_STRIDE = 2
MAX_PROMISING_ROW_BYTES = 128  # bytes of the channels of a pixel, beyond which products bound most layers
MIN_PROMISING_PIXELS = 1 << 14  # output pixels; smaller layers have too few tiles to keep filters


def has_windows(w: Conv) -> bool:
    """Whether windows of pixels and all filters fit in shared memory, and TMA can copy them."""
    itemsize = get_itemsize(w.storage)
    return (
        w.spatial_ndim in (2, 3)
        and w.groups == 1
        and not w.returns_stats
        and math.prod(w.kernel) > 1
        and max(w.stride) <= MAX_STRIDE
        and (w.spatial_ndim == 2 or w.stride[1:] == (1, 1))
        and all(size % stride == 0 for size, stride in zip(w.input_size[-2:], w.stride[-2:], strict=True))
        and w.C * itemsize % MIN_ROW_BYTES == 0
        and w.O * get_output_itemsize(w) % VECTOR_BYTES == 0
        and count_block_n(w) <= MAX_FILTERS
        and sum(op.argument_kind == "output" for op in get_ops(w.epilogue)) <= 1
        and not has_large_output(w)
        and not w.has_large_tensors
        and WindowConfig.has_config(w)
    )


WINDOWS = Requirement(
    "images of one group with a filter of several taps, strides up to 2 that divide the image, in volumes of 1 along "
    "height and width, a residual at most, and filters that fit in shared memory",
    has_windows,
    lambda w: f"filters of {math.prod(w.kernel)} taps × {w.C} × {w.O} channels",
)


def is_promising(w: Conv) -> bool:
    """Return whether pixels have few channels, and there are many of them."""
    pixels = w.N * math.prod(w.output_size)
    return w.C * get_itemsize(w.storage) <= MAX_PROMISING_ROW_BYTES and pixels >= MIN_PROMISING_PIXELS


@schedule(
    *("conv2d", "conv3d"),
    dtypes=DTYPES,
    usage=WindowConfig.compute_usage,
    condition=all_of(CHANNELS_LAST_LAYOUT, PAIRED_EIGHT_BITS, WINDOWS),
    search_if=is_promising,
    starting_configs=WindowConfig.list_starting_configs,
    device_kinds=("cuda",),
    exact_arch=90,
)
def window_hopper(s: Schedule, w: Conv, k: Knobs) -> Schedule:
    """Keep all filters in shared memory, and multiply windows of pixels that all taps share."""
    config = WindowConfig.declare_knobs(w, k)
    built = build_schedule(w, lambda arguments: emit_kernel(config, arguments))
    disable_buffer_reuse(built)  # TVM does not see the accesses of TMA
    return built


def make_mainloop(config: WindowConfig) -> WindowMainloop:
    """Return the mainloop of a config."""
    w, row_bytes, block_n = config.w, count_row_bytes(config.w), config.block_n
    loader = InterleavedFilters if can_interleave(w) else FilterMatrix
    filters = Operand("K", w.operand_dtypes[1], loader(w.weight_storage, w.O, w.kernel, w.C), rows_per_group=w.O)
    b = OperandTile(filters, SmemLayout(block_n, row_bytes), 0, row_bytes // config.itemsize, 1, block_n)
    atom, window = WgmmaAtom(block_n, *w.operand_dtypes), SmemLayout(config.tiles.plane_rows, row_bytes)
    return WindowMainloop(config.tiles, atom, int(config.m_atoms), window, b, int(config.promoted_taps))


def can_interleave(w: Conv) -> bool:
    """Return whether TMA reorders the filters so that a thread has words of 8-bit results."""
    return get_output_itemsize(w) == 1 and w.O % INTERLEAVED_FILTERS == 0


@dataclass(frozen=True)
class WindowCta:
    """What the warps of a CTA share, whatever their roles."""

    cta: Cta  # position in the grid
    tiles: TileScheduler  # work tiles
    windows: TmaPipeline  # stages of windows
    filters: TmaPipeline  # the filters, in one stage that is never empty again
    window_stage: PipelineState  # stage of windows that a thread fills or reads next
    epilogue_stage: PipelineState  # stage of the output that a thread fills or reads next
    epilogue: TmaEpilogue


def emit_kernel(config: WindowConfig, arguments: dict[str, Buffer]) -> None:
    """Emit the kernel."""
    mainloop, epilogue_tile, ops = (
        make_mainloop(config),
        make_epilogue_tile(config),
        EpilogueOps.from_workload(config.w),
    )
    tiles, num_ctas = config.tiles, int(config.num_blocks)
    consumer_warps = int(config.warpgroups) * (WARPGROUP_SIZE // WARP_SIZE)
    maps = {
        "X": tiles.input_map(mainloop.block_k),
        "K": mainloop.filters.tensor_map(),
        **dict.fromkeys(("Y", *ops.residuals), epilogue_tile.output_map()),
    }
    tensor_maps = [declare_tensor_map(f"{name}_map", arguments[name], each) for name, each in maps.items()]
    input_map, filter_map, *output_maps = tensor_maps
    with open_cta(num_ctas, int(config.num_threads), 1, splits_in_cluster=False) as cta:
        thread, smem = cta.thread, allocate_smem(int(config.smem_bytes), SWIZZLE_ALIGNMENT_BYTES)
        windows, filters, subtiles = pipelines = make_pipelines(config, mainloop, smem)
        barrier_owners = pipelines if ops.residuals else pipelines[:2]
        emit_prologue(thread, barrier_owners, tensor_maps, first_loader=consumer_warps * WARP_SIZE)
        ops = ops.bind_tensor_args(arguments, uses_registers=True)
        channels = ChannelArguments(
            *(ops.channel_args, arguments, config.block_n, config.w.O, config.block_n == config.w.O),
            smem + to_uint32(int(config.channel_args_offset_bytes)),
            thread.warpgroup,
            4 if epilogue_tile.interleaved else 2,
        )
        epilogue = TmaEpilogue(epilogue_tile, ops, channels, subtiles, output_maps)
        rows = tiles.patches * mainloop.atom.m
        scheduler = TileScheduler.of_product((tiles.count * rows, 1), (rows, 1), 1, num_ctas)
        stages = PipelineState("window", windows.stages), PipelineState("epilogue", EPILOGUE_STAGES)
        state = WindowCta(cta, scheduler, windows, filters, *stages, epilogue)
        with if_(thread.warp < consumer_warps):
            emit_consumer(mainloop, state)
        with thread.elect_in_warp(consumer_warps):
            mainloop.load_filters(filter_map, filters)
            with scheduler.work_tiles(cta.index) as tile:
                mainloop.load_window(tile, input_map, windows, state.window_stage)
        if ops.residuals:
            with thread.elect_in_warp(consumer_warps + 1), scheduler.work_tiles(cta.index) as tile:
                epilogue.load_residual(tile, state.epilogue_stage)


def make_epilogue_tile(config: WindowConfig) -> PatchEpilogueTile:
    """Return the division of a warpgroup's accumulators into patches."""
    atom = WgmmaAtom(config.block_n, *config.w.operand_dtypes)
    dtype, row_bytes = config.w.argument_dtypes[-1], config.epilogue_row_bytes
    sizes = int(config.m_atoms), int(config.warpgroups), dtype, row_bytes, EPILOGUE_STAGES
    return PatchEpilogueTile(atom, *sizes, interleaved=can_interleave(config.w), tiles=config.tiles)


def make_pipelines(
    config: WindowConfig, mainloop: WindowMainloop, smem: Expr
) -> tuple[TmaPipeline, TmaPipeline, TmaPipeline]:
    """Return the pipelines of windows, of the filters, and of the output."""
    stages, warpgroups = int(config.stages), int(config.warpgroups)
    barriers = smem + to_uint32(int(config.barrier_offset_bytes))
    return (
        TmaPipeline(smem, int(config.stage_bytes), barriers, stages, mainloop.window_bytes, warpgroups),
        TmaPipeline(
            smem + to_uint32(int(config.filters_offset_bytes)),
            *(config.filter_bytes, barriers, 1, mainloop.filter_bytes, warpgroups),
            first_barrier=2 * stages,
        ),
        TmaPipeline(
            smem + to_uint32(int(config.epilogue_offset_bytes)),
            *(config.epilogue_stage_bytes, barriers, warpgroups * EPILOGUE_STAGES, config.epilogue_stage_bytes, 1),
            first_barrier=2 * (stages + 1),
        ),
    )


def emit_consumer(mainloop: WindowMainloop, state: WindowCta) -> None:
    """Multiply and store work tiles; run by all threads of the warpgroups."""
    count, thread, epilogue = mainloop.num_accumulators, state.cta.thread, state.epilogue
    promoted = allocate("sums", count, "float32") if mainloop.promoted_taps else None
    accumulators = Accumulators.allocate(count, mainloop.atom.accumulator_dtype, epilogue.dtype, promoted)
    state.filters.consumer_wait(0, 0)
    with state.tiles.work_tiles(state.cta.index) as tile:
        epilogue.channels.prefetch(tile, thread)
        mainloop.consume(accumulators, state.filters.stage_address(0), state.windows, state.window_stage, thread)
        epilogue.store(accumulators.list_sums(), tile, state.epilogue_stage, thread, thread.warpgroup)
    epilogue.finish(thread)
