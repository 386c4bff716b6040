"""TIR builder: functions that emit a kernel statement by statement, where schedule primitives do not suffice.

A kernel is a Python function that emits TIR through TVM's IRBuilder. A `with` block emits a loop or a condition of the
kernel; a Python loop or condition runs while the kernel is emitted. Any PTX instruction can be emitted by its mnemonic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from tvm.s_tir import Schedule
from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir

from tvmconv.arithmetic import ceil_div
from tvmconv.target import MAX_BLOCKS_YZ
from tvmconv.tensor_map import ENCODE_FUNCTION, TensorMap
from tvmconv.workloads import Workload
from tvmconv.workloads.dtypes import ACCUMULATOR, DTYPES, FLOAT8_DTYPES, get_itemsize, get_tir_dtype
from tvmconv.workloads.text import MAX_INT32_ELEMENTS

Buffer = Any  # a buffer variable: `buffer[i]` loads an element, `store` stores one
Expr = Any  # a TIR expression or a Python number


def build_schedule(w: Workload, emit_kernels: Callable[[dict[str, Buffer]], None]) -> Schedule:
    """Return a finished schedule of a function whose TIR a Python function emits.

    Args:
        w: The workload, which defines the function's arguments.
        emit_kernels: Function that emits the kernels, one root loop nest each; it receives the argument buffers by
            name.
    """
    with IRBuilder() as builder, ir.prim_func(s_tir=True):
        ir.func_name("main")
        arguments = zip(w.argument_names, w.argument_shapes, w.argument_dtypes, strict=True)
        buffers = {name: ir.arg(name, ir.buffer(shape, get_tir_dtype(dtype))) for name, shape, dtype in arguments}
        with open_block("root"):
            emit_kernels(buffers)
    return Schedule(builder.get())


@contextmanager
def open_block(block_name: str) -> Iterator[None]:
    """Open a block with empty read and write regions, for its statements and allocations.

    TVM would otherwise compute the regions of each block, which takes most of the build time of long kernels and is
    never used.
    """
    with ir.sblock(block_name):
        ir.reads([])
        ir.writes([])
        yield


def allocate(name: str, extent: int | Sequence[int], dtype: str, scope: str = "local") -> Buffer:
    """Allocate an array.

    Args:
        name: Name of the array.
        extent: Number of elements, or the shape of an array with several axes.
        dtype: Dtype of an element.
        scope: `local` (registers), `shared`, `shared.dyn` (dynamic shared memory) or `global` (workspace).
    """
    shape = tuple(extent) if isinstance(extent, Sequence) else (extent,)
    return IRBuilder.name(name, ir.sblock_alloc_buffer(shape, dtype, scope=scope))


def declare_tensor_map(name: str, array: Buffer, tensor_map: TensorMap) -> Expr:
    """Declare a TMA descriptor of an array as a kernel parameter, and return its address for TMA instructions.

    The launching code encodes the descriptor when the array's address is known.
    """
    variable = IRBuilder.name(name, ir.Bind(T.tvm_stack_alloca("tensormap", 1), T.handle("tensormap")))
    ir.evaluate(
        T.call_packed(ENCODE_FUNCTION, variable, T.address_of(array[(0,) * len(array.shape)]), tensor_map.to_json())
    )
    return T.address_of(variable)


class Register:
    """A named scalar register of each thread.

    Args:
        name: Name of the register in the generated code.
        dtype: Dtype of its value.
        value: Initial value; None leaves it undefined.
    """

    def __init__(self, name: str, dtype: str = "int32", value: Expr = None) -> None:
        self._cell = allocate(name, 1, dtype)
        if value is not None:
            self.set(value)

    @property
    def value(self) -> Expr:
        """The current value."""
        return self._cell[0]

    def set(self, value: Expr) -> None:
        """Assign a value."""
        store(self._cell, 0, value)


def store(buffer: Buffer, index: Expr, value: Expr) -> None:
    """Store a value: `buffer[index] = value`."""
    ir.buffer_store(buffer, value, [index])


def store_element(buffer: Buffer, index: Sequence[Expr], value: Expr) -> None:
    """Store a value to an array with several axes."""
    ir.buffer_store(buffer, value, list(index))


def emit_ptx(mnemonic: str, *operands: Expr) -> None:
    """Emit one PTX instruction; results come first among the operands, as in the PTX ISA."""
    ir.evaluate(T.ptx[mnemonic](*operands))


def emit_call(expression: Expr) -> None:
    """Emit a call as a statement, such as `T.cuda.cta_sync()`."""
    ir.evaluate(expression)


@contextmanager
def if_(condition: Expr) -> Iterator[None]:
    """Open a condition; the statements inside run only if it holds. A condition that is True emits no test."""
    if condition is True:
        yield
        return
    with ir.If(condition), ir.Then():
        yield


def emit_alternatives(branches: Sequence[tuple[Expr, Callable[[], None]]]) -> None:
    """Emit conditions and what runs where each holds, as `if ... else if ...`."""
    (condition, emit_branch), *others = branches
    with ir.If(condition):
        with ir.Then():
            emit_branch()
        if others:
            with ir.Else():
                emit_alternatives(others)


def emit_if_else(condition: Expr, emit_then: Callable[[], None], emit_else: Callable[[], None]) -> None:
    """Emit a condition, what runs where it holds, and what runs elsewhere."""
    with ir.If(condition):
        with ir.Then():
            emit_then()
        with ir.Else():
            emit_else()


def unrolled_loop(extent: int, name: str) -> AbstractContextManager[Expr]:
    """Open a loop that TVM unrolls."""
    return _name_loop_variable(ir.unroll(extent), name)


@contextmanager
def vectorized_loop(extent: int) -> Iterator[Expr]:
    """Open a vectorized loop over the elements of one access; a single element needs no loop."""
    if extent == 1:
        yield 0
        return
    with ir.vectorized(extent) as lane:
        yield lane


def serial_loop(extent: Expr, name: str) -> AbstractContextManager[Expr]:
    """Open a serial loop."""
    return _name_loop_variable(ir.serial(extent), name)


@contextmanager
def guarded_loop(loop: AbstractContextManager[Expr], predicate: Callable[[Expr], Expr]) -> Iterator[Expr]:
    """Open a loop whose iterations run only if a predicate of the loop variable holds."""
    with loop as i, if_(predicate(i)):
        yield i


@contextmanager
def items_loop(num_items: int, thread: Expr, num_threads: int, *, is_unrolled: bool = False) -> Iterator[Expr]:
    """Open the loop of a thread over its items, which are every `num_threads`-th one from the thread's index on."""
    open_loop = unrolled_loop if is_unrolled else serial_loop
    with open_loop(ceil_div(num_items, num_threads), "i") as i:
        item = i * num_threads + thread
        with if_(is_below(item, num_items, num_threads)):
            yield item


def thread_axis(extent: int, thread_tag: str) -> AbstractContextManager[Expr]:
    """Open a loop that is bound to a thread axis such as `blockIdx.x`."""
    return _name_loop_variable(ir.thread_binding(extent, thread=thread_tag), thread_tag.replace("Idx.", "_"))


@contextmanager
def thread_per_item(num_items: int, num_threads: int, *, uses_pdl: bool = False) -> Iterator[Expr]:
    """Open a kernel with one thread for each item, in blocks of `num_threads`.

    With PDL (programmatic dependent launch) a block may start before the previous launch ends, and waits for its end.

    Yields:
        The index of the thread's item.
    """
    grid = thread_axis(ceil_div(num_items, num_threads), "blockIdx.x")
    with grid as block, thread_axis(num_threads, "threadIdx.x") as thread:
        if uses_pdl:
            emit_ptx("griddepcontrol.wait")
            emit_ptx("griddepcontrol.launch_dependents")
        item = block * num_threads + thread
        with if_(is_below(item, num_items, num_threads)):
            yield item


@contextmanager
def block_axes(grid_y: int, grid_x: int) -> Iterator[tuple[Expr, Expr]]:
    """Open the loops over a grid of y × x blocks; both are bound to `blockIdx.x` if y exceeds the limit of its axis.

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
    """Return the conjunction of conditions; True if there are none."""
    dynamic_conditions = [condition for condition in conditions if condition is not True]
    if not dynamic_conditions:
        return True
    conjunction, *further_conditions = dynamic_conditions
    for condition in further_conditions:
        conjunction = T.And(conjunction, condition)
    return conjunction


def is_below(index: Expr, extent: int, tile: int) -> Expr:
    """Return whether an index is below an extent; True, which needs no test, if whole tiles fill the extent."""
    return True if extent % tile == 0 else index < extent


def to_uint32(value: Expr) -> Expr:
    """Return an index as a 32-bit unsigned number, the type of shared-memory addresses."""
    return T.uint32(value)


def choose_offset_dtype(num_elements: int) -> str:
    """Return the dtype of offsets in an array: int64 if it has more elements than int32 counts."""
    return "int64" if num_elements > MAX_INT32_ELEMENTS else "int32"


def to_offset(value: Expr, dtype: str) -> Expr:
    """Return a number as an operand of offsets of a dtype, which `choose_offset_dtype` returns."""
    return T.Cast("int64", value) if dtype == "int64" else value


def fill_zeros(buffer: Buffer, num_elements: int) -> None:
    """Set the first elements of an array of the accumulation dtype to zero."""
    with unrolled_loop(num_elements, "i") as i:
        store(buffer, i, T.float32(0))


_VECTOR_SUFFIX = {2: "b16", 4: "b32", 8: "v2.b32", 16: "v4.b32"}


def load_global(
    registers: Buffer, source: Buffer, element_index: Expr, num_elements: int, *, is_constant: bool = True
) -> None:
    """Load contiguous elements of global memory into 32-bit registers.

    Args:
        registers: Destination registers, an array of uint32.
        source: Array to load from.
        element_index: Index of the first element; a multiple of `num_elements` or of the number of elements in 16
            bytes.
        num_elements: Number of elements, which fill 2, 4, 8, 16 or 32 bytes.
        is_constant: Whether no kernel writes the array from this launch on, so that the read-only cache may be used.
    """
    itemsize, mnemonic = get_itemsize(str(source.dtype)), "ld.global.nc" if is_constant else "ld.global"
    if num_elements * itemsize == 2:
        half = allocate("half", 1, "uint16")
        emit_ptx(f"{mnemonic}.b16", half[0], source.access_ptr("r", offset=element_index))
        store(registers, 0, T.Cast("uint32", half[0]))
        return
    for byte_offset, num_bytes in _split_into_vectors(num_elements * itemsize):
        destinations = [registers[byte_offset // 4 + e] for e in range(num_bytes // 4)]
        pointer = source.access_ptr("r", offset=element_index + byte_offset // itemsize)
        emit_ptx(f"{mnemonic}.{_VECTOR_SUFFIX[num_bytes]}", *destinations, pointer)


def load_shared(registers: Buffer, address: Expr, nbytes: int) -> None:
    """Load 2, 4, 8, 16 or 32 contiguous bytes of shared memory into 32-bit registers."""
    if nbytes == 2:
        half = allocate("half", 1, "uint16")
        emit_ptx("ld.shared.b16", half[0], address)
        store(registers, 0, T.Cast("uint32", half[0]))
        return
    for byte_offset, num_bytes in _split_into_vectors(nbytes):
        destinations = [registers[byte_offset // 4 + e] for e in range(num_bytes // 4)]
        emit_ptx(f"ld.shared.{_VECTOR_SUFFIX[num_bytes]}", *destinations, address + to_uint32(byte_offset))


def store_shared(address: Expr, registers: Buffer, nbytes: int) -> None:
    """Store 2, 4, 8, 16 or 32 contiguous bytes from 32-bit registers to shared memory."""
    if nbytes == 2:
        emit_ptx("st.shared.b16", address, T.Cast("uint16", registers[0]))
        return
    for byte_offset, num_bytes in _split_into_vectors(nbytes):
        values = [registers[byte_offset // 4 + e] for e in range(num_bytes // 4)]
        emit_ptx(f"st.shared.{_VECTOR_SUFFIX[num_bytes]}", address + to_uint32(byte_offset), *values)


def store_global(destination: Buffer, element_index: Expr, registers: Buffer, num_elements: int) -> None:
    """Store contiguous elements from 32-bit registers to global memory; the counterpart of `load_global`."""
    itemsize = get_itemsize(str(destination.dtype))
    if num_elements * itemsize == 2:
        emit_ptx("st.global.b16", destination.access_ptr("w", offset=element_index), T.Cast("uint16", registers[0]))
        return
    for byte_offset, num_bytes in _split_into_vectors(num_elements * itemsize):
        pointer = destination.access_ptr("w", offset=element_index + byte_offset // itemsize)
        values = [registers[byte_offset // 4 + e] for e in range(num_bytes // 4)]
        emit_ptx(f"st.global.{_VECTOR_SUFFIX[num_bytes]}", pointer, *values)


def _split_into_vectors(nbytes: int) -> list[tuple[int, int]]:
    """Return the byte offset and the number of bytes of each access that covers `nbytes` contiguous bytes."""
    return [(byte_offset, min(16, nbytes - byte_offset)) for byte_offset in range(0, nbytes, 16)]


def unpack(registers: Buffer, num_elements: int, dtype: str) -> list[Expr]:
    """Return contiguous elements of a storage dtype from 32-bit registers, converted to the accumulation dtype."""
    if get_itemsize(dtype) == 4:
        return [T.reinterpret("float32", registers[e]) for e in range(num_elements)]
    if get_itemsize(dtype) == 1:
        return _unpack_bytes(registers, num_elements, dtype)
    halves = [T.shift_right(registers[e // 2], T.uint32(e % 2 * 16)) & T.uint32(0xFFFF) for e in range(num_elements)]
    if dtype == "bfloat16":  # a bfloat16 is the upper half of a float32
        return [T.reinterpret("float32", T.shift_left(half, T.uint32(16))) for half in halves]
    return [T.Cast(ACCUMULATOR, T.reinterpret(dtype, T.Cast("uint16", half))) for half in halves]


def pack(registers: Buffer, first_register: int, values: Sequence[Expr], dtype: str, apply_relu: bool = False) -> None:
    """Round values to a storage dtype and pack them into 32-bit registers.

    Args:
        registers: Destination registers, an array of uint32.
        first_register: Index of the first destination register.
        values: Values in float32; for int32 the bits of integers.
        dtype: Storage dtype, except for int8, which `Int8Rounding` packs.
        apply_relu: Whether the conversion also sets negative values to zero, at no cost; not in float32.
    """
    if get_itemsize(dtype) == 4:
        for e, value in enumerate(values):
            store(registers, first_register + e, T.reinterpret("uint32", value))
        return
    if dtype in FLOAT8_DTYPES:
        _pack_float8(registers, first_register, values, dtype, apply_relu)
        return
    for e in range(0, len(values), 2):
        upper = values[e + 1] if e + 1 < len(values) else T.float32(0)
        mnemonic = f"cvt.rn{'.relu' if apply_relu else ''}.{DTYPES[dtype].ptx}x2.f32"
        emit_ptx(mnemonic, registers[first_register + e // 2], upper, values[e])


def _unpack_bytes(registers: Buffer, num_elements: int, dtype: str) -> list[Expr]:
    """Return elements of 8 bits, four in a register, in float32, without slow conversions of single bytes."""
    if dtype in FLOAT8_DTYPES:
        halves = allocate("widened", ceil_div(num_elements, 2), "uint32")
        for i in range(ceil_div(num_elements, 2)):
            pair = T.Cast("uint16", T.shift_right(registers[i // 2], T.uint32(i % 2 * 16)) & T.uint32(0xFFFF))
            emit_ptx(f"cvt.rn.f16x2.{DTYPES[dtype].ptx}x2", halves[i], pair)
        return unpack(halves, num_elements, "float16")
    words = allocate("biased", ceil_div(num_elements, 4), "uint32")
    for i in range(ceil_div(num_elements, 4)):
        store(words, i, registers[i] ^ T.uint32(0x80808080))  # the integers plus 128
    widened = allocate("widened", num_elements, "uint32")
    for e in range(num_elements):  # bytes below 0x4B0000 are the float32 number 2^23 plus the byte
        emit_ptx("prmt.b32", widened[e], words[e // 4], T.uint32(0x4B000000), T.uint32(0x7650 + e % 4))
    return [T.reinterpret(ACCUMULATOR, widened[e]) - T.float32(2.0**23 + 128) for e in range(num_elements)]


def _pack_float8(registers: Buffer, first_register: int, values: Sequence[Expr], dtype: str, apply_relu: bool) -> None:
    """Round values to 8-bit floats, with saturation, and pack four of them into a register."""
    pairs, half = allocate("packed_pairs", 2, "uint32"), allocate("packed_half", 1, "uint16")
    for first in range(0, len(values), 2):
        lower, upper = [*values[first : first + 2], T.float32(0)][:2]
        pair = first // 2 % 2
        mnemonic = f"cvt.rn.satfinite{'.relu' if apply_relu else ''}.{DTYPES[dtype].ptx}x2.f32"
        emit_ptx(mnemonic, half[0], upper, lower)
        store(pairs, pair, T.Cast("uint32", half[0]))
        index = first_register + first // 4
        if pair:
            emit_ptx("prmt.b32", registers[index], pairs[0], pairs[1], T.uint32(0x5410))
        else:
            store(registers, index, pairs[0])
