"""Mainloop of an mma.sync kernel: cp.async fills stages, ldmatrix loads fragments, warps multiply them.

Source: CUTLASS, `include/cutlass/gemm/threadblock/mma_multistage.h`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.target import WARP_SIZE

from ....tir_builder import (
    Buffer,
    Expr,
    allocate,
    emit_call,
    emit_ptx,
    if_,
    is_below,
    logical_and,
    serial_loop,
    store,
    to_uint32,
    unrolled_loop,
)
from ..implicit_gemm_shape import ACCUMULATOR_BYTES, VECTOR_BYTES, ImplicitGemmShape
from .accumulators import Accumulators
from .atoms import MmaSyncAtom, ThreadPosition, ldmatrix_x4
from .pipelines import CpAsyncPipeline
from .smem_layout import SmemLayout
from .tile_scheduler import KRange, WorkTile


@dataclass(frozen=True)
class WarpTiling:
    """Division of a CTA's tile among warps, and this thread's place in it."""

    atom: MmaSyncAtom  # the mma instruction
    warps_m: int  # warps along M
    warps_n: int  # warps along N
    warps_k: int  # warps that share the reduction, each with a slice of every K tile
    mmas_m: int  # instructions of a warp along M
    mmas_n: int  # instructions of a warp along N
    mmas_k: int  # instructions of a warp along a K tile
    thread: ThreadPosition  # position of this thread
    # Whether the rows of a lane in both halves of an mma are neighbours in the tile, so that one load has both.
    has_row_pairs: bool = False

    @property
    def warp_m(self) -> Expr:
        """Index of the warp along M."""
        return self.thread.warp % self.warps_m

    @property
    def warp_n(self) -> Expr:
        """Index of the warp along N."""
        return self.thread.warp // self.warps_m % self.warps_n

    @property
    def warp_k(self) -> Expr:
        """Index of the warp along the reduction."""
        return self.thread.warp // (self.warps_m * self.warps_n)

    @property
    def holds_sums(self) -> Expr:
        """Whether this warp holds the sums of all slices of the reduction."""
        return self.warp_k == 0 if self.warps_k > 1 else True

    @property
    def first_row(self) -> Expr:
        """First row of the warp in the tile."""
        return self.warp_m * (self.mmas_m * self.atom.m)

    @property
    def first_column(self) -> Expr:
        """First column of the warp in the tile."""
        return self.warp_n * (self.mmas_n * self.atom.n)

    @property
    def joined_columns(self) -> int:
        """Instructions whose columns in a lane are neighbours."""
        return 1

    @property
    def num_accumulators(self) -> int:
        """Accumulator registers per thread."""
        return self.mmas_m * self.mmas_n * self.atom.num_accumulators

    @property
    def block_m(self) -> int:
        """Rows of the CTA's tile."""
        return self.warps_m * self.mmas_m * self.atom.m

    @property
    def block_n(self) -> int:
        """Columns of the CTA's tile."""
        return self.warps_n * self.mmas_n * self.atom.n

    @property
    def num_threads(self) -> int:
        """Threads of the CTA."""
        return self.warps_m * self.warps_n * self.warps_k * WARP_SIZE

    def is_inside(self, shape: ImplicitGemmShape, row: Expr, column: Expr) -> Expr:
        """Return whether a row and a column of a work tile lie inside the product."""
        return logical_and(is_below(row, shape.m, self.block_m), is_below(column, shape.n, self.block_n))

    def accumulator(self, mma_m: Expr, mma_n: Expr, half: Expr = 0) -> Expr:
        """Return the index of this lane's first accumulator of an mma: a pair of columns of each half of the rows."""
        return (mma_m * self.mmas_n + mma_n) * self.atom.num_accumulators + half * 2

    def multiply(self, accumulators: Buffer, mma_m: Expr, mma_n: Expr, a: Sequence[Expr], b: Sequence[Expr]) -> None:
        """Emit one mma of the fragments of A and B."""
        first = self.accumulator(mma_m, mma_n)
        self.atom.emit([accumulators[first + e] for e in range(self.atom.num_accumulators)], a, b)

    def row(self, tile: WorkTile, mma_m: Expr, half: Expr) -> Expr:
        """Return the row of this lane's accumulators in a half of an mma."""
        first, lane_row = tile.m + (self.warp_m * self.mmas_m + mma_m) * self.atom.m, self.thread.lane // 4
        return first + (lane_row * 2 + half if self.has_row_pairs else half * 8 + lane_row)

    def column(self, tile: WorkTile, mma_n: Expr) -> Expr:
        """Return the first of two neighbouring columns of this lane's accumulators of an mma."""
        return tile.n + (self.warp_n * self.mmas_n + mma_n) * self.atom.n + self.thread.lane % 4 * 2


class OperandLoader(Protocol):
    """How the threads of a CTA copy K tiles of an operand to shared memory."""

    def locate(self, first_row: Expr, group: Expr) -> None:
        """Compute what the following copies of a work tile read; `first_row` is its first row along M or N."""

    def load(self, stage: Expr, offset: int, first_k: Expr) -> None:
        """Start the copies of a K tile to an offset in a stage."""


@dataclass(frozen=True)
class MmaSyncMainloop:
    """Loads and multiplies the K tiles of a work tile; fragments are loaded one mma ahead, also across K tiles."""

    tiling: WarpTiling  # division among warps
    a_layout: SmemLayout  # layout of operand A in a stage
    b_layout: SmemLayout  # layout of operand B in a stage, behind A
    a: OperandLoader
    b: OperandLoader
    block_k: int  # elements of the reduction per K tile
    k_range: KRange  # K tiles of this CTA
    pipeline: CpAsyncPipeline  # stages
    smem: Expr  # shared-memory address of the first stage
    a_fragments: Buffer  # two sets of registers for fragments of A
    b_fragments: Buffer  # two sets of registers for fragments of B
    products: Accumulators | None = None  # accumulators that are promoted to the sums; None if they are the sums
    promotion_k_tiles: int = 0  # K tiles after which accumulators are promoted; 0: after the last one

    def locate(self, tile: WorkTile) -> None:
        """Compute the rows that the following copies read."""
        self.a.locate(tile.m, tile.group)
        self.b.locate(tile.n, tile.group)

    def load_a(self, k_tile: Expr, stage: Expr) -> None:
        """Start the copies of operand A of a K tile."""
        self.a.load(self._stage(stage), 0, self._first_k(k_tile))

    def load_b(self, k_tile: Expr, stage: Expr) -> None:
        """Start the copies of operand B of a K tile."""
        self.b.load(self._stage(stage), self.a_layout.nbytes, self._first_k(k_tile))

    def fill(self) -> None:
        """Start the copies of the first K tiles."""
        num_k_tiles = self.k_range.tiles_per_split
        for k_tile in range(self.pipeline.prefetch_distance):
            if not isinstance(num_k_tiles, int) or k_tile < num_k_tiles:
                with if_(True if isinstance(num_k_tiles, int) else k_tile < num_k_tiles):
                    self.load_a(k_tile, k_tile)
                    self.load_b(k_tile, k_tile)
            self.pipeline.commit()
        self.pipeline.start()

    def start(self) -> None:
        """Wait for the first stage and load the first fragments."""
        self.pipeline.wait()
        self.load_fragments(0, 0, 0)

    def run(self, accumulators: Buffer, next_tile: WorkTile | None, has_next_tile: Expr) -> None:
        """Multiply all K tiles.

        The copies that follow the last K tile are the first ones of the next work tile. Within a K tile, fragment loads
        come before copies, because an mma waits for fragments sooner. Copies are spread over the mmas, so that they are
        issued while the tensor cores compute.

        `next_tile` is the next work tile of this CTA, and `has_next_tile` whether it exists; None if a CTA computes one
        only.
        """
        pipeline, num_k_tiles = self.pipeline, self.k_range.tiles_per_split
        ahead = pipeline.prefetch_distance

        def prefetch(k_tile: Expr, load: Callable[[Expr, Expr], None]) -> None:
            with if_(k_tile + ahead < num_k_tiles):
                load(k_tile + ahead, pipeline.write_index)
            if next_tile:
                with if_(T.And(k_tile + ahead >= num_k_tiles, has_next_tile)):
                    load(k_tile + (ahead - num_k_tiles), pipeline.write_index)

        registers = accumulators
        if self.products:
            registers = self.products.registers
            self.products.clear()
        with serial_loop(num_k_tiles, "k_tile") as k_tile:
            if next_tile:
                with if_(T.And(k_tile + ahead == num_k_tiles, has_next_tile)):
                    self.locate(next_tile)
            self.multiply_k_tile(registers, functools.partial(prefetch, k_tile))
            if self.products and self.promotion_k_tiles:
                with if_((k_tile + 1) % self.promotion_k_tiles == 0):
                    self.products.promote()
                    self.products.clear()
        if self.products and not self._promotes_last_k_tile:
            self.products.promote()

    def multiply_k_tile(self, accumulators: Buffer, prefetch: Callable[[Callable[[Expr, Expr], None]], None]) -> None:
        """Multiply a K tile, and load the first fragments of the next one.

        `prefetch` starts the copies of an operand of a later K tile, by its function.
        """
        pipeline, last_mma = self.pipeline, self.tiling.mmas_k - 1
        for mma_k in range(self.tiling.mmas_k):
            if mma_k == last_mma:
                pipeline.advance_read()
                pipeline.wait()
                self.load_fragments(pipeline.read_index, 0, 0)
            else:
                self.load_fragments(pipeline.read_index, mma_k + 1, (mma_k + 1) % 2)
            if mma_k == 0:
                prefetch(self.load_a)
            if mma_k == min(1, last_mma - 1):
                prefetch(self.load_b)
                pipeline.commit()
                pipeline.advance_write()
            self.multiply(accumulators, mma_k % 2)

    @property
    def _promotes_last_k_tile(self) -> bool:
        """Whether accumulators are promoted after the last K tile as after others."""
        count, interval = self.k_range.tiles_per_split, self.promotion_k_tiles
        return interval == 1 or (interval > 0 and isinstance(count, int) and count % interval == 0)

    def compute(self, accumulators: Buffer, next_tile: WorkTile | None = None, has_next_tile: Expr = False) -> None:
        """Multiply all K tiles as `run` does, and add up the sums of the warps along the reduction."""
        self.run(accumulators, next_tile, has_next_tile)
        if not next_tile:  # the memory of the stages is used for other things from here on
            self.pipeline.drain()
        if self.tiling.warps_k > 1:
            reduce_sliced_k(accumulators, self.tiling, self.smem)

    def load_fragments(self, stage: Expr, mma_k: Expr, fragment_set: int) -> None:
        """Load this warp's operands of one step along K into one of two register sets.

        An `ldmatrix` of four matrices reads 16 rows × 32 bytes: the fragment of A of one mma, or those of B of two.
        """
        self._load_a_fragments(stage, mma_k, fragment_set)
        self._load_b_fragments(stage, mma_k, fragment_set)

    def _load_a_fragments(self, stage: Expr, mma_k: int, fragment_set: int) -> None:
        tiling, lane, atom = self.tiling, self.tiling.thread.lane, self.tiling.atom
        row_bytes, first_chunk = self.a_layout.row_bytes, (tiling.warp_k * tiling.mmas_k + mma_k) * 2
        mask = self.a_layout.swizzle_mask(lane % 8)  # rows of lanes start at multiples of 8
        row, chunk = tiling.first_row + lane % 16, first_chunk + lane // 16
        address = self._stage(stage) + to_uint32(row * row_bytes) + to_uint32((chunk ^ mask) * VECTOR_BYTES)
        with unrolled_loop(tiling.mmas_m, "i") as mma_m:
            ldmatrix_x4(self._a_fragment(fragment_set, mma_m), address + to_uint32(mma_m * (atom.m * row_bytes)))

    def _load_b_fragments(self, stage: Expr, mma_k: int, fragment_set: int) -> None:
        tiling, lane, atom = self.tiling, self.tiling.thread.lane, self.tiling.atom
        row_bytes, first_chunk = self.b_layout.row_bytes, (tiling.warp_k * tiling.mmas_k + mma_k) * 2
        mask = self.b_layout.swizzle_mask(lane % 8)
        row, chunk = tiling.first_column + lane % 8 + lane // 16 * 8, first_chunk + lane // 8 % 2
        address = self._stage(stage) + to_uint32(self.a_layout.nbytes) + to_uint32(row * row_bytes)
        address = address + to_uint32((chunk ^ mask) * VECTOR_BYTES)
        with unrolled_loop(tiling.mmas_n // 2, "j") as pair:
            registers = self._b_fragment(fragment_set, pair * 2, 2)
            ldmatrix_x4(registers, address + to_uint32(pair * (2 * atom.n * row_bytes)))

    def multiply(self, accumulators: Buffer, fragment_set: int) -> None:
        """Multiply the fragments of one of the two register sets."""
        tiling = self.tiling
        with unrolled_loop(tiling.mmas_m, "i") as mma_m, unrolled_loop(tiling.mmas_n, "j") as mma_n:
            a, b = self._a_fragment(fragment_set, mma_m), self._b_fragment(fragment_set, mma_n)
            tiling.multiply(accumulators, mma_m, mma_n, a, b)

    def _stage(self, stage: Expr) -> Expr:
        return self.smem + to_uint32(stage * (self.a_layout.nbytes + self.b_layout.nbytes))

    def _first_k(self, k_tile: Expr) -> Expr:
        return (self.k_range.first + k_tile) * self.block_k

    def _a_fragment(self, fragment_set: int, mma_m: Expr) -> list[Expr]:
        size = self.tiling.atom.a_registers
        return [self.a_fragments[(fragment_set * self.tiling.mmas_m + mma_m) * size + e] for e in range(size)]

    def _b_fragment(self, fragment_set: int, mma_n: Expr, count: int = 1) -> list[Expr]:
        size, first = self.tiling.atom.b_registers, fragment_set * self.tiling.mmas_n
        return [self.b_fragments[(first + mma_n) * size + e] for e in range(size * count)]


def reduce_sliced_k(accumulators: Buffer, tiling: WarpTiling, smem: Expr) -> None:
    """Add the accumulators of the warps along the reduction in the first of these warps, through shared memory."""
    count, threads, term = tiling.num_accumulators, tiling.num_threads // tiling.warps_k, allocate("term", 1, "float32")
    thread_address = smem + to_uint32(tiling.thread.thread % threads * ACCUMULATOR_BYTES)
    row_bytes = threads * ACCUMULATOR_BYTES
    with if_(tiling.warp_k > 0), unrolled_loop(count, "i") as i:
        address = thread_address + to_uint32((tiling.warp_k - 1) * (count * row_bytes))
        emit_ptx("st.shared.b32", address + to_uint32(i * row_bytes), accumulators[i])
    emit_call(T.cuda.cta_sync())
    slices = unrolled_loop(tiling.warps_k - 1, "g"), unrolled_loop(count, "i")
    with if_(tiling.warp_k == 0), slices[0] as k_slice, slices[1] as i:
        emit_ptx("ld.shared.b32", term[0], thread_address + to_uint32((k_slice * count + i) * row_bytes))
        store(accumulators, i, accumulators[i] + term[0])
    emit_call(T.cuda.cta_sync())
