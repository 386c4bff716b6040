"""Barriers that TVM leaves out: accesses to shared memory that threads race for, found in the lowered TIR.

TVM puts a barrier between a store and a load of a shared buffer unless it takes them for accesses of each thread to an
element of its own: their indices are equal and have the number of the innermost thread axis in them (`FindConflict` in
src/s_tir/transform/thread_storage_sync.cc of Apache TVM). Threads that differ only in another axis, which the index
does not have, share the element all the same: where one of them stores it, the others may load it too early, or see it
overwritten too soon. Which axis is the innermost follows from the order in which a schedule nests its thread loops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from tvmconv.analysis.tir import shared_loads, variables

if TYPE_CHECKING:
    from tvm.tirx import PrimFunc

BARRIER = "tirx.tvm_storage_sync"


@dataclass(frozen=True)
class Race:
    """A store and a load of one element, by several threads and with no barrier between them.

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
    That a kernel has none is necessary for it to be right, and no proof: accesses whose indices differ are not
    compared, nor are asynchronous copies, behind which TVM puts a barrier of its own.

    Args:
        function: a lowered device function.

    Returns:
        Each race once, in the order of the text.
    """
    return list(dict.fromkeys(_summarise(function.body, {}).races))


class _Access(NamedTuple):
    """A store or load by threads that share the element; `axes` are those that the index lacks."""

    kind: Literal["load", "store"]
    buffer: Any
    index: Any
    axes: tuple[str, ...]


class _Summary(NamedTuple):
    """What a statement does to shared memory: its accesses before its first and behind its last barrier.

    Without a barrier (`synchronises` is false) both are all accesses there are.
    """

    head: Sequence[_Access] = ()
    tail: Sequence[_Access] = ()
    synchronises: bool = False
    races: Sequence[Race] = ()

    def then(self, other: _Summary) -> _Summary:
        """This, followed by another."""
        return _Summary(
            head=self.head if self.synchronises else [*self.head, *other.head],
            tail=other.tail if other.synchronises else [*self.tail, *other.tail],
            synchronises=self.synchronises or other.synchronises,
            races=[*self.races, *other.races, *_races(self.tail, other.head)],
        )

    def repeated(self) -> _Summary:
        """This, over and over."""
        return self._replace(races=[*self.races, *_races(self.tail, self.head)])


def _summarise(node: Any, axes: dict[str, Any]) -> _Summary:
    """Summarise a statement inside thread axes of more than one thread, given as variables by name."""
    match type(node).__name__:
        case "SeqStmt":
            summary = _Summary()
            for statement in node.seq:
                summary = summary.then(_summarise(statement, axes))
            return summary
        case "AttrStmt":
            if node.attr_key == "thread_extent" and int(node.value) > 1:
                tag = str(node.node.thread_tag)
                axes = {**axes, tag: node.node.var} if tag.startswith("threadIdx") else axes
            return _summarise(node.body, axes)
        case "For":
            body = _summarise(node.body, axes)
            return body.repeated() if int(node.extent) > 1 else body
        case "IfThenElse":  # barriers are never inside
            branches = [_summarise(branch, axes) for branch in (node.then_case, node.else_case) if branch is not None]
            accesses = [access for branch in branches for access in branch.head]
            return _Summary(accesses, accesses, races=[race for branch in branches for race in branch.races])
        case "BufferStore":
            accesses = [_access("load", load.source, load.indices[0], axes) for load in shared_loads(node.value)]
            if node.buffer.scope() == "shared":
                accesses.append(_access("store", node.buffer, node.indices[0], axes))
            shared = [access for access in accesses if access.axes]
            return _Summary(shared, shared)
        case "Evaluate" if getattr(getattr(node.value, "op", None), "name", None) == BARRIER:
            return _Summary(synchronises=True)
    return _Summary()


def _access(kind: Literal["load", "store"], buffer: Any, index: Any, axes: dict[str, Any]) -> _Access:
    used = variables(index)
    lacking = (tag for tag, axis in axes.items() if not any(axis.same_as(variable) for variable in used))
    return _Access(kind, buffer, index, tuple(lacking))


def _races(before: Sequence[_Access], after: Sequence[_Access]) -> list[Race]:
    import tvm_ffi

    return [
        Race(str(a.buffer.name), str(a.index), a.axes)
        for a in before
        for b in after
        if a.kind != b.kind and a.buffer.same_as(b.buffer) and tvm_ffi.structural_equal(a.index, b.index)
    ]
