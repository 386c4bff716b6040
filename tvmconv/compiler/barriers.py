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

from tvmconv.errors import AnalysisError

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
    compared, nor are asynchronous copies, behind which TVM puts a barrier whatever their index. What GPU instructions
    by name do to shared memory, at addresses that are numbers, is not looked at, nor are the barriers that they are;
    `tvmconv.analysis.races` finds what races there by executing the kernel.

    Args:
        function: a lowered device function.

    Returns:
        Each race once, sorted.

    Raises:
        AnalysisError: the function has shared memory, and a statement of which it is not known what it does to it.
    """
    if not _has_shared_memory(function):
        return []
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
            once = type(node.extent).__name__ == "IntImm" and int(node.extent) <= 1
            return body if once else _in_sequence([body, body])
        case "While":  # its body may run any number of times, or not at all
            condition, body = _evaluated([node.condition], axes), _summarise(node.body, axes)
            return _in_branches([_in_sequence([condition, body, condition, body, condition])])
        case "IfThenElse":  # TVM puts no barrier inside
            branches = [_summarise(branch, axes) for branch in (node.then_case, node.else_case) if branch is not None]
            return _in_sequence([_evaluated([node.condition], axes), _in_branches(branches)])
        case "BufferStore":
            stores = {("store", element) for element in _shared_elements([(node.buffer, node.indices[0])], axes)}
            accesses = _evaluated([node.value, *node.indices], axes).head | stores
            return _Summary(head=accesses, tail=accesses)
        case "Bind":
            return _evaluated([node.value], axes)
        case "Evaluate":
            return _Summary(synchronises=True) if _is_barrier(node.value) else _Summary()
        case "AllocBuffer" | "DeclBuffer":
            return _Summary()
        case kind:
            raise AnalysisError(f"a kernel with shared memory and a statement of the kind {kind}")


def _in_branches(parts: Iterable[_Summary]) -> _Summary:
    """Summarise statements of which one runs, or none."""
    branches = list(parts)
    return _Summary(
        head=frozenset().union(*(branch.head for branch in branches)),
        tail=frozenset().union(*(branch.tail for branch in branches)),
        races=frozenset().union(*(branch.races for branch in branches)),
    )


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


def _evaluated(expressions: Iterable[Any], axes: Mapping[str, Any]) -> _Summary:
    """Summarise the loads of expressions."""
    from tvm.ir import TensorLoad

    loads = [(load.source, load.indices[0]) for each in expressions for load in _nodes(each, TensorLoad)]
    accesses = frozenset({("load", element) for element in _shared_elements(loads, axes)})
    return _Summary(head=accesses, tail=accesses)


def _shared_elements(accesses: Iterable[tuple[Any, Any]], axes: Mapping[str, Any]) -> Iterator[_Element]:
    """Of what is accessed, each a buffer and an index, the elements of shared memory that several threads touch."""
    import tvm_ffi
    from tvm import tirx

    for buffer, index in accesses:
        if _is_shared(buffer):
            used = _nodes(index, tirx.Var)
            lacking = tuple(tag for tag, axis in axes.items() if not any(axis.same_as(variable) for variable in used))
            if lacking:
                yield _Element(buffer, tvm_ffi.StructuralKey(index), lacking)


def _has_shared_memory(function: PrimFunc) -> bool:
    from tvm import tirx

    return any(_is_shared(node.buffer) for node in _nodes(function.body, tirx.AllocBuffer))


def _is_shared(buffer: Any) -> bool:
    return str(buffer.scope()).startswith("shared")  # or "shared.dyn"


def _nodes(expression: Any, kind: type) -> list[Any]:
    """The parts of a statement or an expression that are of one kind."""
    import tvm_ffi

    found: list[Any] = []
    tvm_ffi.structural_walk(expression, (kind, found.append), order="post")
    return found


def _is_barrier(expression: Any) -> bool:
    return type(expression).__name__ == "Call" and expression.op.name == BARRIER
