"""Tensor cores for `s_tir.Schedule.tensorize`: what a warp loads, multiplies and stores, as TVM's intrinsics lack it.

TVM has them for float16 and 8-bit numbers. These are of one kind for float16, bfloat16 and TF32: sums of 16 × 16
outputs in float32, and one step of a product, of 32 bytes of depth. What the 32 lanes of a warp hold together is a
buffer of the scope "warp", (lane, register): which lane has which element is a fragment's layout (PTX ISA, "Matrix
Fragments for mma.m16n8k16", "mma.m16n8k8"). TF32 operands are loaded as they are; the tensor cores ignore the bits
that they do not use.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from tvm.s_tir import TensorIntrin
from tvm.script import tirx as T  # noqa: N812

from tvmconv.gpu import WARP

SIDE = 16  # rows and columns of a tile of sums
SUMS = SIDE * SIDE // WARP  # of a lane
DEPTH_BYTES = 32  # of a row of an operand's tile
SHARED, REGISTERS = "shared.dyn", "warp"  # scopes

Index = Any  # an int or an expression
Layout = Callable[[Index, Index], tuple[Index, Index]]  # from a row and a column to a lane and its register

# The shape of one instruction and what PTX calls the operands' type, by element type in memory.
_INSTRUCTIONS = {"float16": ("m16n8k16", "fp16"), "bfloat16": ("m16n8k16", "bf16"), "float32": ("m16n8k8", "tf32")}
_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}


class Intrinsics(NamedTuple):
    """The names of the intrinsics for operands of one type, and their layouts.

    Attributes:
        depth: elements of a row of an operand's tile.
        rows: loads the tile of (row of sums, depth).
        columns: loads the tile of (column of sums, depth).
        clear: sets sums to 0.
        multiply: adds the products of rows with columns.
        multiply_columns: adds the products of columns with rows, written in this order.
        store: moves sums to shared memory.
        rows_layout: where `rows` puts an element.
        columns_layout: where `columns` puts an element.
    """

    depth: int
    rows: str
    columns: str
    clear: str
    multiply: str
    multiply_columns: str
    store: str
    rows_layout: Layout
    columns_layout: Layout


def sums_layout(i: Index, j: Index) -> tuple[Index, Index]:
    """The lane and the register of a sum of a tile."""
    return 4 * (i % 8) + j % 8 // 2, 4 * (j // 8) + i // 8 * 2 + j % 2


def _sum_of(lane: Index, register: Index) -> tuple[Index, Index]:
    """The row and the column of a lane's sum: the inverse of `sums_layout`."""
    return 8 * (register % 4 // 2) + lane // 4, 8 * (register // 4) + lane % 4 * 2 + register % 2


@functools.cache
def intrinsics(dtype: str) -> Intrinsics:
    """Those for operands of an element type in memory, registered with TVM at the first call."""
    element = _BYTES[dtype]
    depth, chunk, word = DEPTH_BYTES // element, DEPTH_BYTES // element // 2, 4 // element

    def rows_layout(i: Index, j: Index) -> tuple[Index, Index]:
        return 4 * (i % 8) + j % chunk // word, word * (2 * (j // chunk) + i // 8) + j % word

    def columns_layout(i: Index, j: Index) -> tuple[Index, Index]:
        return 4 * (i % 8) + j % chunk // word, word * (2 * (i // 8) + j // chunk) + j % word

    # The four 8 × 8 matrices of a load: the next eight rows come second for rows, and third for columns, so that eight
    # columns, which is what an instruction multiplies, are neighbouring registers.
    def row_of(lane: Index, stride: Index) -> Index:
        return lane % 16 * stride + lane // 16 * chunk

    def column_of(lane: Index, stride: Index) -> Index:
        return (lane // 16 * 8 + lane % 8) * stride + lane % 16 // 8 * chunk

    def name(step: str) -> str:
        return f"tvmconv_{step}_{dtype}"

    named = Intrinsics(
        depth=depth,
        rows=name("rows"),
        columns=name("columns"),
        clear=name("clear"),
        multiply=name("multiply"),
        multiply_columns=name("multiply_columns"),
        store=name("store"),
        rows_layout=rows_layout,
        columns_layout=columns_layout,
    )
    TensorIntrin.register(named.rows, *_load(dtype, depth, rows_layout, row_of))
    TensorIntrin.register(named.columns, *_load(dtype, depth, columns_layout, column_of))
    TensorIntrin.register(named.clear, *_clear())
    TensorIntrin.register(named.multiply, *_multiply(dtype, depth, rows_layout, columns_layout))
    TensorIntrin.register(
        named.multiply_columns, *_multiply(dtype, depth, columns_layout, rows_layout, columns_first=True)
    )
    TensorIntrin.register(named.store, *_store())
    return named


def _load(dtype: str, depth: int, layout: Layout, place: Callable[[Index, Index], Index]) -> tuple[Any, Any]:
    """A tile from shared memory to registers, by ldmatrix.

    Args:
        dtype: the element type.
        depth: elements of a row.
        layout: where the elements go.
        place: of a lane, and the distance of two rows: where the row of 16 bytes begins that the lane names.
    """
    held = SIDE * depth // WARP

    # fmt: off
    @T.prim_func(s_tir=True)
    def described(to: T.handle, tile: T.handle) -> None:
        S = T.match_buffer(tile, (SIDE, depth), dtype, align=64, offset_factor=held, scope=SHARED)
        R = T.match_buffer(to, (WARP, held), dtype, align=64, offset_factor=held, scope=REGISTERS)
        with T.sblock("root"):
            T.reads(S[0:SIDE, 0:depth])
            T.writes(R[0:WARP, 0:held])
            for i, j in T.grid(SIDE, depth):
                with T.sblock("load"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    lane, register = T.meta_var(layout(vi, vj))
                    T.reads(S[vi, vj])
                    T.writes(R[lane, register])
                    R[lane, register] = S[vi, vj]

    @T.prim_func(s_tir=True)
    def implemented(to: T.handle, tile: T.handle) -> None:
        row, column = T.int32(), T.int32()
        S = T.match_buffer(
            tile, (SIDE, depth), dtype, align=64, offset_factor=held, scope=SHARED, strides=[row, column]
        )
        R = T.match_buffer(to, (WARP, held), dtype, align=64, offset_factor=held, scope=REGISTERS)
        with T.sblock("root"):
            T.reads(S[0:SIDE, 0:depth])
            T.writes(R[0:WARP, 0:held])
            for lane in T.thread_binding(0, WARP, "threadIdx.x"):
                T.evaluate(
                    T.ptx_legacy.ldmatrix(
                        False, 4, ".b16", R.data, R.elem_offset + held * lane, S.access_ptr("r"), place(lane, row),
                        dtype=dtype,
                    )
                )
    # fmt: on
    return described, implemented


def _clear() -> tuple[Any, Any]:
    """Sums of 0."""

    @T.prim_func(s_tir=True)
    def described(sums: T.handle) -> None:
        C = T.match_buffer(sums, (WARP, SUMS), "float32", align=64, offset_factor=SUMS, scope=REGISTERS)
        with T.sblock("root"):
            T.reads()
            T.writes(C[0:WARP, 0:SUMS])
            for i, j in T.grid(SIDE, SIDE):
                with T.sblock("clear"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    lane, register = T.meta_var(sums_layout(vi, vj))
                    T.reads()
                    T.writes(C[lane, register])
                    C[lane, register] = T.float32(0)

    @T.prim_func(s_tir=True)
    def implemented(sums: T.handle) -> None:
        C = T.match_buffer(sums, (WARP, SUMS), "float32", align=64, offset_factor=SUMS, scope=REGISTERS)
        with T.sblock("root"):
            T.reads()
            T.writes(C[0:WARP, 0:SUMS])
            for lane in T.thread_binding(0, WARP, "threadIdx.x"):
                for register in range(SUMS):
                    C[lane, register] = T.float32(0)

    return described, implemented


def _multiply(dtype: str, depth: int, first: Layout, second: Layout, *, columns_first: bool = False) -> tuple[Any, Any]:
    """The products of 16 rows and 16 columns, by two instructions of 8 columns.

    Args:
        dtype: the element type of the operands.
        depth: elements of a row or column.
        first: the layout of the first factor.
        second: that of the second.
        columns_first: whether the first factor is the columns.
    """
    held = SIDE * depth // WARP
    shape, operand = _INSTRUCTIONS[dtype]

    def widened(value: Any) -> Any:
        return value if dtype == "float32" else T.Cast("float32", value)

    # fmt: off
    @T.prim_func(s_tir=True)
    def described(one: T.handle, other: T.handle, sums: T.handle) -> None:
        A = T.match_buffer(one, (WARP, held), dtype, align=64, offset_factor=held, scope=REGISTERS)
        B = T.match_buffer(other, (WARP, held), dtype, align=64, offset_factor=held, scope=REGISTERS)
        C = T.match_buffer(sums, (WARP, SUMS), "float32", align=64, offset_factor=SUMS, scope=REGISTERS)
        with T.sblock("root"):
            T.reads(C[0:WARP, 0:SUMS], A[0:WARP, 0:held], B[0:WARP, 0:held])
            T.writes(C[0:WARP, 0:SUMS])
            for i, j, k in T.grid(SIDE, SIDE, depth):
                with T.sblock("multiply"):
                    vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                    lane, register = T.meta_var(sums_layout(vi, vj))
                    a_lane, a_register = T.meta_var(first(vj if columns_first else vi, vk))
                    b_lane, b_register = T.meta_var(second(vi if columns_first else vj, vk))
                    T.reads(C[lane, register], A[a_lane, a_register], B[b_lane, b_register])
                    T.writes(C[lane, register])
                    C[lane, register] += widened(A[a_lane, a_register]) * widened(B[b_lane, b_register])

    @T.prim_func(s_tir=True)
    def implemented(one: T.handle, other: T.handle, sums: T.handle) -> None:
        A = T.match_buffer(one, (WARP, held), dtype, align=64, offset_factor=held, scope=REGISTERS)
        B = T.match_buffer(other, (WARP, held), dtype, align=64, offset_factor=held, scope=REGISTERS)
        C = T.match_buffer(sums, (WARP, SUMS), "float32", align=64, offset_factor=SUMS, scope=REGISTERS)
        with T.sblock("root"):
            T.reads(C[0:WARP, 0:SUMS], A[0:WARP, 0:held], B[0:WARP, 0:held])
            T.writes(C[0:WARP, 0:SUMS])
            rows, columns = T.meta_var((B, A) if columns_first else (A, B))
            for lane in T.thread_binding(0, WARP, "threadIdx.x"):
                for half in range(2):
                    T.evaluate(
                        T.ptx_legacy.mma(
                            shape, "row", "col", operand, operand, "fp32",
                            rows.data, rows.elem_offset + lane * held,
                            columns.data, columns.elem_offset + lane * held + half * (held // 2),
                            C.data, C.elem_offset + lane * SUMS + half * (SUMS // 2),
                            False, dtype="float32",
                        )
                    )
    # fmt: on
    return described, implemented


def _store() -> tuple[Any, Any]:
    """Sums from registers to shared memory."""

    @T.prim_func(s_tir=True)
    def described(sums: T.handle, tile: T.handle) -> None:
        C = T.match_buffer(sums, (WARP, SUMS), "float32", align=64, offset_factor=SUMS, scope=REGISTERS)
        S = T.match_buffer(tile, (SIDE, SIDE), "float32", align=64, offset_factor=1, scope=SHARED)
        with T.sblock("root"):
            T.reads(C[0:WARP, 0:SUMS])
            T.writes(S[0:SIDE, 0:SIDE])
            for i, j in T.grid(SIDE, SIDE):
                with T.sblock("store"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    lane, register = T.meta_var(sums_layout(vi, vj))
                    T.reads(C[lane, register])
                    T.writes(S[vi, vj])
                    S[vi, vj] = C[lane, register]

    @T.prim_func(s_tir=True)
    def implemented(sums: T.handle, tile: T.handle) -> None:
        row, column = T.int32(), T.int32()
        C = T.match_buffer(sums, (WARP, SUMS), "float32", align=64, offset_factor=SUMS, scope=REGISTERS)
        S = T.match_buffer(
            tile, (SIDE, SIDE), "float32", align=64, offset_factor=1, scope=SHARED, strides=[row, column]
        )
        with T.sblock("root"):
            T.reads(C[0:WARP, 0:SUMS])
            T.writes(S[0:SIDE, 0:SIDE])
            for lane in T.thread_binding(0, WARP, "threadIdx.x"):
                for pair in range(SUMS // 2):
                    for one in T.vectorized(2):
                        i, j = T.meta_var(_sum_of(lane, 2 * pair))
                        S[i, j + one] = C[lane, 2 * pair + one]

    return described, implemented
