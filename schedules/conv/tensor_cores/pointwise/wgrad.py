"""Gradients of weights of narrow 1×1 layers by mma.sync: each CTA has the sums of all, or many, filters and channels.

The product has filters as rows and channels as columns, and its reduction runs over the pixels of the batch. These
layers are bound by memory. A tile of pixels is contiguous in dY and in X, and cp.async copies it as it is: no channel
is padding, and each pixel is read once. A few CTAs may divide the channels, which leaves fewer sums to add.

In shared memory, the pitch of a pixel is an odd multiple of 16 bytes, so that `ldmatrix`, which transposes, reads eight
pixels without bank conflicts.

Warps divide the filters, the channels and the pixels of a tile. Those along the pixels add their sums in shared memory.
CTAs take tiles in turn, and a second kernel adds their sums in order, so that results are the same bits in every run.

Sources: PTX ISA, "mma.sync", "ldmatrix" and "cp.async".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm.s_tir import Schedule
from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.registry import schedule
from tvmconv.space import Knobs
from tvmconv.target import LINE_BYTES
from tvmconv.workloads.conv_gradient import WeightGradient
from tvmconv.workloads.dtypes import ACCUMULATOR

from ....tir_builder import (
    Buffer,
    Expr,
    Register,
    allocate,
    emit_call,
    emit_ptx,
    fill_zeros,
    if_,
    is_below,
    items_loop,
    logical_and,
    serial_loop,
    store,
    to_uint32,
    unrolled_loop,
)
from ...gradient_conversion import build_channels_last_gradient, view_channels_last
from ...gradient_operators import WGRAD
from ..gemm.atoms import MmaSyncAtom, ldmatrix_x4
from ..gemm.cta import Cta, allocate_smem, allow_dependent_launch, open_cta
from ..gemm.mma_sync_mainloop import WarpTiling
from ..gemm.pipelines import CpAsyncPipeline
from ..gemm.tile_scheduler import WorkTile
from ..gemm.workspace_reduction import store_sums
from ..hopper.tma_requirements import is_pixel_matrix
from ..implicit_gemm_shape import ACCUMULATOR_BYTES
from ..wgrad_sums import emit_wgrad
from .dgrad import MAX_ROW_BYTES
from .pixel_operand import OCTET, PixelOperand
from .wgrad_config import MMA_PIXELS, PointwiseWgradConfig

MAX_UNALIGNED_BYTES = 512  # of a row, above which `hopper` is faster


def is_pointwise(w: WeightGradient) -> bool:
    """Whether the gradient is a product over all pixels whose sums fit a CTA, and pixels are vectors of 16 bytes."""
    viewed = view_channels_last(w)
    forward = viewed.forward
    if w.groups > 1 or w.C % OCTET or w.O % OCTET or not is_pixel_matrix(forward) or forward.has_large_tensors:
        return False
    return PointwiseWgradConfig.has_config(viewed)


def is_promising(w: WeightGradient) -> bool:
    """Return whether memory bounds the gradient, of rows of at most 192 bytes of X or dY, or rows are short and no
    multiples of the lines that TMA reads.
    """
    row_bytes = w.C * 2, w.O * 2
    is_unaligned = max(row_bytes) < MAX_UNALIGNED_BYTES and any(each % LINE_BYTES for each in row_bytes)
    return min(row_bytes) <= MAX_ROW_BYTES or is_unaligned


@schedule(
    *WGRAD,
    dtypes=("float16", "bfloat16"),
    usage=lambda w, columns: PointwiseWgradConfig.compute_usage(view_channels_last(w), columns),
    condition=is_pointwise,
    search_if=is_promising,
    starting_configs=lambda w: PointwiseWgradConfig.list_starting_configs(view_channels_last(w)),
    supersedes=("implicit_gemm", "tiling"),
    device_kinds=("cuda",),
    min_arch=80,
)
def pointwise_mma_sync(s: Schedule, w: WeightGradient, k: Knobs) -> Schedule:
    """Multiply tiles of pixels that pass through shared memory, and add the sums of all CTAs in order."""
    config = PointwiseWgradConfig.declare_knobs(view_channels_last(w), k)
    num_parts = int(config.num_parts)

    def emit(arguments: dict[str, Buffer]) -> None:
        def emit_product(sums: Buffer) -> None:
            num_products = int(config.blocks_m * config.blocks_n)
            with open_cta(num_products, int(config.num_threads), num_parts, splits_in_cluster=False) as cta:
                allow_dependent_launch()
                PixelStream.allocate(config, arguments, cta).emit(sums)

        emit_wgrad(w, num_parts, arguments, emit_product, is_atomic=False)

    return build_channels_last_gradient(w, emit)


@dataclass(frozen=True)
class PixelStream:
    """The pixels of a CTA, which pass through stages, and the sums of a thread."""

    config: PointwiseWgradConfig
    part: Expr  # index among the CTAs that share the pixels
    tile: WorkTile  # first filter and channel of the CTA
    smem: Expr  # shared-memory address of the first stage
    tiling: WarpTiling
    gradient: PixelOperand
    inputs: PixelOperand
    accumulators: Buffer

    @classmethod
    def allocate(cls, config: PointwiseWgradConfig, arguments: dict[str, Buffer], cta: Cta) -> PixelStream:
        """Allocate registers and shared memory."""
        atom, warps = MmaSyncAtom(config.w.dtype, config.w.dtype), (config.warps_m, config.warps_n, config.warps_k)
        mmas = int(config.mmas_m), int(config.mmas_n), int(config.steps)
        tiling = WarpTiling(atom, *warps, *mmas, thread=cta.thread)
        (dy, image), lane = (arguments[name] for name in config.w.OPERANDS), cta.thread.lane
        shape, last_row = config.shape, (config.warps_m - 1) * tiling.mmas_m * 2
        block_m, block_n, blocks_n = int(config.block_m), int(config.block_n), int(config.blocks_n)
        first = WorkTile(cta.index // blocks_n * block_m, cta.index % blocks_n * block_n, 0)
        first_chunk = tiling.first_row // OCTET + lane // 8 % 2
        gradient = PixelOperand(dy, shape.m, block_m, first.m, 0, first_chunk, last_row + 1)
        first_chunk, last_column = tiling.first_column // OCTET + lane // 16, (config.warps_n - 1) * tiling.mmas_n
        offset = int(config.gradient_bytes)
        inputs = PixelOperand(image, shape.n, block_n, first.n, offset, first_chunk, last_column + 1)
        accumulators = allocate("accumulators", tiling.num_accumulators, ACCUMULATOR)
        smem = allocate_smem(int(config.smem_bytes))
        return cls(config, cta.split, first, smem, tiling, gradient, inputs, accumulators)

    def emit(self, workspace: Buffer) -> None:
        """Multiply all pixels of the CTA, and store the sums to the workspace (parts, filters, channels)."""
        pipeline, iterations = CpAsyncPipeline(self.config.stages), int(self.config.iterations)
        pipeline.fill(iterations, self.copy)
        fill_zeros(self.accumulators, self.tiling.num_accumulators)
        pipeline.run(iterations, self.copy, self.multiply, self.is_valid)
        if self.tiling.warps_k > 1:
            self.add_slices(workspace)
            return
        with unrolled_loop(self.tiling.num_accumulators // 2, "pair") as pair:
            self.store_pair(workspace, pair, [self.accumulators[2 * pair + e] for e in range(2)])

    def is_valid(self, iteration: Expr) -> Expr:
        """Return whether the CTA has a tile in an iteration."""
        config = self.config
        return is_below(self._tile(iteration), int(config.num_tiles), int(config.num_parts))

    def _tile(self, iteration: Expr) -> Expr:
        return iteration * int(self.config.num_parts) + self.part

    def _stage(self, stage: Expr) -> Expr:
        return self.smem + to_uint32(stage * int(self.config.stage_bytes))

    def copy(self, iteration: Expr, stage: Expr) -> None:
        """Start the copies of a tile to a stage."""
        config, thread = self.config, self.tiling.thread.thread
        with if_(self.is_valid(iteration)):
            tile = Register("tile", value=self._tile(iteration)).value
            address = Register("copy_address", "uint32", self._stage(stage)).value
            for operand in (self.gradient, self.inputs):
                operand.copy(address, tile, config.shape.k, int(config.block_k), thread, int(config.num_threads))

    def multiply(self, stage: Expr) -> None:
        """Multiply the pixels of a tile, 16 of a warp at a time."""
        tiling, lane, atom = self.tiling, self.tiling.thread.lane, self.tiling.atom
        address = Register("read_address", "uint32", self._stage(stage)).value
        a_fragments = allocate("a_fragments", tiling.mmas_m * atom.a_registers, "uint32")
        b_fragments = allocate("b_fragments", 2 * atom.b_registers, "uint32")
        rows = [[a_fragments[i * atom.a_registers + e] for e in range(atom.a_registers)] for i in range(tiling.mmas_m)]
        columns = [[b_fragments[i * atom.b_registers + e] for e in range(atom.b_registers)] for i in range(2)]
        with serial_loop(tiling.mmas_k, "step") as step:
            pixel = (step * tiling.warps_k + tiling.warp_k) * MMA_PIXELS + lane % 8
            for mma_m, registers in enumerate(rows):
                offset = self.gradient.locate(pixel + lane // 16 * 8, mma_m * atom.m // OCTET)
                ldmatrix_x4(registers, address + offset, transposed=True)
            for first in range(0, tiling.mmas_n, 2):  # an ldmatrix has the operands B of two mmas
                offset = self.inputs.locate(pixel + lane // 8 % 2 * 8, first)
                ldmatrix_x4([*columns[0], *columns[1]], address + offset, transposed=True)
                for mma_m, registers in enumerate(rows):
                    for mma_n in range(first, min(first + 2, tiling.mmas_n)):
                        tiling.multiply(self.accumulators, mma_m, mma_n, registers, columns[mma_n - first])

    def add_slices(self, workspace: Buffer) -> None:
        """Add the sums of the warps along the pixels, of which each adds up some, and store them in pairs."""
        tiling = self.tiling
        pairs, threads = tiling.num_accumulators // 2, tiling.num_threads // tiling.warps_k
        pair_bytes = 2 * ACCUMULATOR_BYTES
        thread_address = self.smem + to_uint32(tiling.thread.thread % threads * pair_bytes)
        thread_address = Register("sums_address", "uint32", thread_address).value
        with unrolled_loop(pairs, "i") as i:
            place = to_uint32((tiling.warp_k * pairs + i) * (threads * pair_bytes))
            values = [T.reinterpret("uint32", self.accumulators[2 * i + e]) for e in range(2)]
            emit_ptx("st.shared.v2.b32", thread_address + place, *values)
        emit_call(T.cuda.cta_sync())
        term, total = allocate("term", 2, ACCUMULATOR), allocate("total", 2, ACCUMULATOR)
        with items_loop(pairs, tiling.warp_k, tiling.warps_k, is_unrolled=True) as pair:
            for k_slice in range(tiling.warps_k):
                place = to_uint32((k_slice * pairs + pair) * (threads * pair_bytes))
                target = term if k_slice else total
                emit_ptx("ld.shared.v2.b32", target[0], target[1], thread_address + place)
                if k_slice:
                    for e in range(2):
                        store(total, e, total[e] + term[e])
            self.store_pair(workspace, pair, [total[0], total[1]])

    def store_pair(self, workspace: Buffer, pair: Expr, sums: Sequence[Expr]) -> None:
        """Store two neighbouring sums of this lane, which their number says, if they are those of the CTA."""
        config, tiling, shape = self.config, self.tiling, self.config.shape
        mma_m, mma_n = pair // 2 // tiling.mmas_n, pair // 2 % tiling.mmas_n
        row, column = tiling.row(WorkTile(0, 0, 0), mma_m, pair % 2), tiling.column(WorkTile(0, 0, 0), mma_n)
        is_stored = logical_and(
            is_below(row, int(config.block_m), tiling.block_m),
            is_below(column, int(config.block_n), tiling.block_n),
            is_below(self.tile.m + row, shape.m, int(config.block_m)),
            is_below(self.tile.n + column, shape.n, int(config.block_n)),
        )
        with if_(is_stored):
            index = (self.part * shape.m + self.tile.m + row) * shape.n + self.tile.n + column
            store_sums(workspace, index, sums, is_atomic=False)
