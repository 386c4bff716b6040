"""Barriers that TVM leaves out: accesses to shared memory that threads race for, found in the lowered TIR.

TVM puts a barrier between a store and a load of a shared buffer unless it takes them for accesses of each thread to an
element of its own: their indices are equal and have the number of the innermost thread axis in them (`FindConflict` in
src/s_tir/transform/thread_storage_sync.cc of Apache TVM). Threads that differ only in another axis, which the index
does not have, share the element all the same: where one of them stores it, the others may load it too early, or see it
overwritten too soon. Which axis is the innermost follows from the order in which a schedule nests its thread loops.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from tvm.tirx import PrimFunc

BARRIER = "tirx.tvm_storage_sync"


@dataclass(frozen=True, order=True)
class Race:
    """A store and a load of one element by several threads, with no barrier between them.

    Attributes:
        buffer: the shared buffer's name.
        index: of the element, as text.
        axes: the thread axes that tell those threads apart, such as `threadIdx.y`.
    """

    buffer: str
    index: str
    axes: tuple[str, ...]


def unsynchronised(function: PrimFunc) -> list[Race]:
    """The stores and loads of shared memory that need a barrier between them and have none.

    Looked for is what TVM's rule misses: accesses with one index, which lacks a thread axis of more than one thread.
    To have none is necessary for a kernel to be right, and no proof that it is: accesses whose indices differ are not
    compared, nor are asynchronous copies, behind which TVM puts a barrier whatever their index.

    Args:
        function: a lowered device function.

    Returns:
        Each race once, sorted.
    """
    races = _summarise(function.body, {}).races
    return sorted(Race(str(element.buffer.name), str(element.index.key), element.axes) for element in races)


class _Element(NamedTuple):
    """An element of a shared buffer, and the thread axes that its index, a `StructuralKey`, lacks."""

    buffer: Any
    index: Any
    axes: tuple[str, ...]


_Access = tuple[str, _Element]  # "load" or "store" of what
_OPPOSITE = {"load": "store", "store": "load"}


class _Summary(NamedTuple):
    """What a statement does to elements that several threads share.

    Attributes:
        head: the accesses before its first barrier; all if it has none.
        tail: the accesses behind its last barrier; all if it has none.
        synchronises: whether it has a barrier.
        races: what it stores and loads with no barrier between.
    """

    head: Set[_Access] = frozenset()
    tail: Set[_Access] = frozenset()
    synchronises: bool = False
    races: Set[_Element] = frozenset()


def _summarise(node: Any, axes: Mapping[str, Any]) -> _Summary:
    """Summarise a statement that runs inside the thread axes, variables by name, of more than one thread."""
    match type(node).__name__:
        case "SeqStmt":
            return _in_sequence(_summarise(statement, axes) for statement in node.seq)
        case "AttrStmt":
            if node.attr_key == "thread_extent" and int(node.value) > 1:
                tag = str(node.node.thread_tag)
                axes = {**axes, tag: node.node.var} if tag.startswith("threadIdx") else axes
            return _summarise(node.body, axes)
        case "For":
            body = _summarise(node.body, axes)
            return _in_sequence([body, body]) if int(node.extent) > 1 else body
        case "IfThenElse":  # TVM puts no barrier inside
            branches = [_summarise(branch, axes) for branch in (node.then_case, node.else_case) if branch is not None]
            return _Summary(
                head=frozenset().union(*(branch.head for branch in branches)),
                tail=frozenset().union(*(branch.tail for branch in branches)),
                races=frozenset().union(*(branch.races for branch in branches)),
            )
        case "BufferStore":
            accesses = frozenset(_accesses(node, axes))
            return _Summary(head=accesses, tail=accesses)
        case "Evaluate":
            return _Summary(synchronises=_is_barrier(node.value))
    return _Summary()


def _in_sequence(parts: Iterable[_Summary]) -> _Summary:
    """Summarise statements that run one after another."""
    head: set[_Access] = set()
    tail: set[_Access] = set()
    races: set[_Element] = set()
    synchronises = False
    for part in parts:
        races |= part.races
        races |= {element for kind, element in part.head if (_OPPOSITE[kind], element) in tail}
        if not synchronises:
            head |= part.head
        if part.synchronises:
            tail = set()
        tail |= part.tail
        synchronises |= part.synchronises
    return _Summary(head, tail, synchronises, races)


def _accesses(store: Any, axes: Mapping[str, Any]) -> Iterator[_Access]:
    """The accesses to shared memory of a store's value and of itself that several threads make to one element."""
    import tvm_ffi
    from tvm import tirx
    from tvm.ir import TensorLoad

    loads = [("load", load.source, load.indices[0]) for load in _nodes(store.value, TensorLoad)]
    for kind, buffer, index in (*loads, ("store", store.buffer, store.indices[0])):
        if buffer.scope() == "shared":
            used = _nodes(index, tirx.Var)
            lacking = tuple(tag for tag, axis in axes.items() if not any(axis.same_as(variable) for variable in used))
            if lacking:
                yield kind, _Element(buffer, tvm_ffi.StructuralKey(index), lacking)


def _nodes(expression: Any, kind: type) -> list[Any]:
    """The parts of an expression that are of one kind."""
    import tvm_ffi

    found: list[Any] = []
    tvm_ffi.structural_walk(expression, (kind, found.append), order="post")
    return found


def _is_barrier(expression: Any) -> bool:
    return type(expression).__name__ == "Call" and expression.op.name == BARRIER
