"""Mainloops of float32 on the FMA units, in the place of mma.sync: cp.async fills stages, lanes load and multiply.

The lanes of a warp hold its sums as those of mma.sync, so that the same epilogues store them.

Source: CUTLASS, `include/cutlass/gemm/warp/mma_simt.h`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ....tir_builder import Buffer, Expr, emit_ptx, store, to_uint32, unrolled_loop
from ..implicit_gemm_shape import ACCUMULATOR_BYTES
from .mma_sync_mainloop import MmaSyncMainloop
from .smem_layout import CHUNK_BYTES, SmemLayout

PAIR_BYTES = 2 * ACCUMULATOR_BYTES  # bytes that a lane loads at once


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
class PlainLayout(SmemLayout):
    """A tile without a swizzle: the lanes of a warp read one row at a time."""

    def swizzle_mask(self, row: Expr) -> Expr:
        """Return zero."""
        return 0


@dataclass(frozen=True)
class FmaMainloop(MmaSyncMainloop):
    """The mainloop of operands whose rows in shared memory are K; the tiling has row pairs.

    A lane loads pairs of neighbouring rows of the product, and of neighbouring columns, from a row of shared memory.
    """

    def _load_a_fragments(self, stage: Expr, mma_k: int, fragment_set: int) -> None:
        tiling, layout = self.tiling, self.a_layout
        column = tiling.first_row + tiling.thread.lane // 4 * 2
        address = self._stage(stage) + to_uint32(column * ACCUMULATOR_BYTES) + to_uint32(mma_k * layout.row_bytes)
        with unrolled_loop(tiling.mmas_m, "i") as i:
            pair = self._a_fragment(fragment_set, i)
            emit_ptx("ld.shared.v2.b32", *pair, address + to_uint32(i * (tiling.atom.m * ACCUMULATOR_BYTES)))

    def _load_b_fragments(self, stage: Expr, mma_k: int, fragment_set: int) -> None:
        tiling, layout = self.tiling, self.b_layout
        column = tiling.first_column + tiling.thread.lane % 4 * 2
        offset = self.a_layout.nbytes + mma_k * layout.row_bytes
        address = self._stage(stage) + to_uint32(column * ACCUMULATOR_BYTES) + to_uint32(offset)
        with unrolled_loop(tiling.mmas_n, "j") as j:
            pair = self._b_fragment(fragment_set, j)
            emit_ptx("ld.shared.v2.b32", *pair, address + to_uint32(j * (tiling.atom.n * ACCUMULATOR_BYTES)))

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

    def _load_a_fragments(self, stage: Expr, mma_k: int, fragment_set: int) -> None:
        tiling = self.tiling
        with unrolled_loop(tiling.mmas_m, "i") as i:
            registers = self._a_fragment(fragment_set, i)
            for half in range(2):
                row = tiling.first_row + i * tiling.atom.m + half * 8 + tiling.thread.lane // 4
                address = self._stage(stage) + self._locate_pair(self.a_layout, row, mma_k)
                emit_ptx("ld.shared.v2.b32", *registers[2 * half : 2 * half + 2], address)

    def _load_b_fragments(self, stage: Expr, mma_k: int, fragment_set: int) -> None:
        tiling, offset = self.tiling, to_uint32(self.a_layout.nbytes)
        with unrolled_loop(tiling.mmas_n, "j") as j:
            registers = self._b_fragment(fragment_set, j)
            for e in range(2):
                row = tiling.first_column + j * tiling.atom.n + tiling.thread.lane % 4 * 2 + e
                address = self._stage(stage) + offset + self._locate_pair(self.b_layout, row, mma_k)
                emit_ptx("ld.shared.v2.b32", *registers[2 * e : 2 * e + 2], address)

    def _locate_pair(self, layout: SmemLayout, row: Expr, mma_k: int) -> Expr:
        """Return the offset of two elements of a row, of this warp's part of the reduction."""
        first_byte = (self.tiling.warp_k * self.tiling.mmas_k + mma_k) * PAIR_BYTES
        chunk, rest = first_byte // CHUNK_BYTES, first_byte % CHUNK_BYTES
        return layout.swizzled_offset(row, chunk) + to_uint32(rest)
