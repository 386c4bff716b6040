"""Gradients of weights of first layers, which have few input channels, by mma.sync.

The product has filters as rows and (tap, channel) as columns, and its reduction runs over all pixels of the batch. Few
channels fill no vector, so columns are not copied one by one: a CTA copies the rows of X below a tile of pixels as they
are. A tap is an offset in shared memory, at which each lane loads the elements of its fragments of X. dY has many
channels; its fragments are transposed as in `mma_sync`.

CTAs share the tiles of pixels (`parts`), and copy the next tiles while they multiply one. A second kernel adds their
float32 sums in order, so that results are the same bits in every run.
"""

from __future__ import annotations

import math

from tvm.s_tir import Schedule
from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.registry import schedule
from tvmconv.requirements import ONE_GROUP, all_of
from tvmconv.space import Knobs
from tvmconv.workloads.conv_gradient import WeightGradient
from tvmconv.workloads.dtypes import ACCUMULATOR

from ....tir_builder import (
    Buffer,
    Expr,
    Register,
    allocate,
    emit_ptx,
    if_,
    is_below,
    items_loop,
    logical_and,
    store,
    to_uint32,
    unrolled_loop,
)
from ...gradient_conversion import build_channels_last_gradient
from ...gradient_operators import WGRAD
from ..gemm.atoms import MmaSyncAtom
from ..gemm.cp_async import copy_elements
from ..gemm.cta import Cta, allocate_smem, allow_dependent_launch, open_cta
from ..gemm.epilogue_ops import EpilogueOps
from ..gemm.mma_sync_mainloop import WarpTiling
from ..gemm.mn_major_operands import load_a_fragment, make_mn_major_layout
from ..gemm.tile_scheduler import WorkTile
from ..gemm.workspace_reduction import store_partial_sums
from ..implicit_gemm_shape import ACCUMULATOR_BYTES, VECTOR_BYTES
from ..pixel_tiles import PixelTiles
from ..wgrad_sums import make_wgrad_reduction
from .cta import join_halves
from .schedule import DTYPES, FEW_CHANNELS, MAX_CHANNELS
from .volume_view import view_gradient
from .wgrad_config import StemWgradConfig, can_fit_registers


@schedule(
    *WGRAD,
    dtypes=DTYPES,
    usage=lambda w, columns: StemWgradConfig.compute_usage(view_gradient(w), columns),
    condition=all_of(ONE_GROUP, FEW_CHANNELS, can_fit_registers),
    search_if=lambda w: w.C < MAX_CHANNELS,
    supersedes=("mma_sync", "implicit_gemm", "tiling"),
    starting_configs=lambda w: StemWgradConfig.list_starting_configs(view_gradient(w)),
    device_kinds=("cuda",),
    min_arch=80,
)
def stem(s: Schedule, w: WeightGradient, k: Knobs) -> Schedule:
    """Multiply tiles of pixels in shared memory, whose columns are offsets, and add the sums of all parts."""
    config = StemWgradConfig.declare_knobs(view_gradient(w), k)
    shape, num_parts = config.shape, int(config.num_parts)

    def emit(arguments: dict[str, Buffer]) -> None:
        workspace = allocate("partial_sums", num_parts * shape.m * shape.n, ACCUMULATOR, "global")
        with open_cta(int(config.num_blocks_m), int(config.num_threads), num_parts, splits_in_cluster=False) as cta:
            allow_dependent_launch()
            StemWgradKernel(config, arguments, cta, allocate_smem(int(config.smem_bytes))).emit(workspace)
        reduction = make_wgrad_reduction(shape, num_parts)
        reduction.emit(workspace, EpilogueOps.from_workload(w), arguments, w.RESULT)

    return build_channels_last_gradient(w, emit)


class StemWgradKernel:
    """Emitter of the kernel that multiplies."""

    def __init__(self, config: StemWgradConfig, arguments: dict[str, Buffer], cta: Cta, smem: Expr) -> None:
        self._config, self._window = config, config.window
        self._gradient, self._image = (arguments[name] for name in config.w.OPERANDS)
        self._first_filter = cta.index * config.block_m
        self._layout = make_mn_major_layout(int(config.num_pixels), config.block_m, config.itemsize)
        atom = MmaSyncAtom(config.w.dtype, config.w.dtype)
        mmas = int(config.mmas_m), int(config.mmas_n), 1
        warps, has_row_pairs = (1, config.warps_n, config.warps_k), config.itemsize == ACCUMULATOR_BYTES
        self._tiling = WarpTiling(atom, *warps, *mmas, thread=cta.thread, has_row_pairs=has_row_pairs)
        self._tiles = PixelTiles.allocate(config, cta.split, smem, self._tiling)
        self._a_fragments = allocate("a_fragments", self._tiling.mmas_m * atom.a_registers, "uint32")
        self._b_fragment = allocate("b_fragment", atom.b_registers, "uint32")
        self._halves = allocate("halves", 4, "uint16")
        self._tap_offsets = allocate("tap_offset", self._tiling.mmas_n, "uint32")

    def emit(self, workspace: Buffer) -> None:
        """Emit the kernel, which stores its sums to a workspace (parts, filters, columns)."""
        config, tiles, tiling = self._config, self._tiles, self._tiling
        with unrolled_loop(tiling.mmas_n, "j") as mma_n:  # sums of columns that do not exist are not stored
            column = T.min(tiling.first_column + mma_n * tiling.atom.n + tiling.thread.lane // 4, config.shape.n - 1)
            store(self._tap_offsets, mma_n, to_uint32(self._window.tap_offset(column)))
        tiles.multiply(self._copy, self._multiply)
        with if_(tiling.holds_sums):
            tile = WorkTile(self._first_filter, 0, 0)
            store_partial_sums(workspace, tiles.accumulators, tiling, tile, tiles.part, config.shape)

    def _copy(self, iteration: Expr, stage: Expr) -> None:
        """Start the copies of a tile."""
        config, thread = self._config, self._tiling.thread.thread
        with if_(self._tiles.is_valid(iteration)):
            tile = self._tiles.locate(iteration)
            address = Register("stage", "uint32", self._tiles.stage(stage)).value
            self._copy_gradient(address, tile)
            window = address + to_uint32(int(config.gradient_bytes))
            self._window.copy(self._image, window, tile, thread, int(config.num_threads))

    def _copy_gradient(self, address: Expr, tile: tuple[Expr, Expr, Expr]) -> None:
        """Start the copies of a tile of dY, with zeros outside of the image and beyond the filters."""
        config, (plane, row, column), layout = self._config, tile, self._layout
        _, rows, columns = config.forward.output_size
        filters, half = config.w.O, allocate("gathered", 1, "uint32")
        chunks, elements = layout.row_bytes // VECTOR_BYTES, VECTOR_BYTES // config.itemsize
        contiguous = math.gcd(filters, elements)
        with items_loop(layout.rows * chunks, self._tiling.thread.thread, int(config.num_threads)) as item:
            pixel, chunk = item // chunks, item % chunks
            y, x = row + pixel // config.block_q, column + pixel % config.block_q
            first = self._first_filter + chunk * elements
            destination = address + layout.swizzled_offset(pixel, chunk)
            for element in range(0, elements, contiguous):
                is_inside = logical_and(
                    is_below(y, rows, config.block_p),
                    is_below(x, columns, config.block_q),
                    is_below(first + element, filters, config.block_m),
                )
                index = ((plane * rows + y) * columns + x) * filters + first + element
                piece = destination + to_uint32(element * config.itemsize)
                copy_elements(piece, self._gradient, index, contiguous * config.itemsize, is_inside, half)

    def _multiply(self, stage: Expr) -> None:
        """Multiply the pixels of a tile, those of an mma at a time."""
        with self._tiles.steps_loop() as step:
            self._multiply_step(self._tiles.stage(stage), step)

    def _multiply_step(self, stage: Expr, step: Expr) -> None:
        config, tiling, lane, atom = self._config, self._tiling, self._tiling.thread.lane, self._tiling.atom
        first_pixel = step * config.mma_pixels
        for mma_m in range(tiling.mmas_m):
            registers = self._a_registers(mma_m)
            load_a_fragment(registers, atom, self._layout, stage, first_pixel, mma_m * atom.m, lane)
        neighbours = 4 // config.itemsize  # pixels of a register
        pixel = first_pixel + lane % 4 * neighbours
        row, column = first_pixel // config.block_q, pixel % config.block_q
        offset = int(config.gradient_bytes) + self._window.pixel_offset(row, column)
        address = Register("pixel_address", "uint32", stage + to_uint32(offset)).value
        pixel_bytes = config.forward.stride[-1] * config.forward.C * config.itemsize
        for mma_n in range(tiling.mmas_n):
            element = address + self._tap_offsets[mma_n]
            for e in range(atom.b_registers):
                first = element + to_uint32(e * 4 * neighbours * pixel_bytes)
                if neighbours == 1:
                    emit_ptx("ld.shared.b32", self._b_fragment[e], first)
                    continue
                for half in range(2):
                    register = self._halves[e * 2 + half]
                    emit_ptx("ld.shared.b16", register, first + to_uint32(half * pixel_bytes))
                store(self._b_fragment, e, join_halves(self._halves[e * 2], self._halves[e * 2 + 1]))
            b_registers = [self._b_fragment[e] for e in range(atom.b_registers)]
            for mma_m in range(tiling.mmas_m):
                tiling.multiply(self._tiles.accumulators, mma_m, mma_n, self._a_registers(mma_m), b_registers)

    def _a_registers(self, mma_m: int) -> list[Expr]:
        size = self._tiling.atom.a_registers
        return [self._a_fragments[mma_m * size + e] for e in range(size)]
