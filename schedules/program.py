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

from tvmconv.gpu import MAX_BLOCKS_YZ
from tvmconv.tensor_map import ENCODE, TensorMap
from tvmconv.workloads import Workload
from tvmconv.workloads.dtypes import ACCUMULATOR, numpy_dtype

Buffer = Any  # a buffer variable: `buffer[i]` loads, `store` stores
Expr = Any  # an expression of TIR, or a Python number


def write(w: Workload, body: Callable[[dict[str, Buffer]], None]) -> Schedule:
    """The function of a workload's arguments that a Python function writes, as a schedule with nothing left to do.

    Args:
        w: the workload.
        body: emits the kernels, one root loop nest each; it is given the arguments by name.
    """
    with IRBuilder() as builder, ir.prim_func(s_tir=True):
        ir.func_name("main")
        arguments = zip(w.argument_names, w.argument_shapes, w.argument_dtypes, strict=True)
        buffers = {name: ir.arg(name, ir.buffer(shape, dtype)) for name, shape, dtype in arguments}
        with block("root"):
            body(buffers)
    return Schedule(builder.get())


@contextmanager
def block(name: str) -> Iterator[None]:
    """The statements inside, and the arrays that are allocated there.

    TVM works out what other blocks read and write, and makes one around all that uses an array where its allocation is
    further out: of long statements that takes longer than anything else. Nothing asks for it.
    """
    with ir.sblock(name):
        ir.reads([])
        ir.writes([])
        yield


def allocate(name: str, extent: int, dtype: str, scope: str = "local") -> Buffer:
    """An array: `local` (registers), `shared`, `shared.dyn` (whose size the launch asks for) or `global` (scratch)."""
    return IRBuilder.name(name, ir.sblock_alloc_buffer((extent,), dtype, scope=scope))


def tensor_map(name: str, array: Buffer, told: TensorMap) -> Expr:
    """A parameter of the kernel that tells TMA of an array; its address is what an instruction takes.

    It is encoded by whoever launches, when the array is there.
    """
    variable = IRBuilder.name(name, ir.Bind(T.tvm_stack_alloca("tensormap", 1), T.handle("tensormap")))
    ir.evaluate(T.call_packed(ENCODE, variable, T.address_of(array[(0,) * len(array.shape)]), told.to_json()))
    return T.address_of(variable)


def store(buffer: Buffer, index: Expr, value: Expr) -> None:
    """buffer[index] = value."""
    ir.buffer_store(buffer, value, [index])


def ptx(mnemonic: str, *operands: Expr) -> None:
    """One PTX instruction, its results first, as the PTX ISA writes it."""
    ir.evaluate(T.ptx[mnemonic](*operands))


def call(expression: Expr) -> None:
    """A statement that is a call: `T.cuda.cta_sync()`, say."""
    ir.evaluate(expression)


@contextmanager
def when(condition: Expr) -> Iterator[None]:
    """The statements inside run only where the condition holds; one that is known now costs nothing."""
    if condition is True:
        yield
        return
    with ir.If(condition), ir.Then():
        yield


def unrolled(extent: int, name: str) -> AbstractContextManager[Expr]:
    """A loop that TVM unrolls."""
    return _named(ir.unroll(extent), name)


@contextmanager
def vectorized(extent: int) -> Iterator[Expr]:
    """A loop over the elements of one access; of one element, none."""
    if extent == 1:
        yield 0
        return
    with ir.vectorized(extent) as lane:
        yield lane


def serial(extent: Expr, name: str) -> AbstractContextManager[Expr]:
    """A loop."""
    return _named(ir.serial(extent), name)


@contextmanager
def guarded(loop: AbstractContextManager[Expr], holds: Callable[[Expr], Expr]) -> Iterator[Expr]:
    """A loop whose iterations run only where a condition on them holds."""
    with loop as i, when(holds(i)):
        yield i


def parallel(extent: int, axis: str) -> AbstractContextManager[Expr]:
    """A loop bound to an axis such as `blockIdx.x`."""
    return _named(ir.thread_binding(extent, thread=axis), axis.replace("Idx.", "_"))


@contextmanager
def parallel_blocks(y: int, x: int) -> Iterator[tuple[Expr, Expr]]:
    """The loops over a grid of y × x blocks, bound to `blockIdx.x` alone where y exceeds what its axis may have.

    Yields:
        The indices of a block along y and along x.
    """
    if y > MAX_BLOCKS_YZ:
        with parallel(y * x, "blockIdx.x") as block_index:
            yield block_index // x, block_index % x
    else:
        with parallel(x, "blockIdx.x") as block_x, parallel(y, "blockIdx.y") as block_y:
            yield block_y, block_x


@contextmanager
def _named(frame: Any, name: str) -> Iterator[Expr]:
    with frame as variable:
        yield IRBuilder.name(name, variable)


def both(*conditions: Expr) -> Expr:
    """All conditions; True if there is none."""
    left = [condition for condition in conditions if condition is not True]
    if not left:
        return True
    first, *others = left
    for condition in others:
        first = T.And(first, condition)
    return first


def uint(value: Expr) -> Expr:
    """An index as an unsigned number of 32 bits, as addresses in shared memory are."""
    return T.uint32(value)


def zeros(buffer: Buffer, extent: int) -> None:
    """Set the first elements of an array of the accumulation dtype to zero."""
    with unrolled(extent, "i") as i:
        store(buffer, i, T.float32(0))


_VECTOR = {2: "b16", 4: "b32", 8: "v2.b32", 16: "v4.b32"}


def load_global(words: Buffer, source: Buffer, index: Expr, count: int, *, constant: bool = True) -> None:
    """Load neighbouring elements of memory that nobody writes meanwhile into 32-bit registers.

    Args:
        words: the registers, an array of uint32.
        source: what is loaded from.
        index: of the first element, in memory; a multiple of `count`, or of what fills 16 bytes.
        count: how many elements: 2 bytes, or 4, 8, 16 or 32.
        constant: whether it stays as it is from the launch on; not if a launch before this one may still write it.
    """
    itemsize, how = numpy_dtype(str(source.dtype)).itemsize, "ld.global.nc" if constant else "ld.global"
    if count * itemsize == 2:
        half = allocate("half", 1, "uint16")
        ptx(f"{how}.b16", half[0], source.access_ptr("r", offset=index))
        store(words, 0, T.Cast("uint32", half[0]))
        return
    for first, size in _vectors(count * itemsize):
        into = [words[first // 4 + e] for e in range(size // 4)]
        ptx(f"{how}.{_VECTOR[size]}", *into, source.access_ptr("r", offset=index + first // itemsize))


def load_shared(words: Buffer, address: Expr, nbytes: int) -> None:
    """Load 2, 4, 8, 16 or 32 neighbouring bytes of shared memory into 32-bit registers."""
    if nbytes == 2:
        half = allocate("half", 1, "uint16")
        ptx("ld.shared.b16", half[0], address)
        store(words, 0, T.Cast("uint32", half[0]))
        return
    for first, size in _vectors(nbytes):
        ptx(f"ld.shared.{_VECTOR[size]}", *(words[first // 4 + e] for e in range(size // 4)), address + uint(first))


def store_shared(address: Expr, words: Buffer, nbytes: int) -> None:
    """Store 2, 4, 8, 16 or 32 neighbouring bytes to shared memory from 32-bit registers."""
    if nbytes == 2:
        ptx("st.shared.b16", address, T.Cast("uint16", words[0]))
        return
    for first, size in _vectors(nbytes):
        ptx(f"st.shared.{_VECTOR[size]}", address + uint(first), *(words[first // 4 + e] for e in range(size // 4)))


def store_global(to: Buffer, index: Expr, words: Buffer, count: int) -> None:
    """Store neighbouring elements, as `load_global` loads them, from 32-bit registers."""
    itemsize = numpy_dtype(str(to.dtype)).itemsize
    if count * itemsize == 2:
        ptx("st.global.b16", to.access_ptr("w", offset=index), T.Cast("uint16", words[0]))
        return
    for first, size in _vectors(count * itemsize):
        pointer = to.access_ptr("w", offset=index + first // itemsize)
        ptx(f"st.global.{_VECTOR[size]}", pointer, *(words[first // 4 + e] for e in range(size // 4)))


def _vectors(nbytes: int) -> list[tuple[int, int]]:
    """The first byte and the bytes of each access to neighbouring bytes."""
    return [(first, min(16, nbytes - first)) for first in range(0, nbytes, 16)]


def unpack(words: Buffer, count: int, dtype: str) -> list[Expr]:
    """Neighbouring elements of a storage dtype in 32-bit registers, in the accumulation dtype."""
    if dtype == "float32":
        return [T.reinterpret("float32", words[e]) for e in range(count)]
    halves = [T.shift_right(words[e // 2], T.uint32(e % 2 * 16)) & T.uint32(0xFFFF) for e in range(count)]
    if dtype == "bfloat16":  # the upper half of a float32
        return [T.reinterpret("float32", T.shift_left(half, T.uint32(16))) for half in halves]
    return [T.Cast(ACCUMULATOR, T.reinterpret(dtype, T.Cast("uint16", half))) for half in halves]


def pack(words: Buffer, first: int, values: Sequence[Expr], dtype: str, relu: bool = False) -> None:
    """Round numbers to a storage dtype and put them into 32-bit registers, neighbours into one.

    Args:
        words: the registers, an array of uint32.
        first: the first of them.
        values: float32.
        dtype: to round to.
        relu: whether what is negative becomes zero as it is rounded, which costs nothing; to 16 bits only.
    """
    if dtype == "float32":
        for e, value in enumerate(values):
            store(words, first + e, T.reinterpret("uint32", value))
        return
    name = {"float16": "f16", "bfloat16": "bf16"}[dtype]
    for e in range(0, len(values), 2):
        upper = values[e + 1] if e + 1 < len(values) else T.float32(0)
        ptx(f"cvt.rn{'.relu' if relu else ''}.{name}x2.f32", words[first + e // 2], upper, values[e])
