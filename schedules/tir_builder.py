"""The words that programs are written in: TIR put together statement by statement, for what rewriting cannot say.

A program is a Python function that emits TIR through TVM's IRBuilder. A loop or a condition of the kernel is a `with`
block, a loop or a condition of Python is one at the time of writing, and a part of a kernel is a function with a name.
Whatever PTX can do can be emitted by its mnemonic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from tvm.s_tir import Schedule
from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir

from tvmconv.gpu_specs import MAX_BLOCKS_YZ
from tvmconv.tensor_map import ENCODE_FUNCTION, TensorMap
from tvmconv.workloads import Workload
from tvmconv.workloads.dtypes import ACCUMULATOR, get_numpy_dtype

Buffer = Any  # a buffer variable: `buffer[i]` loads, `store` stores
Expr = Any  # an expression of TIR, or a Python number


def build_schedule(w: Workload, emit_kernels: Callable[[dict[str, Buffer]], None]) -> Schedule:
    """The function of a workload's arguments that a Python function writes, as a schedule with nothing left to do.

    Args:
        w: the workload.
        emit_kernels: emits the kernels, one root loop nest each; it is given the arguments by name.
    """
    with IRBuilder() as builder, ir.prim_func(s_tir=True):
        ir.func_name("main")
        arguments = zip(w.argument_names, w.argument_shapes, w.argument_dtypes, strict=True)
        buffers = {name: ir.arg(name, ir.buffer(shape, dtype)) for name, shape, dtype in arguments}
        with open_block("root"):
            emit_kernels(buffers)
    return Schedule(builder.get())


@contextmanager
def open_block(block_name: str) -> Iterator[None]:
    """The statements inside, and the arrays that are allocated there.

    TVM works out what other blocks read and write, and makes one around all that uses an array where its allocation is
    further out: of long statements that takes longer than anything else. Nothing asks for it.
    """
    with ir.sblock(block_name):
        ir.reads([])
        ir.writes([])
        yield


def allocate(name: str, extent: int, dtype: str, scope: str = "local") -> Buffer:
    """An array: `local` (registers), `shared`, `shared.dyn` (whose size the launch asks for) or `global` (scratch)."""
    return IRBuilder.name(name, ir.sblock_alloc_buffer((extent,), dtype, scope=scope))


def declare_tensor_map(name: str, array: Buffer, tensor_map: TensorMap) -> Expr:
    """A parameter of the kernel that tells TMA of an array; its address is what an instruction takes.

    It is encoded by whoever launches, when the array is there.
    """
    variable = IRBuilder.name(name, ir.Bind(T.tvm_stack_alloca("tensormap", 1), T.handle("tensormap")))
    ir.evaluate(
        T.call_packed(ENCODE_FUNCTION, variable, T.address_of(array[(0,) * len(array.shape)]), tensor_map.to_json())
    )
    return T.address_of(variable)


def store(buffer: Buffer, index: Expr, value: Expr) -> None:
    """buffer[index] = value."""
    ir.buffer_store(buffer, value, [index])


def emit_ptx(mnemonic: str, *operands: Expr) -> None:
    """One PTX instruction, its results first, as the PTX ISA writes it."""
    ir.evaluate(T.ptx[mnemonic](*operands))


def emit_call(expression: Expr) -> None:
    """A statement that is a call: `T.cuda.cta_sync()`, say."""
    ir.evaluate(expression)


@contextmanager
def if_(condition: Expr) -> Iterator[None]:
    """The statements inside run only where the condition holds; one that is known now costs nothing."""
    if condition is True:
        yield
        return
    with ir.If(condition), ir.Then():
        yield


def unrolled_loop(extent: int, name: str) -> AbstractContextManager[Expr]:
    """A loop that TVM unrolls."""
    return _name_loop_variable(ir.unroll(extent), name)


@contextmanager
def vectorized_loop(extent: int) -> Iterator[Expr]:
    """A loop over the elements of one access; of one element, none."""
    if extent == 1:
        yield 0
        return
    with ir.vectorized(extent) as lane:
        yield lane


def serial_loop(extent: Expr, name: str) -> AbstractContextManager[Expr]:
    """A loop."""
    return _name_loop_variable(ir.serial(extent), name)


@contextmanager
def guarded_loop(loop: AbstractContextManager[Expr], predicate: Callable[[Expr], Expr]) -> Iterator[Expr]:
    """A loop whose iterations run only where a condition on them holds."""
    with loop as i, if_(predicate(i)):
        yield i


def thread_axis(extent: int, thread_tag: str) -> AbstractContextManager[Expr]:
    """A loop bound to an axis such as `blockIdx.x`."""
    return _name_loop_variable(ir.thread_binding(extent, thread=thread_tag), thread_tag.replace("Idx.", "_"))


@contextmanager
def block_axes(grid_y: int, grid_x: int) -> Iterator[tuple[Expr, Expr]]:
    """The loops over a grid of y × x blocks, bound to `blockIdx.x` alone where y exceeds what its axis may have.

    Yields:
        The indices of a block along y and along x.
    """
    if grid_y > MAX_BLOCKS_YZ:
        with thread_axis(grid_y * grid_x, "blockIdx.x") as block_index:
            yield block_index // grid_x, block_index % grid_x
    else:
        with thread_axis(grid_x, "blockIdx.x") as block_x, thread_axis(grid_y, "blockIdx.y") as block_y:
            yield block_y, block_x


@contextmanager
def _name_loop_variable(frame: Any, name: str) -> Iterator[Expr]:
    with frame as variable:
        yield IRBuilder.name(name, variable)


def logical_and(*conditions: Expr) -> Expr:
    """All conditions; True if there is none."""
    dynamic_conditions = [condition for condition in conditions if condition is not True]
    if not dynamic_conditions:
        return True
    conjunction, *further_conditions = dynamic_conditions
    for condition in further_conditions:
        conjunction = T.And(conjunction, condition)
    return conjunction


def to_uint32(value: Expr) -> Expr:
    """An index as an unsigned number of 32 bits, as addresses in shared memory are."""
    return T.uint32(value)


def fill_zeros(buffer: Buffer, num_elements: int) -> None:
    """Set the first elements of an array of the accumulation dtype to zero."""
    with unrolled_loop(num_elements, "i") as i:
        store(buffer, i, T.float32(0))


_VECTOR_SUFFIX = {2: "b16", 4: "b32", 8: "v2.b32", 16: "v4.b32"}


def load_global(
    registers: Buffer, source: Buffer, element_index: Expr, num_elements: int, *, is_constant: bool = True
) -> None:
    """Load neighbouring elements of memory that nobody writes meanwhile into 32-bit registers.

    Args:
        registers: the registers, an array of uint32.
        source: what is loaded from.
        element_index: of the first element, in memory; a multiple of `num_elements`, or of what fills 16 bytes.
        num_elements: how many elements: 2 bytes, or 4, 8, 16 or 32.
        is_constant: whether it stays as it is from the launch on; not if a launch before this one may still write it.
    """
    itemsize, mnemonic = get_numpy_dtype(str(source.dtype)).itemsize, "ld.global.nc" if is_constant else "ld.global"
    if num_elements * itemsize == 2:
        half = allocate("half", 1, "uint16")
        emit_ptx(f"{mnemonic}.b16", half[0], source.access_ptr("r", offset=element_index))
        store(registers, 0, T.Cast("uint32", half[0]))
        return
    for byte_offset, num_bytes in _split_into_vectors(num_elements * itemsize):
        destination_registers = [registers[byte_offset // 4 + e] for e in range(num_bytes // 4)]
        emit_ptx(
            f"{mnemonic}.{_VECTOR_SUFFIX[num_bytes]}",
            *destination_registers,
            source.access_ptr("r", offset=element_index + byte_offset // itemsize),
        )


def load_shared(registers: Buffer, address: Expr, nbytes: int) -> None:
    """Load 2, 4, 8, 16 or 32 neighbouring bytes of shared memory into 32-bit registers."""
    if nbytes == 2:
        half = allocate("half", 1, "uint16")
        emit_ptx("ld.shared.b16", half[0], address)
        store(registers, 0, T.Cast("uint32", half[0]))
        return
    for byte_offset, num_bytes in _split_into_vectors(nbytes):
        emit_ptx(
            f"ld.shared.{_VECTOR_SUFFIX[num_bytes]}",
            *(registers[byte_offset // 4 + e] for e in range(num_bytes // 4)),
            address + to_uint32(byte_offset),
        )


def store_shared(address: Expr, registers: Buffer, nbytes: int) -> None:
    """Store 2, 4, 8, 16 or 32 neighbouring bytes to shared memory from 32-bit registers."""
    if nbytes == 2:
        emit_ptx("st.shared.b16", address, T.Cast("uint16", registers[0]))
        return
    for byte_offset, num_bytes in _split_into_vectors(nbytes):
        emit_ptx(
            f"st.shared.{_VECTOR_SUFFIX[num_bytes]}",
            address + to_uint32(byte_offset),
            *(registers[byte_offset // 4 + e] for e in range(num_bytes // 4)),
        )


def store_global(destination: Buffer, element_index: Expr, registers: Buffer, num_elements: int) -> None:
    """Store neighbouring elements, as `load_global` loads them, from 32-bit registers."""
    itemsize = get_numpy_dtype(str(destination.dtype)).itemsize
    if num_elements * itemsize == 2:
        emit_ptx("st.global.b16", destination.access_ptr("w", offset=element_index), T.Cast("uint16", registers[0]))
        return
    for byte_offset, num_bytes in _split_into_vectors(num_elements * itemsize):
        pointer = destination.access_ptr("w", offset=element_index + byte_offset // itemsize)
        emit_ptx(
            f"st.global.{_VECTOR_SUFFIX[num_bytes]}",
            pointer,
            *(registers[byte_offset // 4 + e] for e in range(num_bytes // 4)),
        )


def _split_into_vectors(nbytes: int) -> list[tuple[int, int]]:
    """The first byte and the bytes of each access to neighbouring bytes."""
    return [(byte_offset, min(16, nbytes - byte_offset)) for byte_offset in range(0, nbytes, 16)]


def unpack(registers: Buffer, num_elements: int, dtype: str) -> list[Expr]:
    """Neighbouring elements of a storage dtype in 32-bit registers, in the accumulation dtype."""
    if dtype == "float32":
        return [T.reinterpret("float32", registers[e]) for e in range(num_elements)]
    halves = [T.shift_right(registers[e // 2], T.uint32(e % 2 * 16)) & T.uint32(0xFFFF) for e in range(num_elements)]
    if dtype == "bfloat16":  # the upper half of a float32
        return [T.reinterpret("float32", T.shift_left(half, T.uint32(16))) for half in halves]
    return [T.Cast(ACCUMULATOR, T.reinterpret(dtype, T.Cast("uint16", half))) for half in halves]


def pack(registers: Buffer, first_register: int, values: Sequence[Expr], dtype: str, apply_relu: bool = False) -> None:
    """Round numbers to a storage dtype and put them into 32-bit registers, neighbours into one.

    Args:
        registers: the registers, an array of uint32.
        first_register: the first of them.
        values: float32.
        dtype: to round to.
        apply_relu: whether what is negative becomes zero as it is rounded, which costs nothing; to 16 bits only.
    """
    if dtype == "float32":
        for e, value in enumerate(values):
            store(registers, first_register + e, T.reinterpret("uint32", value))
        return
    ptx_type = {"float16": "f16", "bfloat16": "bf16"}[dtype]
    for e in range(0, len(values), 2):
        upper = values[e + 1] if e + 1 < len(values) else T.float32(0)
        emit_ptx(
            f"cvt.rn{'.relu' if apply_relu else ''}.{ptx_type}x2.f32",
            registers[first_register + e // 2],
            upper,
            values[e],
        )
