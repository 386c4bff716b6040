"""Mainloops of float32 on the FMA units, in the place of mma.sync: cp.async fills stages, lanes load and multiply.

The lanes of a warp hold its sums as those of mma.sync, so that the same epilogues store them.

Source: CUTLASS, `include/cutlass/gemm/warp/mma_simt.h`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from ....tir_builder import Buffer, Expr, emit_ptx, if_, serial_loop, store, to_uint32, unrolled_loop
from ..implicit_gemm_shape import ACCUMULATOR_BYTES
from .mma_sync_mainloop import MmaSyncMainloop, WarpTiling
from .smem_layout import CHUNK_BYTES, SmemLayout
from .tile_scheduler import WorkTile

PAIR_BYTES = 2 * ACCUMULATOR_BYTES  # bytes that a lane loads at once
MAX_UNROLLED_FMAS = 768  # multiply-adds of a thread that are unrolled


@dataclass(frozen=True)
class FmaAtom:
    """Multiply-adds of a warp for 16 × 8 sums and one element of the reduction."""

    m: ClassVar[int] = 16
    n: ClassVar[int] = 8
    k_bytes: ClassVar[int] = ACCUMULATOR_BYTES  # bytes of the reduction
    itemsize: ClassVar[int] = ACCUMULATOR_BYTES
    num_accumulators: ClassVar[int] = 4  # registers per lane of the sums, and of the fragments of A and B
    a_registers: ClassVar[int] = 2
    b_registers: ClassVar[int] = 2
    accumulator_dtype: ClassVar[str] = "float32"


@dataclass(frozen=True)
class FmaPairAtom(FmaAtom):
    """Multiply-adds of a warp for 16 × 8 sums and two neighbouring elements of the reduction."""

    k_bytes: ClassVar[int] = PAIR_BYTES
    a_registers: ClassVar[int] = 4
    b_registers: ClassVar[int] = 4


@dataclass(frozen=True)
class FmaTiling(WarpTiling):
    """Division of a CTA's tile among warps, whose lanes load four neighbouring rows or columns of two atoms at once.

    If a warp has an odd number of atoms, they are the two of one atom.
    """

    @property
    def joined_rows(self) -> int:
        """Atoms whose rows in a lane are neighbours."""
        return 2 if self.mmas_m % 2 == 0 else 1

    @property
    def joined_columns(self) -> int:
        """Atoms whose columns in a lane are neighbours."""
        return 2 if self.mmas_n % 2 == 0 else 1

    @property
    def lane_row(self) -> Expr:
        """First row of this lane in the tile."""
        return self.first_row + self.thread.lane // 4 * (2 * self.joined_rows)

    @property
    def lane_column(self) -> Expr:
        """First column of this lane in the tile."""
        return self.first_column + self.thread.lane % 4 * (2 * self.joined_columns)

    def row(self, tile: WorkTile, mma_m: Expr, half: Expr) -> Expr:
        """Return the row of this lane's accumulators in a half of an atom."""
        joined = self.joined_rows
        return tile.m + self.lane_row + mma_m // joined * (joined * self.atom.m) + mma_m % joined * 2 + half

    def column(self, tile: WorkTile, mma_n: Expr) -> Expr:
        """Return the first of two neighbouring columns of this lane's accumulators of an atom."""
        joined = self.joined_columns
        return tile.n + self.lane_column + mma_n // joined * (joined * self.atom.n) + mma_n % joined * 2


@dataclass(frozen=True)
class PlainLayout(SmemLayout):
    """A tile without a swizzle: the lanes of a warp read one row at a time."""

    def swizzle_mask(self, row: Expr) -> Expr:
        """Return zero."""
        return 0


@dataclass(frozen=True)
class FmaMainloop(MmaSyncMainloop):
    """The mainloop of operands whose rows in shared memory are K.

    A lane loads neighbouring rows of the product, and neighbouring columns, from a row of shared memory.
    """

    def multiply_k_tile(self, accumulators: Buffer, prefetch: Callable[[Callable[[Expr, Expr], None]], None]) -> None:
        """Multiply a K tile by a loop over some of its steps if many multiply-adds would take seconds to compile."""
        pipeline, num_steps = self.pipeline, self._count_unrolled_steps()
        rounds = self.tiling.mmas_k // num_steps
        if rounds == 1:
            super().multiply_k_tile(accumulators, prefetch)
            return
        for load in (self.load_a, self.load_b):
            prefetch(load)
        pipeline.commit()
        pipeline.advance_write()
        with serial_loop(rounds, "round") as index:
            for step in range(num_steps):
                next_step = index * num_steps + step + 1
                if step == num_steps - 1:
                    with if_(index == rounds - 1):
                        pipeline.advance_read()
                        pipeline.wait()
                    next_step = T.Select(index == rounds - 1, 0, next_step)
                self.load_fragments(pipeline.read_index, next_step, (step + 1) % 2)
                self.multiply(accumulators, step % 2)

    def _count_unrolled_steps(self) -> int:
        """Return the steps of a K tile that are unrolled: all of them, or an even number that divides them."""
        steps = self.tiling.mmas_k
        fmas_per_step = self.tiling.num_accumulators * self.tiling.atom.a_registers // 2
        while steps % 4 == 0 and steps * fmas_per_step > MAX_UNROLLED_FMAS:
            steps //= 2
        return steps

    def _load_a_fragments(self, stage: Expr, mma_k: Expr, fragment_set: int) -> None:
        tiling, layout = self._fma_tiling, self.a_layout
        offset = tiling.lane_row * ACCUMULATOR_BYTES + mma_k * layout.row_bytes
        for i in range(0, tiling.mmas_m, tiling.joined_rows):
            registers = [e for each in range(tiling.joined_rows) for e in self._a_fragment(fragment_set, i + each)]
            address = self._stage(stage) + to_uint32(offset + i * (tiling.atom.m * ACCUMULATOR_BYTES))
            emit_ptx(f"ld.shared.v{len(registers)}.b32", *registers, address)

    def _load_b_fragments(self, stage: Expr, mma_k: Expr, fragment_set: int) -> None:
        tiling, layout = self._fma_tiling, self.b_layout
        offset = tiling.lane_column * ACCUMULATOR_BYTES + self.a_layout.nbytes + mma_k * layout.row_bytes
        for j in range(0, tiling.mmas_n, tiling.joined_columns):
            registers = [e for each in range(tiling.joined_columns) for e in self._b_fragment(fragment_set, j + each)]
            address = self._stage(stage) + to_uint32(offset + j * (tiling.atom.n * ACCUMULATOR_BYTES))
            emit_ptx(f"ld.shared.v{len(registers)}.b32", *registers, address)

    @property
    def _fma_tiling(self) -> FmaTiling:
        assert isinstance(self.tiling, FmaTiling)
        return self.tiling

    def multiply(self, accumulators: Buffer, fragment_set: int) -> None:
        """Multiply the fragments of one of the two register sets."""
        tiling = self.tiling
        count = tiling.atom.a_registers // 2  # elements of the reduction of a row or a column
        with unrolled_loop(tiling.mmas_m, "i") as i, unrolled_loop(tiling.mmas_n, "j") as j:
            a, b = self._a_fragment(fragment_set, i), self._b_fragment(fragment_set, j)
            for k in range(count):
                for half in range(2):
                    for e in range(2):
                        index = tiling.accumulator(i, j, half) + e
                        store(accumulators, index, accumulators[index] + a[half * count + k] * b[e * count + k])


@dataclass(frozen=True)
class KMajorFmaMainloop(FmaMainloop):
    """The mainloop of operands whose reduction is contiguous: a lane loads pairs of elements of its rows and columns.

    Lanes of half a warp read four rows, which the swizzle of the copies keeps free of bank conflicts.
    """

    def _load_a_fragments(self, stage: Expr, mma_k: Expr, fragment_set: int) -> None:
        tiling = self.tiling
        with unrolled_loop(tiling.mmas_m, "i") as i:
            registers = self._a_fragment(fragment_set, i)
            for half in range(2):
                row = tiling.first_row + i * tiling.atom.m + half * 8 + tiling.thread.lane // 4
                address = self._stage(stage) + self._locate_pair(self.a_layout, row, mma_k)
                emit_ptx("ld.shared.v2.b32", *registers[2 * half : 2 * half + 2], address)

    def _load_b_fragments(self, stage: Expr, mma_k: Expr, fragment_set: int) -> None:
        tiling, offset = self.tiling, to_uint32(self.a_layout.nbytes)
        with unrolled_loop(tiling.mmas_n, "j") as j:
            registers = self._b_fragment(fragment_set, j)
            for e in range(2):
                row = tiling.first_column + j * tiling.atom.n + tiling.thread.lane % 4 * 2 + e
                address = self._stage(stage) + offset + self._locate_pair(self.b_layout, row, mma_k)
                emit_ptx("ld.shared.v2.b32", *registers[2 * e : 2 * e + 2], address)

    def _locate_pair(self, layout: SmemLayout, row: Expr, mma_k: Expr) -> Expr:
        """Return the offset of two elements of a row, of this warp's part of the reduction."""
        first_byte = (self.tiling.warp_k * self.tiling.mmas_k + mma_k) * PAIR_BYTES
        chunk, rest = first_byte // CHUNK_BYTES, first_byte % CHUNK_BYTES
        return layout.swizzled_offset(row, chunk) + to_uint32(rest)
