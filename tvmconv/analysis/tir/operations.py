"""The operations in the text of a kernel: its accesses to memory and its arithmetic, by what they are counted as."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from tvmconv.analysis.tir.scopes import ASYNC_COPY, SHARED_SCOPES, Scope, iterate_parts, iterate_statements

if TYPE_CHECKING:
    from tvmconv.compiler.lowered_module import LoweredKernel
    from tvmconv.compiler.memory_scopes import MemoryScope

GLOBAL_LOADS, GLOBAL_STORES, TEXTURE_FETCHES = "global loads", "global stores", "texture fetches"
CONSTANT_LOADS, SHARED_LOADS, SHARED_STORES = "constant loads", "shared loads", "shared stores"
SHUFFLES = "warp shuffles"
MULTIPLICATIONS, ADDITIONS, EXTREMA = "multiplications", "additions", "minima and maxima"
MEMORY = (GLOBAL_LOADS, GLOBAL_STORES, TEXTURE_FETCHES, CONSTANT_LOADS, SHARED_LOADS, SHARED_STORES, SHUFFLES)
ARITHMETIC = (MULTIPLICATIONS, ADDITIONS, EXTREMA)

LOADS = {"global": GLOBAL_LOADS, "constant": CONSTANT_LOADS, "shared": SHARED_LOADS}
STORES = {"global": GLOBAL_STORES, "shared": SHARED_STORES}
_NODES = {"Mul": MULTIPLICATIONS, "Add": ADDITIONS, "Sub": ADDITIONS, "Min": EXTREMA, "Max": EXTREMA}
_EXTERN, _FETCH = "tirx.call_pure_extern", "tex2D"
_SHUFFLE = "tirx.cuda.__shfl"


class TirOp(NamedTuple):
    """One operation of the text: its name in `MEMORY` or `ARITHMETIC`, where it is, and of how many elements."""

    name: str
    scope: Scope
    lanes: int
    itemsize: int


def iterate_ops(lowered_kernel: LoweredKernel, memory_scopes: Mapping[str, MemoryScope]) -> Iterator[TirOp]:
    """The operations of a step, in the order of its text.

    Args:
        lowered_kernel: of a kernel.
        memory_scopes: where each argument lies.
    """
    for statement, scope in iterate_statements(lowered_kernel.function):
        if type(statement).__name__ == "BufferStore":
            memory_scope = find_memory_scope(statement.buffer, memory_scopes)
            if memory_scope in STORES:
                yield TirOp(STORES[memory_scope], scope, *_find_vector_width(statement.value))
        for expression, part_scope in iterate_parts(
            statement.value, scope, is_opaque=_is_fetch
        ):  # its coordinates are an address
            kind = type(expression).__name__
            if kind == "TensorLoad":
                memory_scope = find_memory_scope(expression.source, memory_scopes)
                if memory_scope in LOADS:
                    yield TirOp(LOADS[memory_scope], part_scope, *_find_vector_width(expression))
            elif kind in _NODES and expression.ty.dtype.is_float:
                yield TirOp(_NODES[kind], part_scope, *_find_vector_width(expression))
            elif kind == "Call":
                yield from _iterate_call_ops(expression, part_scope)


def _iterate_call_ops(call: Any, scope: Scope) -> Iterator[TirOp]:
    """What a call does: a texture fetch, a shuffle or an asynchronous copy; nothing, for all others."""
    name = str(call.op.name)
    if name.startswith(_SHUFFLE):
        yield TirOp(SHUFFLES, scope, *_find_vector_width(call))
    elif _is_fetch(call):
        yield TirOp(TEXTURE_FETCHES, scope, *_find_vector_width(call))
    elif name == ASYNC_COPY:  # of (destination, offset, source, offset, bytes, whether to load and not to store zeros)
        itemsize = call.args[0].args[0].ty.dtype.dtype.itemsize
        num_elements = int(call.args[4]) // itemsize
        yield TirOp(SHARED_STORES, scope, num_elements, itemsize)
        load_scope = scope.add_condition(call.args[5], True) if len(call.args) > 5 else scope
        yield TirOp(GLOBAL_LOADS, load_scope, num_elements, itemsize)


def _is_fetch(node: Any) -> bool:
    """Whether an expression is a texture fetch."""
    return type(node).__name__ == "Call" and node.op.name == _EXTERN and str(node.args[0].value).startswith(_FETCH)


def find_memory_scope(buffer: Any, memory_scopes: Mapping[str, MemoryScope]) -> str:
    """Where a buffer lies: an argument where the schedule puts it, all others in the scope of their allocation."""
    scope = str(buffer.scope())
    return memory_scopes.get(str(buffer.name), "shared" if scope in SHARED_SCOPES else scope)


def _find_vector_width(expression: Any) -> tuple[int, int]:
    """Elements of an expression, and the bytes of one."""
    dtype = expression.ty.dtype
    return dtype.lanes, dtype.itemsize // dtype.lanes
