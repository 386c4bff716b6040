"""Gradients of weights in float32 on the FMA units: the multistage kernel of `mma_sync` without tensor cores.

The product has the filters as rows and (tap, channel) as columns, and its reduction runs over all pixels of the batch.
cp.async copies tiles of pixels × channels of dY, and of X at the taps of the columns, as they are in memory. A lane
multiplies pairs of neighbouring rows and columns, which it loads from a row of shared memory at once. The lanes of a
warp hold its sums as those of mma.sync.

CTAs share the pixels (`parts`). A second kernel adds their sums in order, so that results are the same bits in every
run.

Source: CUTLASS, `include/cutlass/gemm/threadblock/mma_multistage.h` and `include/cutlass/gemm/warp/mma_simt.h`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast

from tvm.s_tir import Schedule

from tvmconv.registry import schedule
from tvmconv.space import Knobs
from tvmconv.workloads.conv_gradient import WeightGradient
from tvmconv.workloads.dtypes import ACCUMULATOR

from ...tir_builder import Buffer, Expr, allocate, emit_ptx, fill_zeros, if_, store, to_uint32, unrolled_loop
from ..gradient_conversion import build_channels_last_gradient
from ..gradient_operators import WGRAD
from ..tensor_cores.gemm.atoms import MmaSyncAtom, ThreadPosition
from ..tensor_cores.gemm.cp_async import CopyThreads
from ..tensor_cores.gemm.cta import allocate_smem, allow_dependent_launch, open_cta
from ..tensor_cores.gemm.mma_sync_mainloop import MmaSyncMainloop, WarpTiling
from ..tensor_cores.gemm.mn_major_operands import PixelGather, WindowGather
from ..tensor_cores.gemm.pipelines import CpAsyncPipeline
from ..tensor_cores.gemm.smem_layout import SmemLayout
from ..tensor_cores.gemm.tile_scheduler import KRange, TileScheduler
from ..tensor_cores.gemm.workspace_reduction import store_partial_sums
from ..tensor_cores.hopper.tma_requirements import is_pixel_matrix
from ..tensor_cores.implicit_gemm_shape import ACCUMULATOR_BYTES
from ..tensor_cores.wgrad_sums import declare_atomics, emit_wgrad, make_wgrad_shape
from .wgrad_config import FMA_M, FMA_N, SimtConfig, has_enough_channels


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


@dataclass(frozen=True)
class FmaAtom:
    """Multiply-adds of a warp for 16 × 8 sums and one element of the reduction; lanes hold them as those of an mma."""

    m: ClassVar[int] = FMA_M
    n: ClassVar[int] = FMA_N
    itemsize: ClassVar[int] = ACCUMULATOR_BYTES
    num_accumulators: ClassVar[int] = 4  # registers per lane of the sums, and of the fragments of A and B
    a_registers: ClassVar[int] = 2
    b_registers: ClassVar[int] = 2


@dataclass(frozen=True)
class PlainLayout(SmemLayout):
    """A tile without a swizzle: the lanes of a warp read one row at a time."""

    def swizzle_mask(self, row: Expr) -> Expr:
        """Return zero."""
        return 0


@dataclass(frozen=True)
class FmaMainloop(MmaSyncMainloop):
    """The mainloop of `mma_sync` with multiply-adds; the rows of operands in shared memory are pixels."""

    def _load_a_fragments(self, stage: Expr, mma_k: int, fragment_set: int) -> None:
        tiling, layout = self.tiling, self.a_layout
        column = tiling.first_row + tiling.thread.lane // 4 * 2
        address = self._stage(stage) + to_uint32(column * ACCUMULATOR_BYTES) + to_uint32(mma_k * layout.row_bytes)
        with unrolled_loop(tiling.mmas_m, "i") as i:
            pair = self._a_fragment(fragment_set, i)
            emit_ptx("ld.shared.v2.b32", *pair, address + to_uint32(i * (FMA_M * ACCUMULATOR_BYTES)))

    def _load_b_fragments(self, stage: Expr, mma_k: int, fragment_set: int) -> None:
        tiling, layout = self.tiling, self.b_layout
        column = tiling.first_column + tiling.thread.lane % 4 * 2
        offset = self.a_layout.nbytes + mma_k * layout.row_bytes
        address = self._stage(stage) + to_uint32(column * ACCUMULATOR_BYTES) + to_uint32(offset)
        with unrolled_loop(tiling.mmas_n, "j") as j:
            pair = self._b_fragment(fragment_set, j)
            emit_ptx("ld.shared.v2.b32", *pair, address + to_uint32(j * (FMA_N * ACCUMULATOR_BYTES)))

    def multiply(self, accumulators: Buffer, fragment_set: int) -> None:
        """Multiply the fragments of one of the two register sets."""
        tiling = self.tiling
        with unrolled_loop(tiling.mmas_m, "i") as i, unrolled_loop(tiling.mmas_n, "j") as j:
            a, b = self._a_fragment(fragment_set, i), self._b_fragment(fragment_set, j)
            for half in range(2):
                for e in range(2):
                    index = tiling.accumulator(i, j, half) + e
                    store(accumulators, index, accumulators[index] + a[half] * b[e])


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
        accumulators = allocate("accumulators", tiling.num_accumulators, ACCUMULATOR)
        tile = tiles.tile_at(position.index)
        mainloop.locate(tile)
        mainloop.fill()
        fill_zeros(accumulators, tiling.num_accumulators)
        mainloop.start()
        mainloop.compute(accumulators)
        with if_(tiling.holds_sums):
            split = position.split
            store_partial_sums(workspace, accumulators, tiling, tile, split, shape, is_atomic=is_atomic)


def make_tiling(config: SimtConfig, thread: ThreadPosition) -> WarpTiling:
    """Return the division of a tile among warps."""
    return WarpTiling(
        cast("MmaSyncAtom", FmaAtom()),
        config.warps_m,
        config.warps_n,
        warps_k=1,
        mmas_m=config.fmas_m,
        mmas_n=config.fmas_n,
        mmas_k=config.block_k,
        thread=thread,
        has_row_pairs=True,
    )
