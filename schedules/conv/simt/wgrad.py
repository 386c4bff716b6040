"""Gradients of weights in float32 on the FMA units: the multistage kernel of `mma_sync` without tensor cores.

The product has the filters as rows and (tap, channel) as columns, and its reduction runs over all pixels of the batch.
cp.async copies tiles of pixels × channels of dY, and of X at the taps of the columns, as they are in memory. A lane
multiplies up to four neighbouring rows and columns, which it loads from a row of shared memory at once.

CTAs share the pixels (`parts`). A second kernel adds their sums in order, so that results are the same bits in every
run.

Source: CUTLASS, `include/cutlass/gemm/threadblock/mma_multistage.h` and `include/cutlass/gemm/warp/mma_simt.h`.
"""

from __future__ import annotations

from typing import cast

from tvm.s_tir import Schedule

from tvmconv.registry import schedule
from tvmconv.space import Knobs
from tvmconv.workloads.conv_gradient import WeightGradient
from tvmconv.workloads.dtypes import ACCUMULATOR

from ...tir_builder import Buffer, allocate
from ..gradient_conversion import build_channels_last_gradient
from ..gradient_operators import WGRAD
from ..tensor_cores.gemm.atoms import MmaSyncAtom, ThreadPosition
from ..tensor_cores.gemm.cp_async import CopyThreads
from ..tensor_cores.gemm.cta import allocate_smem, allow_dependent_launch, open_cta
from ..tensor_cores.gemm.fma_mainloop import FmaAtom, FmaMainloop, FmaTiling, PlainLayout
from ..tensor_cores.gemm.mn_major_operands import PixelGather, WindowGather
from ..tensor_cores.gemm.pipelines import CpAsyncPipeline
from ..tensor_cores.gemm.tile_scheduler import KRange, TileScheduler
from ..tensor_cores.hopper.tma_requirements import is_pixel_matrix
from ..tensor_cores.implicit_gemm_shape import ACCUMULATOR_BYTES
from ..tensor_cores.wgrad_sums import declare_atomics, emit_tile_sums, emit_wgrad, make_wgrad_shape
from .wgrad_config import SimtConfig, has_enough_channels


@schedule(
    *WGRAD,
    dtypes=(ACCUMULATOR,),
    usage=SimtConfig.compute_usage,
    search_if=has_enough_channels,
    starting_configs=SimtConfig.list_starting_configs,
    supersedes=("implicit_gemm", "tiling"),
    device_kinds=("cuda",),
    min_arch=80,
)
def simt(s: Schedule, w: WeightGradient, k: Knobs) -> Schedule:
    """Tile filters × (tap, channel) over CTAs and warps, pipeline tiles of pixels, and add the sums of all parts."""
    config = SimtConfig.declare_knobs(w, k)
    is_atomic = declare_atomics(w, k)

    def emit(arguments: dict[str, Buffer]) -> None:
        def emit_product(sums: Buffer) -> None:
            emit_partial_sums(w, config, arguments, sums, is_atomic=is_atomic)

        emit_wgrad(w, config.num_parts, arguments, emit_product, is_atomic=is_atomic)

    return build_channels_last_gradient(w, emit)


def emit_partial_sums(
    w: WeightGradient, config: SimtConfig, arguments: dict[str, Buffer], workspace: Buffer, *, is_atomic: bool
) -> None:
    """Emit the kernel that multiplies; it stores or adds sums (parts, filters of a group, groups, columns)."""
    shape, block = make_wgrad_shape(w), (config.block_m, config.block_n)
    num_ctas = int(config.num_tiles)
    tiles = TileScheduler.of_product((shape.m, shape.n), block, shape.groups, num_ctas)
    with open_cta(num_ctas, int(config.num_threads), config.num_parts, splits_in_cluster=False) as position:
        allow_dependent_launch()
        smem = allocate_smem(int(config.smem_bytes))
        tiling = make_tiling(config, position.thread)
        k_range = KRange(position.split, int(config.k_tiles_per_part), int(config.total_k_tiles))
        dy, image = (arguments[name] for name in w.OPERANDS)
        a_layout, b_layout = (PlainLayout(config.block_k, size * ACCUMULATOR_BYTES) for size in block)
        a_copy, b_copy = (
            CopyThreads(layout, tiling.num_threads, tiling.thread.thread) for layout in (a_layout, b_layout)
        )
        if is_pixel_matrix(w.forward):
            b: PixelGather | WindowGather = PixelGather(image, shape.k, shape.groups, shape.n, b_copy)
        else:
            b = WindowGather(w.forward, image, b_copy)
        mainloop = FmaMainloop(
            tiling,
            a_layout,
            b_layout,
            PixelGather(dy, shape.k, shape.groups, shape.m, a_copy),
            b,
            config.block_k,
            k_range,
            CpAsyncPipeline(config.stages),
            smem,
            a_fragments=allocate("a_fragments", 2 * tiling.mmas_m * FmaAtom.a_registers, ACCUMULATOR),
            b_fragments=allocate("b_fragments", 2 * tiling.mmas_n * FmaAtom.b_registers, ACCUMULATOR),
        )
        emit_tile_sums(mainloop, tiles, position, workspace, shape, is_atomic=is_atomic)


def make_tiling(config: SimtConfig, thread: ThreadPosition) -> FmaTiling:
    """Return the division of a tile among warps."""
    return FmaTiling(
        cast("MmaSyncAtom", FmaAtom()),
        config.warps_m,
        config.warps_n,
        warps_k=1,
        mmas_m=config.fmas_m,
        mmas_n=config.fmas_n,
        mmas_k=config.block_k,
        thread=thread,
    )
