"""Gradients of weights by mma.sync, in float16, bfloat16 and TF32, for all tensor cores since sm_80.

The product has the filters as rows and (tap, channel) as columns, and its reduction runs over all pixels of the batch.
cp.async copies tiles of pixels × channels of dY, and of X at the taps of the columns. Their channels are contiguous, so
fragments are transposed on the way to registers (`..gemm.mn_major_operands`). wgmma has no such TF32 operands.

CTAs share the pixels (`split_k`). A second kernel adds their float32 sums in order, so that results are the same bits
in every run.
"""

from __future__ import annotations

from dataclasses import replace

from tvm.s_tir import Schedule

from tvmconv.registry import schedule
from tvmconv.space import Knobs
from tvmconv.workloads.conv_gradient import WeightGradient

from ....tir_builder import Buffer
from ...gradient_conversion import build_channels_last_gradient
from ...gradient_operators import WGRAD
from ..gemm.cta import allocate_smem, allow_dependent_launch, open_cta
from ..gemm.mn_major_operands import MnMajorMainloop, PixelGather, WindowGather, make_mn_major_layout
from ..gemm.tile_scheduler import KRange, TileScheduler
from ..hopper.tma_requirements import is_pixel_matrix
from ..implicit_gemm_shape import ACCUMULATOR_BYTES, ImplicitGemmShape
from ..wgrad_sums import declare_atomics, emit_tile_sums, emit_wgrad, make_wgrad_shape
from .kernel import make_mainloop, make_tiling
from .schedule import DTYPES
from .tile_config import MMA_M, MMA_N, MmaSyncTileConfig
from .wgrad_config import (
    compute_wgrad_smem_bytes,
    compute_wgrad_usage,
    declare_wgrad_knobs,
    list_wgrad_starting_configs,
)


def has_enough_channels(w: WeightGradient) -> bool:
    """Return whether there is one group, or each group fills the rows and columns of an mma."""
    return w.groups == 1 or (w.O // w.groups >= MMA_M and w.C // w.groups >= MMA_N)


@schedule(
    *WGRAD,
    dtypes=DTYPES,
    usage=compute_wgrad_usage,
    search_if=has_enough_channels,
    starting_configs=list_wgrad_starting_configs,
    supersedes=("implicit_gemm", "tiling"),
    device_kinds=("cuda",),
    min_arch=80,
)
def mma_sync(s: Schedule, w: WeightGradient, k: Knobs) -> Schedule:
    """Tile filters × (tap, channel) over CTAs and warps, pipeline tiles of pixels, and add the sums of all parts."""
    config, shape = declare_wgrad_knobs(w, k), make_wgrad_shape(w)
    is_atomic = declare_atomics(w, k)

    def emit(arguments: dict[str, Buffer]) -> None:
        def emit_product(sums: Buffer) -> None:
            emit_partial_sums(w, config, shape, arguments, sums, is_atomic=is_atomic)

        emit_wgrad(w, config.split_k, arguments, emit_product, is_atomic=is_atomic)

    return build_channels_last_gradient(w, emit)


def emit_partial_sums(
    w: WeightGradient,
    config: MmaSyncTileConfig,
    shape: ImplicitGemmShape,
    arguments: dict[str, Buffer],
    workspace: Buffer,
    *,
    is_atomic: bool,
) -> None:
    """Emit the kernel that multiplies; it stores or adds sums (parts, filters of a group, groups, columns)."""
    num_ctas = int(config.num_tiles(shape))
    tiles = TileScheduler.of_product((shape.m, shape.n), (config.block_m, config.block_n), shape.groups, num_ctas)
    with open_cta(num_ctas, int(config.num_threads), config.split_k, splits_in_cluster=False) as position:
        allow_dependent_launch()
        smem = allocate_smem(int(compute_wgrad_smem_bytes(config, shape)))
        has_row_pairs = shape.itemsize == ACCUMULATOR_BYTES
        tiling = replace(make_tiling((w.dtype, w.dtype), config, position.thread), has_row_pairs=has_row_pairs)
        k_range = KRange(position.split, int(config.k_tiles_per_block(shape)), int(config.total_k_tiles(shape)))
        dy, image = (arguments[name] for name in w.OPERANDS)
        make_loaders = (
            lambda copy: PixelGather(dy, shape.k, shape.groups, shape.m, copy),
            lambda copy: (
                PixelGather(image, shape.k, shape.groups, shape.n, copy)
                if is_pixel_matrix(w.forward)
                else WindowGather(w.forward, image, copy)
            ),
        )
        a_layout, b_layout = (
            make_mn_major_layout(config.block_k, block, shape.itemsize) for block in (config.block_m, config.block_n)
        )
        mainloop = make_mainloop(config, tiling, make_loaders, k_range, smem, (a_layout, b_layout), MnMajorMainloop)
        emit_tile_sums(mainloop, tiles, position, workspace, shape, is_atomic=is_atomic)
