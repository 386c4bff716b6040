"""Tensor-core intrinsics for `s_tir.Schedule.tensorize`: loads, products and stores of a warp that TVM lacks.

TVM provides them for float16 and 8-bit integers. These intrinsics treat float16, bfloat16 and TF32 alike: 16 × 16
accumulators in float32, and products of 32 bytes of depth. The registers of a warp's 32 lanes are a buffer of the scope
"warp", indexed (lane, register); a fragment layout maps an element to its lane and register (PTX ISA, "Matrix Fragments
for mma.m16n8k16", "mma.m16n8k8"). TF32 operands are loaded unchanged, because tensor cores ignore the low bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tvm.s_tir import TensorIntrin
from tvm.script import tirx as T  # noqa: N812

from tvmconv.target import WARP_SIZE

from ... import tvm_script

TILE_SIZE = 16  # rows and columns of a tile of accumulators
LANE_ACCUMS = TILE_SIZE * TILE_SIZE // WARP_SIZE  # accumulators of a tile per lane
MMA_K_BYTES = 32  # bytes of a row of an operand's tile
SHARED_SCOPE, WARP_SCOPE = "shared.dyn", "warp"

Index = Any  # an int or an expression
FragmentLayout = Callable[[Index, Index], tuple[Index, Index]]  # from (row, column) to (lane, register)

# Instruction shape and PTX name of the operand type, by element dtype in memory.
_INSTRUCTIONS = {"float16": ("m16n8k16", "fp16"), "bfloat16": ("m16n8k16", "bf16"), "float32": ("m16n8k8", "tf32")}
_ELEMENT_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}


class TensorIntrinsics(NamedTuple):
    """Names and fragment layouts of the intrinsics for operands of one dtype."""

    mma_k: int  # number of elements in a row of an operand's tile
    rows: str  # intrinsic that loads a tile of the left operand (row, depth)
    columns: str  # intrinsic that loads a tile of the right operand (column, depth)
    clear: str  # intrinsic that sets accumulators to 0
    multiply: str  # intrinsic that accumulates rows × columns
    multiply_columns: str  # intrinsic that accumulates columns × rows, in this order of the operands
    store: str  # intrinsic that stores accumulators to shared memory
    rows_layout: FragmentLayout
    columns_layout: FragmentLayout


def accumulator_layout(i: Index, j: Index) -> tuple[Index, Index]:
    """Return the lane and the register of an accumulator at (i, j) of its tile."""
    return 4 * (i % 8) + j % 8 // 2, 4 * (j // 8) + i // 8 * 2 + j % 2


def _accumulator_position(lane: Index, register: Index) -> tuple[Index, Index]:
    """Return the row and the column of a lane's accumulator: the inverse of `accumulator_layout`."""
    return 8 * (register % 4 // 2) + lane // 4, 8 * (register // 4) + lane % 4 * 2 + register % 2


@functools.cache
def register_intrinsics(dtype: str) -> TensorIntrinsics:
    """Return the intrinsics for operands of an element dtype; the first call registers them with TVM."""
    element_bytes = _ELEMENT_BYTES[dtype]
    depth, chunk, word = MMA_K_BYTES // element_bytes, MMA_K_BYTES // element_bytes // 2, 4 // element_bytes

    def rows_layout(i: Index, j: Index) -> tuple[Index, Index]:
        return 4 * (i % 8) + j % chunk // word, word * (2 * (j // chunk) + i // 8) + j % word

    def columns_layout(i: Index, j: Index) -> tuple[Index, Index]:
        return 4 * (i % 8) + j % chunk // word, word * (2 * (i // 8) + j // chunk) + j % word

    # ldmatrix loads four 8 × 8 matrices. The second one holds the next eight rows of the left operand; for the right
    # operand these come third, so that the eight columns of one instruction lie in neighbouring registers.
    def row_address(lane: Index, stride: Index) -> Index:
        return lane % 16 * stride + lane // 16 * chunk

    def column_address(lane: Index, stride: Index) -> Index:
        return (lane // 16 * 8 + lane % 8) * stride + lane % 16 // 8 * chunk

    def make_name(operation: str) -> str:
        return f"tvmconv_{operation}_{dtype}"

    registered = TensorIntrinsics(
        mma_k=depth,
        rows=make_name("rows"),
        columns=make_name("columns"),
        clear=make_name("clear"),
        multiply=make_name("multiply"),
        multiply_columns=make_name("multiply_columns"),
        store=make_name("store"),
        rows_layout=rows_layout,
        columns_layout=columns_layout,
    )
    TensorIntrin.register(registered.rows, *_make_load_intrinsic(dtype, depth, rows_layout, row_address))
    TensorIntrin.register(registered.columns, *_make_load_intrinsic(dtype, depth, columns_layout, column_address))
    TensorIntrin.register(registered.clear, *_make_clear_intrinsic())
    TensorIntrin.register(registered.multiply, *_make_multiply_intrinsic(dtype, depth, rows_layout, columns_layout))
    TensorIntrin.register(
        registered.multiply_columns,
        *_make_multiply_intrinsic(dtype, depth, columns_layout, rows_layout, columns_first=True),
    )
    TensorIntrin.register(registered.store, *_make_store_intrinsic())
    return registered


def _match_registers(handle: Any, dtype: str, count: int) -> Any:
    """Declare the registers of a warp, `count` per lane, as a parameter of an intrinsic."""
    return T.match_buffer(handle, (WARP_SIZE, count), dtype, align=64, offset_factor=count, scope=WARP_SCOPE)


def _match_accumulators(handle: Any) -> Any:
    """Declare a tile of accumulators as a parameter of an intrinsic."""
    return _match_registers(handle, "float32", LANE_ACCUMS)


def _access(reads: Sequence[Any], writes: Any) -> None:
    """Declare that a block reads and writes whole buffers of two axes."""
    T.reads(*(buffer[0 : buffer.shape[0], 0 : buffer.shape[1]] for buffer in reads))
    T.writes(writes[0 : writes.shape[0], 0 : writes.shape[1]])


def _make_load_intrinsic(
    dtype: str, depth: int, layout: FragmentLayout, row_address: Callable[[Index, Index], Index]
) -> tuple[Any, Any]:
    """Return the description and the implementation of a tile load from shared memory to registers by ldmatrix.

    Args:
        dtype: Element dtype.
        depth: Elements per row.
        layout: Fragment layout of the loaded elements.
        row_address: Function from the lane and the row stride to the offset of the 16-byte row that the lane addresses.
    """
    frag_size = TILE_SIZE * depth // WARP_SIZE
    tile_options = {"align": 64, "offset_factor": frag_size, "scope": SHARED_SCOPE}

    @tvm_script.prim_func(s_tir=True)
    def described(fragment: T.handle, tile: T.handle) -> None:
        S = T.match_buffer(tile, (TILE_SIZE, depth), dtype, **tile_options)
        R = _match_registers(fragment, dtype, frag_size)
        with T.sblock("root"):
            _access([S], R)
            for i, j in T.grid(TILE_SIZE, depth):
                with T.sblock("load"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    lane, register = T.meta_var(layout(vi, vj))
                    T.reads(S[vi, vj])
                    T.writes(R[lane, register])
                    R[lane, register] = S[vi, vj]

    @tvm_script.prim_func(s_tir=True)
    def implemented(fragment: T.handle, tile: T.handle) -> None:
        row, column = T.int32(), T.int32()
        S = T.match_buffer(tile, (TILE_SIZE, depth), dtype, strides=[row, column], **tile_options)
        R = _match_registers(fragment, dtype, frag_size)
        with T.sblock("root"):
            _access([S], R)
            for lane in T.thread_binding(0, WARP_SIZE, "threadIdx.x"):
                destination = T.meta_var((R.data, R.elem_offset + frag_size * lane))
                source = T.meta_var((S.access_ptr("r"), row_address(lane, row)))
                T.evaluate(T.ptx_legacy.ldmatrix(False, 4, ".b16", *destination, *source, dtype=dtype))

    return described, implemented


def _make_clear_intrinsic() -> tuple[Any, Any]:
    """Return the description and the implementation of setting accumulators to 0."""

    @tvm_script.prim_func(s_tir=True)
    def described(sums: T.handle) -> None:
        C = _match_accumulators(sums)
        with T.sblock("root"):
            _access([], C)
            for i, j in T.grid(TILE_SIZE, TILE_SIZE):
                with T.sblock("clear"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    lane, register = T.meta_var(accumulator_layout(vi, vj))
                    T.reads()
                    T.writes(C[lane, register])
                    C[lane, register] = T.float32(0)

    @tvm_script.prim_func(s_tir=True)
    def implemented(sums: T.handle) -> None:
        C = _match_accumulators(sums)
        with T.sblock("root"):
            _access([], C)
            for lane in T.thread_binding(0, WARP_SIZE, "threadIdx.x"):
                for register in range(LANE_ACCUMS):
                    C[lane, register] = T.float32(0)

    return described, implemented


def _make_multiply_intrinsic(
    dtype: str, depth: int, first_layout: FragmentLayout, second_layout: FragmentLayout, *, columns_first: bool = False
) -> tuple[Any, Any]:
    """Return the description and the implementation of a 16 × 16 product by two instructions of 8 columns.

    Args:
        dtype: Element dtype of the operands.
        depth: Elements per row or column.
        first_layout: Fragment layout of the first operand.
        second_layout: Fragment layout of the second operand.
        columns_first: Whether the first operand holds the columns.
    """
    frag_size = TILE_SIZE * depth // WARP_SIZE
    shape, operand = _INSTRUCTIONS[dtype]

    def widen_to_float32(value: Any) -> Any:
        return value if dtype == "float32" else T.Cast("float32", value)

    @tvm_script.prim_func(s_tir=True)
    def described(one: T.handle, other: T.handle, sums: T.handle) -> None:
        A, B = _match_registers(one, dtype, frag_size), _match_registers(other, dtype, frag_size)
        C = _match_accumulators(sums)
        with T.sblock("root"):
            _access([C, A, B], C)
            for i, j, k in T.grid(TILE_SIZE, TILE_SIZE, depth):
                with T.sblock("multiply"):
                    vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                    lane, register = T.meta_var(accumulator_layout(vi, vj))
                    a_lane, a_register = T.meta_var(first_layout(vj if columns_first else vi, vk))
                    b_lane, b_register = T.meta_var(second_layout(vi if columns_first else vj, vk))
                    T.reads(C[lane, register], A[a_lane, a_register], B[b_lane, b_register])
                    T.writes(C[lane, register])
                    C[lane, register] += widen_to_float32(A[a_lane, a_register]) * widen_to_float32(
                        B[b_lane, b_register]
                    )

    @tvm_script.prim_func(s_tir=True)
    def implemented(one: T.handle, other: T.handle, sums: T.handle) -> None:
        A, B = _match_registers(one, dtype, frag_size), _match_registers(other, dtype, frag_size)
        C = _match_accumulators(sums)
        with T.sblock("root"):
            _access([C, A, B], C)
            rows, columns = T.meta_var((B, A) if columns_first else (A, B))
            for lane in T.thread_binding(0, WARP_SIZE, "threadIdx.x"):
                for half in range(2):
                    mma_rows = T.meta_var((rows.data, rows.elem_offset + lane * frag_size))
                    first_column = T.meta_var(lane * frag_size + half * (frag_size // 2))
                    mma_columns = T.meta_var((columns.data, columns.elem_offset + first_column))
                    mma_sums = T.meta_var((C.data, C.elem_offset + lane * LANE_ACCUMS + half * (LANE_ACCUMS // 2)))
                    dtypes = T.meta_var((operand, operand, "fp32"))
                    T.evaluate(
                        T.ptx_legacy.mma(
                            *(shape, "row", "col", *dtypes, *mma_rows, *mma_columns, *mma_sums, False), dtype="float32"
                        )
                    )

    return described, implemented


def _make_store_intrinsic() -> tuple[Any, Any]:
    """Return the description and the implementation of storing accumulators to shared memory."""
    tile_options = {"align": 64, "offset_factor": 1, "scope": SHARED_SCOPE}

    @tvm_script.prim_func(s_tir=True)
    def described(sums: T.handle, tile: T.handle) -> None:
        C = _match_accumulators(sums)
        S = T.match_buffer(tile, (TILE_SIZE, TILE_SIZE), "float32", **tile_options)
        with T.sblock("root"):
            _access([C], S)
            for i, j in T.grid(TILE_SIZE, TILE_SIZE):
                with T.sblock("store"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    lane, register = T.meta_var(accumulator_layout(vi, vj))
                    T.reads(C[lane, register])
                    T.writes(S[vi, vj])
                    S[vi, vj] = C[lane, register]

    @tvm_script.prim_func(s_tir=True)
    def implemented(sums: T.handle, tile: T.handle) -> None:
        row, column = T.int32(), T.int32()
        C = _match_accumulators(sums)
        S = T.match_buffer(tile, (TILE_SIZE, TILE_SIZE), "float32", strides=[row, column], **tile_options)
        with T.sblock("root"):
            _access([C], S)
            for lane in T.thread_binding(0, WARP_SIZE, "threadIdx.x"):
                for pair in range(LANE_ACCUMS // 2):
                    for one in T.vectorized(2):
                        i, j = T.meta_var(_accumulator_position(lane, 2 * pair))
                        S[i, j + one] = C[lane, 2 * pair + one]

    return described, implemented
