"""Matrix instructions of tensor cores, and the loads and stores of their fragments.

An atom computes D[m, n] = A[m, k] B[n, k] + D with accumulators in float32, or in int32 for integers. Sources: PTX ISA,
"wgmma.mma_async", "mma.sync", "ldmatrix", "stmatrix"; CUTLASS, `include/cute/atom/mma_traits_sm80.hpp` and
`mma_traits_sm90_gmma.hpp`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import ClassVar

from tvm.backend.cuda.ptx import PTXNamespace, register_table
from tvm.backend.cuda.ptx.table import TABLE
from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.target import WARP_SIZE, WARPGROUP_SIZE
from tvmconv.workloads.dtypes import DTYPES

from ....tir_builder import Expr, emit_call, emit_ptx, if_


class Major(IntEnum):
    """Mode of an operand that is contiguous in shared memory; the values are those of wgmma's transpose immediates."""

    K = 0
    MN = 1


ALL_LANES = 0xFFFFFFFF  # mask of the lanes of a warp
MAX_TABULATED_INTEGER_N = 224  # TVM 0.27's table of wgmma for integers ends there, and the PTX ISA's at 256


@functools.cache
def _get_wide_integer_ptx() -> PTXNamespace:
    """Return wgmma for integers with N of 240 and 256, which TVM's table lacks."""
    name = "wgmma_int_ss"
    entry = TABLE[name]
    shapes = tuple(f"m64n{n}k32" for n in (240, 256))
    slots = tuple(replace(slot, choices=shapes) if slot.name == "shape" else slot for slot in entry.slots)
    table = {f"{name}_wide": replace(entry, name=f"{name}_wide", slots=slots)}
    register_table(table)
    return PTXNamespace(table)


@dataclass(frozen=True)
class WgmmaAtom:
    """The warpgroup instruction wgmma.mma_async.m64nNkK, with both operands in shared memory.

    The form for integers has no signs of A and B, and N is 8, 24 or a multiple of 16.
    """

    n: int  # columns of D: a multiple of 8, at most 256
    a_dtype: str
    b_dtype: str
    a_major: Major = Major.K  # Contiguous mode of A. Only 16-bit operands may be MN-major.
    b_major: Major = Major.K  # contiguous mode of B
    m: ClassVar[int] = 64
    k_bytes: ClassVar[int] = 32  # bytes of the reduction, for every dtype

    @property
    def itemsize(self) -> int:
        """Bytes per element of an operand in shared memory."""
        return DTYPES[self.a_dtype].itemsize

    @property
    def k(self) -> int:
        """Elements of the reduction."""
        return self.k_bytes // self.itemsize

    @property
    def num_accumulators(self) -> int:
        """Accumulator registers per thread."""
        return self.m * self.n // WARPGROUP_SIZE

    @property
    def accumulator_dtype(self) -> str:
        """Type of the accumulators."""
        return DTYPES[self.a_dtype].accumulator

    def emit(self, accumulators: Sequence[Expr], a_descriptor: Expr, b_descriptor: Expr, scale_d: Expr) -> None:
        """Issue the instruction: D = A B + D, or D = A B where `scale_d` is false."""
        types = f"{DTYPES[self.a_dtype].ptx}.{DTYPES[self.b_dtype].ptx}"
        majors = (int(self.a_major), int(self.b_major)) if self.itemsize == 2 else ()
        mnemonic = f"wgmma.mma_async.sync.aligned.m{self.m}n{self.n}k{self.k}"
        if self.accumulator_dtype == "int32":
            instructions = T.ptx if self.n <= MAX_TABULATED_INTEGER_N else _get_wide_integer_ptx()
            instruction = instructions[f"{mnemonic}.s32.{types}"]
            emit_call(instruction(*accumulators, a_descriptor, b_descriptor, scale_d))
            return
        # 1: not negated
        emit_ptx(f"{mnemonic}.f32.{types}", *accumulators, a_descriptor, b_descriptor, scale_d, 1, 1, *majors)


@dataclass(frozen=True)
class MmaSyncAtom:
    """The warp instruction mma.sync m16n8k32 of 8-bit operands, m16n8k16 of 16-bit ones, or m16n8k8 of TF32."""

    a_dtype: str
    b_dtype: str
    m: ClassVar[int] = 16
    n: ClassVar[int] = 8
    k_bytes: ClassVar[int] = 32  # bytes of the reduction
    num_accumulators: ClassVar[int] = 4  # registers per lane of D, and of the fragments of A and B
    a_registers: ClassVar[int] = 4
    b_registers: ClassVar[int] = 2

    @property
    def itemsize(self) -> int:
        """Bytes per element of an operand in shared memory."""
        return DTYPES[self.a_dtype].itemsize

    def emit(self, accumulators: Sequence[Expr], a_fragment: Sequence[Expr], b_fragment: Sequence[Expr]) -> None:
        """Issue the instruction D = A B + D; with the first halves of both fragments, the reduction is half as long."""
        a, b = DTYPES[self.a_dtype], DTYPES[self.b_dtype]
        sums = "s32" if self.accumulator_dtype == "int32" else "f32"
        k_bytes = self.k_bytes * len(b_fragment) // self.b_registers
        shape = f"m{self.m}n{self.n}k{k_bytes // a.itemsize}"
        mnemonic = f"mma.sync.aligned.{shape}.row.col.{sums}.{a.ptx}.{b.ptx}.{sums}"
        emit_ptx(mnemonic, *accumulators, *a_fragment, *b_fragment, *accumulators)

    @property
    def accumulator_dtype(self) -> str:
        """Type of the accumulators."""
        return DTYPES[self.a_dtype].accumulator


@contextmanager
def elect_thread() -> Iterator[None]:
    """Open what one thread of a warp runs, whose threads are all active.

    Where ptxas does not know that one thread is active, it wraps each copy of TMA in a loop over the active threads,
    which takes more than a hundred cycles. It knows this of a thread that `elect.sync` selects.
    """
    with if_(T.cuda.elect_sync() != T.uint32(0)):
        yield


@dataclass(frozen=True)
class ThreadPosition:
    """Position of a thread in its CTA."""

    thread: Expr  # index of the thread in the CTA

    @property
    def lane(self) -> Expr:
        """Index of the thread in its warp."""
        return self.thread % WARP_SIZE

    @property
    def warp(self) -> Expr:
        """Index of the warp in the CTA."""
        return self.thread // WARP_SIZE

    @contextmanager
    def elect_in_warp(self, warp: int) -> Iterator[None]:
        """Open what one thread of a warp runs; see `elect_thread`."""
        with if_(self.warp == warp), elect_thread():
            yield

    @property
    def warpgroup(self) -> Expr:
        """Index of the warpgroup in the CTA."""
        return self.thread // WARPGROUP_SIZE

    @property
    def warpgroup_thread(self) -> Expr:
        """Index of the thread in its warpgroup."""
        return self.thread % WARPGROUP_SIZE

    @property
    def is_warpgroup_leader(self) -> Expr:
        """Whether the thread is the first of its warpgroup."""
        return self.warpgroup_thread == 0


def ldmatrix_x4(registers: Sequence[Expr], address: Expr, *, transposed: bool = False) -> None:
    """Load four 8 × 8 matrices of 16 bits; lane i passes the address of row i % 8 of matrix i / 8."""
    emit_ptx(f"ldmatrix.sync.aligned.m8n8.x4{'.trans' if transposed else ''}.shared.b16", *registers, address)


def ldmatrix_x2(registers: Sequence[Expr], address: Expr) -> None:
    """Load two 8 × 8 matrices of 16 bits; lane i < 16 passes the address of row i % 8 of matrix i / 8."""
    emit_ptx("ldmatrix.sync.aligned.m8n8.x2.shared.b16", *registers, address)


def stmatrix_x4(address: Expr, registers: Sequence[Expr], *, transposed: bool = False) -> None:
    """Store four 8 × 8 matrices of 16 bits; the counterpart of `ldmatrix_x4`."""
    emit_ptx(f"stmatrix.sync.aligned.m8n8.x4{'.trans' if transposed else ''}.shared.b16", address, *registers)


def wgmma_fence() -> None:
    """Order earlier accesses to the accumulators before the following wgmmas (cute::warpgroup_arrive)."""
    emit_call(T.ptx.wgmma.fence.sync.aligned())


def wgmma_commit_group() -> None:
    """Commit the wgmmas issued so far as one group (cute::warpgroup_commit_batch)."""
    emit_call(T.ptx.wgmma.commit_group.sync.aligned())


def wgmma_wait_group(pending: int) -> None:
    """Wait until at most `pending` groups are in flight (cute::warpgroup_wait)."""
    emit_call(T.ptx.wgmma.wait_group.sync.aligned(pending))


def setmaxnreg(direction: str, registers: int) -> None:
    """Change the registers per thread of a warpgroup, "inc" or "dec"; run by all of its threads.

    ptxas ignores the instruction unless the number of CTAs per SM is known from the launch bounds.
    """
    emit_ptx(f"setmaxnreg.{direction}.sync.aligned.u32", registers)


def sync_warp() -> None:
    """Synchronize the lanes of a warp, which then see each other's stores to shared memory."""
    emit_ptx("bar.warp.sync", T.uint32(ALL_LANES))


def add_across_lanes(value: Expr, distance: int) -> Expr:
    """Return the sum of a float32 value and that of the lane whose index differs by one bit."""
    return value + T.tvm_warp_shuffle_xor(T.uint32(ALL_LANES), value, distance, WARP_SIZE, WARP_SIZE)


def named_barrier_sync(barrier: Expr, num_threads: int) -> None:
    """Synchronize `num_threads` threads by a named barrier; barrier 0 is that of the whole CTA."""
    emit_ptx("bar.sync", T.uint32(barrier), T.uint32(num_threads))
