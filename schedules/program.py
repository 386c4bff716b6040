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

from tvmconv.workloads import Workload
from tvmconv.workloads.dtypes import ACCUMULATOR

Buffer = Any  # a buffer variable: `buffer[i]` loads, `store` stores
Expr = Any  # an expression of TIR, or a Python number


def write(w: Workload, body: Callable[[dict[str, Buffer]], None]) -> Schedule:
    """The function of a workload's arguments that a Python function writes, as a schedule with nothing left to do.

    Args:
        w: the workload.
        body: emits the kernels, one root loop nest each; it is given the arguments by name.
    """
    with IRBuilder() as builder:
        with ir.prim_func(s_tir=True):
            ir.func_name("main")
            arguments = zip(w.argument_names, w.argument_shapes, w.argument_dtypes, strict=True)
            buffers = {name: ir.arg(name, ir.buffer(shape, dtype)) for name, shape, dtype in arguments}
            with ir.sblock("root"):
                body(buffers)
    return Schedule(builder.get())


def allocate(name: str, extent: int, dtype: str, scope: str = "local") -> Buffer:
    """An array: `local` (registers), `shared`, `shared.dyn` (whose size the launch asks for) or `global` (scratch)."""
    return IRBuilder.name(name, ir.sblock_alloc_buffer((extent,), dtype, scope=scope))


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


def serial(extent: Expr, name: str) -> AbstractContextManager[Expr]:
    """A loop."""
    return _named(ir.serial(extent), name)


def parallel(extent: int, axis: str) -> AbstractContextManager[Expr]:
    """A loop bound to an axis such as `blockIdx.x`."""
    return _named(ir.thread_binding(extent, thread=axis), axis.replace("Idx.", "_"))


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


def from_storage(bits: Expr, dtype: str) -> Expr:
    """A number whose bits are given, in the accumulation dtype."""
    return T.Cast(ACCUMULATOR, T.reinterpret(dtype, bits)) if dtype != ACCUMULATOR else T.reinterpret(dtype, bits)


Words = Sequence[Expr]


def shared_address(buffer: Buffer) -> Expr:
    """Where an array in shared memory begins, as instructions take it; addresses are sums of it and of `uint` offsets.

    TVM sees no accesses behind such addresses and puts no barriers of its own: `T.cuda.cta_sync()` is where it is written.
    """
    return T.cuda.cvta_generic_to_shared(buffer.access_ptr("rw"))


def global_address(buffer: Buffer, index: Expr, access: str = "r") -> Expr:
    """The address of an element of an array in global memory, by its place in memory."""
    return buffer.access_ptr(access, offset=index)


def load_words(words: Sequence[Expr], space: str, address: Expr) -> None:
    """Load one, two or four neighbouring words of 32 bits; `space` as in `shared` or `global.nc`."""
    ptx(f"ld.{space}.{_WIDTHS[len(words)]}b32", *words, address)


def store_words(space: str, address: Expr, words: Sequence[Expr]) -> None:
    """Store one, two or four neighbouring words of 32 bits."""
    ptx(f"st.{space}.{_WIDTHS[len(words)]}b32", address, *words)


_WIDTHS = {1: "", 2: "v2.", 4: "v4."}


def copy_async(destination: Expr, source: Expr, nbytes: int, condition: Expr) -> None:
    """Copy 4, 8 or 16 bytes from global to shared memory behind the thread's back; zeros where the condition fails.

    The widest copies pass by the L1 cache (PTX ISA, "cp.async").
    """
    level = "cg" if nbytes == 16 else "ca"
    ptx(f"cp.async.{level}.shared.global", destination, source, nbytes, T.Select(condition, uint(nbytes), uint(0)))


def half(word: Expr, place: Expr) -> Expr:
    """The lower (0) or upper (1) 16 bits of a word."""
    return T.Cast("uint16", T.shift_right(word, uint(place * 16)) & T.uint32(0xFFFF))
