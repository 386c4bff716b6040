"""The operations in the text of a kernel: its accesses to memory and its arithmetic, by what they are counted as."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from tvmconv.analysis.lowered.tir import ASYNC_COPY, SHARED, Scope, parts, statements

if TYPE_CHECKING:
    from tvmconv.compiler.lowered import LoweredStep
    from tvmconv.compiler.spaces import Space

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


class Operation(NamedTuple):
    """One operation of the text: its name in `MEMORY` or `ARITHMETIC`, where it is, and of how many elements."""

    name: str
    scope: Scope
    lanes: int
    itemsize: int


def operations(step: LoweredStep, spaces: Mapping[str, Space]) -> Iterator[Operation]:
    """The operations of a step, in the order of its text.

    Args:
        step: of a kernel.
        spaces: where each argument lies.
    """
    for statement, scope in statements(step.function):
        if type(statement).__name__ == "BufferStore":
            space = space_of(statement.buffer, spaces)
            if space in STORES:
                yield Operation(STORES[space], scope, *_lanes(statement.value))
        for part, inside in parts(statement.value, scope, whole=_is_fetch):  # its coordinates are an address
            kind = type(part).__name__
            if kind == "TensorLoad":
                space = space_of(part.source, spaces)
                if space in LOADS:
                    yield Operation(LOADS[space], inside, *_lanes(part))
            elif kind in _NODES and part.ty.dtype.is_float:
                yield Operation(_NODES[kind], inside, *_lanes(part))
            elif kind == "Call":
                yield from _called(part, inside)


def _called(call: Any, scope: Scope) -> Iterator[Operation]:
    """What a call does: a texture fetch, a shuffle or an asynchronous copy; nothing, for all others."""
    name = str(call.op.name)
    if name.startswith(_SHUFFLE):
        yield Operation(SHUFFLES, scope, *_lanes(call))
    elif _is_fetch(call):
        yield Operation(TEXTURE_FETCHES, scope, *_lanes(call))
    elif name == ASYNC_COPY:  # of (destination, offset, source, offset, bytes, whether to load and not to store zeros)
        itemsize = call.args[0].args[0].ty.dtype.dtype.itemsize
        copied = int(call.args[4]) // itemsize
        yield Operation(SHARED_STORES, scope, copied, itemsize)
        loading = scope.where(call.args[5], True) if len(call.args) > 5 else scope
        yield Operation(GLOBAL_LOADS, loading, copied, itemsize)


def _is_fetch(node: Any) -> bool:
    """Whether an expression is a texture fetch."""
    return type(node).__name__ == "Call" and node.op.name == _EXTERN and str(node.args[0].value).startswith(_FETCH)


def space_of(buffer: Any, spaces: Mapping[str, Space]) -> str:
    """Where a buffer lies: an argument where the schedule puts it, all others in the scope of their allocation."""
    scope = str(buffer.scope())
    return spaces.get(str(buffer.name), "shared" if scope in SHARED else scope)


def _lanes(expression: Any) -> tuple[int, int]:
    """Elements of an expression, and the bytes of one."""
    dtype = expression.ty.dtype
    return dtype.lanes, dtype.itemsize // dtype.lanes
