"""Convolutions of images with few channels on Hopper's tensor cores: all taps of a filter read one window of pixels.

With 32 or 64 channels, im2col copies each pixel nine times from L2 for little arithmetic, and `hopper` is bound by
these copies. Here a CTA keeps all filters in shared memory, and TMA copies the window of a tile of output pixels once
(`..gemm.shared_windows`). Tiles of 16 × 32 pixels read 1.4 times their pixels, copies to whole swizzle atoms included.

The kernel is persistent. A warp loads windows, and warpgroups multiply and store patches of 8 × 8 pixels. CTAs are
small, so that several share an SM, and one stores while others multiply.
"""

from __future__ import annotations

import math

from tvm.s_tir import Schedule
from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.registry import schedule
from tvmconv.requirements import CHANNELS_LAST_LAYOUT, Requirement, all_of
from tvmconv.space import Knobs
from tvmconv.target import WARPGROUP_SIZE
from tvmconv.workloads import Conv, epilogue
from tvmconv.workloads.dtypes import get_itemsize

from ....primitives import disable_buffer_reuse
from ....tir_builder import (
    Buffer,
    allocate,
    build_schedule,
    declare_tensor_map,
    emit_call,
    emit_ptx,
    if_,
    to_uint32,
)
from ..gemm.atoms import WgmmaAtom
from ..gemm.channel_arguments import ChannelArguments
from ..gemm.cta import allocate_smem, open_cta
from ..gemm.epilogue_ops import EpilogueOps
from ..gemm.pipelines import PipelineState, TmaPipeline, fence_barrier_init
from ..gemm.problem import Operand
from ..gemm.shared_windows import PatchEpilogueTile, WindowMainloop
from ..gemm.smem_layout import SWIZZLE_ALIGNMENT_BYTES, SmemLayout
from ..gemm.tile_scheduler import TileScheduler
from ..gemm.tma import prefetch_tensor_maps
from ..gemm.tma_epilogue import TmaEpilogue
from ..gemm.tma_loaders import FilterMatrix
from ..gemm.wgmma_mainloop import OperandTile
from ..implicit_gemm_shape import VECTOR_BYTES
from .schedule import WIDE_DTYPES
from .tma_requirements import has_large_output
from .window_config import EPILOGUE_STAGES, MAX_FILTERS, MIN_ROW_BYTES, WindowConfig, count_block_n, count_row_bytes

MAX_STRIDE = 2
MAX_PROMISING_ROW_BYTES = 128  # bytes of the channels of a pixel, beyond which products bound most layers
MIN_PROMISING_PIXELS = 1 << 14  # output pixels; smaller layers have too few tiles to keep filters


def has_windows(w: Conv) -> bool:
    """Whether windows of pixels and all filters fit in shared memory, and TMA can copy them."""
    itemsize = get_itemsize(w.storage)
    return (
        w.spatial_ndim == 2
        and w.groups == 1
        and not w.returns_stats
        and math.prod(w.kernel) > 1
        and max(w.stride) <= MAX_STRIDE
        and all(size % stride == 0 for size, stride in zip(w.input_size, w.stride, strict=True))
        and w.C * itemsize % MIN_ROW_BYTES == 0
        and w.O * itemsize % VECTOR_BYTES == 0
        and count_block_n(w) <= MAX_FILTERS
        and not any(op.argument_kind == "output" for op in epilogue.get_ops(w.epilogue))
        and not has_large_output(w)
        and not w.has_large_tensors
        and WindowConfig.has_config(w)
    )


WINDOWS = Requirement(
    "images of one group with a filter of several taps, strides up to 2 that divide the image, no residual, and "
    "filters that fit in shared memory",
    has_windows,
    lambda w: f"filters of {math.prod(w.kernel)} taps × {w.C} × {w.O} channels",
)


def is_promising(w: Conv) -> bool:
    """Return whether pixels have few channels, and there are many of them."""
    pixels = w.N * math.prod(w.output_size)
    return w.C * get_itemsize(w.storage) <= MAX_PROMISING_ROW_BYTES and pixels >= MIN_PROMISING_PIXELS


@schedule(
    "conv2d",
    dtypes=WIDE_DTYPES,
    usage=WindowConfig.compute_usage,
    condition=all_of(CHANNELS_LAST_LAYOUT, WINDOWS),
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
    filters = Operand("K", w.dtype, FilterMatrix(w.storage, w.O, w.kernel, w.C), rows_per_group=w.O)
    b = OperandTile(filters, SmemLayout(block_n, row_bytes), 0, row_bytes // config.itemsize, 1, block_n)
    atom, window = WgmmaAtom(block_n, w.dtype, w.dtype), SmemLayout(config.tiles.plane_rows, row_bytes)
    return WindowMainloop(config.tiles, atom, int(config.m_atoms), window, b)


def emit_kernel(config: WindowConfig, arguments: dict[str, Buffer]) -> None:
    """Emit the kernel."""
    w, mainloop, tiles = config.w, make_mainloop(config), config.tiles
    warpgroups, stages = int(config.warpgroups), int(config.stages)
    epilogue_tile = PatchEpilogueTile(
        *(mainloop.atom, mainloop.m_atoms, warpgroups, w.storage, config.epilogue_row_bytes, EPILOGUE_STAGES),
        tiles=tiles,
    )
    maps = {"X": tiles.input_map(mainloop.block_k), "K": mainloop.filters.tensor_map(), "Y": epilogue_tile.output_map()}
    input_map, filter_map, output_map = (
        declare_tensor_map(f"{name}_map", arguments[name], each) for name, each in maps.items()
    )
    rows_per_tile = tiles.patches * mainloop.atom.m
    scheduler = TileScheduler.of_product(
        (tiles.count * rows_per_tile, 1), (rows_per_tile, 1), 1, int(config.num_blocks)
    )
    with open_cta(int(config.num_blocks), int(config.num_threads), 1, splits_in_cluster=False) as cta:
        thread, smem = cta.thread, allocate_smem(int(config.smem_bytes), SWIZZLE_ALIGNMENT_BYTES)
        barriers = smem + to_uint32(int(config.barrier_offset_bytes))
        windows = TmaPipeline(smem, int(config.stage_bytes), barriers, stages, mainloop.window_bytes, warpgroups)
        filters_address = smem + to_uint32(int(config.filters_offset_bytes))
        filters = TmaPipeline(
            *(filters_address, config.filter_bytes, barriers, 1, mainloop.filter_bytes, warpgroups),
            first_barrier=2 * stages,
        )
        state, producer = PipelineState("window", stages), thread.is_first_of_warp(warpgroups * WARPGROUP_SIZE // 32)
        with if_(producer):
            prefetch_tensor_maps([input_map, filter_map, output_map])
        with if_(thread.thread == 0):
            windows.init_barriers()
            filters.init_barriers()
            fence_barrier_init()
        emit_call(T.cuda.cta_sync())
        emit_ptx("griddepcontrol.wait")
        emit_ptx("griddepcontrol.launch_dependents")
        ops = EpilogueOps.from_workload(w).bind_tensor_args(arguments, uses_registers=True)
        with if_(thread.thread < warpgroups * WARPGROUP_SIZE):
            accumulators = allocate("accumulators", mainloop.num_accumulators, "float32")
            channels = ChannelArguments(
                *(ops.channel_args, arguments, config.block_n, w.O, config.block_n == w.O),
                smem + to_uint32(int(config.channel_args_offset_bytes)),
                thread.warpgroup,
            )
            buffers = TmaPipeline(  # its barriers are not used
                smem + to_uint32(int(config.epilogue_offset_bytes)),
                *(config.epilogue_stage_bytes, barriers, warpgroups * EPILOGUE_STAGES, 0, 1),
            )
            stores = TmaEpilogue(epilogue_tile, ops, channels, buffers, [output_map])
            store_state = PipelineState("epilogue", EPILOGUE_STAGES)
            filters.consumer_wait(0, 0)
            with scheduler.work_tiles(cta.index) as tile:
                channels.prefetch(tile, thread)
                mainloop.consume(accumulators, filters_address, windows, state, thread)
                sums = [accumulators[i] for i in range(mainloop.num_accumulators)]
                stores.store(sums, tile, store_state, thread, thread.warpgroup)
            stores.finish(thread)
        with if_(producer):
            mainloop.load_filters(filter_map, filters)
            with scheduler.work_tiles(cta.index) as tile:
                mainloop.load_window(tile, input_map, windows, state)
