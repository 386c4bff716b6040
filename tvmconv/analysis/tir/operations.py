"""Operations of a kernel's TIR, classified as memory accesses and arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from tvmconv.analysis.tir.scopes import ASYNC_COPY, SHARED_SCOPES, Scope, iterate_parts, iterate_statements
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
    """One operation of the TIR: its name in `MEMORY` or `ARITHMETIC`, its scope, vector lanes and bytes per element."""

    name: str
    scope: Scope
    lanes: int
    itemsize: int


def iterate_ops(lowered_kernel: LoweredKernel, memory_scopes: Mapping[str, MemoryScope]) -> Iterator[TirOp]:
    """Yield the operations of a device kernel in the order of its TIR."""
    for statement, scope in iterate_statements(lowered_kernel.function):
        if type(statement).__name__ == "BufferStore":
            memory_scope = find_memory_scope(statement.buffer, memory_scopes)
            if memory_scope in STORES:
                yield TirOp(STORES[memory_scope], scope, *_find_vector_width(statement.value))
        # The coordinates of a texture fetch are an address, which is not arithmetic.
        for expression, part_scope in iterate_parts(statement.value, scope, is_opaque=_is_fetch):
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
    """Yield the operations of a texture fetch, a shuffle or an asynchronous copy; other calls have none."""
    name = str(call.op.name)
    if name.startswith(_SHUFFLE):
        yield TirOp(SHUFFLES, scope, *_find_vector_width(call))
    elif _is_fetch(call):
        yield TirOp(TEXTURE_FETCHES, scope, *_find_vector_width(call))
    elif name == ASYNC_COPY:
        # Arguments: destination, offset, source, offset, bytes, and the condition to load instead of storing zeros.
        itemsize = call.args[0].args[0].ty.dtype.dtype.itemsize
        num_elements = int(call.args[4]) // itemsize
        yield TirOp(SHARED_STORES, scope, num_elements, itemsize)
        load_scope = scope.add_condition(call.args[5], True) if len(call.args) > 5 else scope
        yield TirOp(GLOBAL_LOADS, load_scope, num_elements, itemsize)


def _is_fetch(node: Any) -> bool:
    return type(node).__name__ == "Call" and node.op.name == _EXTERN and str(node.args[0].value).startswith(_FETCH)


def find_memory_scope(buffer: Any, memory_scopes: Mapping[str, MemoryScope]) -> str:
    """Return the memory scope of a buffer: the schedule's choice for an argument, else the scope of its allocation."""
    scope = str(buffer.scope())
    return memory_scopes.get(str(buffer.name), "shared" if scope in SHARED_SCOPES else scope)


def _find_vector_width(expression: Any) -> tuple[int, int]:
    dtype = expression.ty.dtype
    return dtype.lanes, dtype.itemsize // dtype.lanes
