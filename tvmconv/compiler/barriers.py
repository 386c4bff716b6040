"""Detection of shared-memory races in lowered TIR, which TVM causes by omitting barriers.

TVM inserts a barrier between a store and a load of a shared buffer, unless it assumes that each thread accesses only
its own element: the indices are equal and contain the innermost thread axis (`FindConflict` in
src/s_tir/transform/thread_storage_sync.cc of Apache TVM). Threads that differ only in another axis, which the index
does not contain, still share the element. If one of them stores it, the others may load it too early or after it was
overwritten. The innermost axis depends on the order in which a schedule nests its thread loops.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from tvmconv.compiler.tir_nodes import collect_nodes
from tvmconv.errors import AnalysisError

if TYPE_CHECKING:
    from tvm.tirx import PrimFunc

BARRIER_OP = "tirx.tvm_storage_sync"


@dataclass(frozen=True, order=True)
class SharedMemoryRace:
    """Store and load of one element by threads that differ in axes such as `threadIdx.y`, without a barrier between."""

    buffer: str
    index: str
    thread_axes: tuple[str, ...]


def find_missing_barriers(function: PrimFunc) -> list[SharedMemoryRace]:
    """Return the stores and loads of shared memory that lack a barrier in between.

    The analysis finds the cases that TVM's rule misses: accesses with the same index, which lacks a thread axis with
    more than one thread. A kernel without findings may still have races. Accesses with different indices are not
    compared, and neither are asynchronous copies, after which TVM always inserts a barrier. Inline PTX with numeric
    addresses and its barriers are ignored; `tvmconv.analysis.races` finds such races by emulation. AnalysisError is
    raised for a function with shared memory and a statement of unknown effect.
    """
    from tvm import tirx

    if not any(_is_shared(node.buffer) for node in collect_nodes(function.body, tirx.AllocBuffer)):
        return []
    races = _summarize_statement(function.body, {}).races
    return sorted(SharedMemoryRace(str(e.buffer.name), str(e.index.key), e.missing_axes) for e in races)


class _SharedElement(NamedTuple):
    """An element of a shared buffer with the thread axes that its index, a `StructuralKey`, does not contain."""

    buffer: Any
    index: Any
    missing_axes: tuple[str, ...]


_Access = tuple[str, _SharedElement]  # ("load" or "store", element)
_CONFLICTING_ACCESS = {"load": "store", "store": "load"}


class _AccessSummary(NamedTuple):
    """Accesses of a statement to elements that several threads share: before its first barrier and after its last.

    Without a barrier, both contain all accesses. `races` are stored and loaded without a barrier in between.
    """

    accesses_before_barrier: Set[_Access] = frozenset()
    accesses_after_barrier: Set[_Access] = frozenset()
    has_barrier: bool = False
    races: Set[_SharedElement] = frozenset()


def _summarize_statement(node: Any, axes: Mapping[str, Any]) -> _AccessSummary:
    """Summarize a statement inside `axes`, the variables by name of thread axes with more than one thread."""
    match type(node).__name__:
        case "SeqStmt":
            return _merge_sequence(_summarize_statement(statement, axes) for statement in node.seq)
        case "AttrStmt":
            if node.attr_key == "thread_extent" and int(node.value) > 1:
                tag = str(node.node.thread_tag)
                axes = {**axes, tag: node.node.var} if tag.startswith("threadIdx") else axes
            return _summarize_statement(node.body, axes)
        case "For":
            body = _summarize_statement(node.body, axes)
            is_single_iteration = type(node.extent).__name__ == "IntImm" and int(node.extent) <= 1
            return body if is_single_iteration else _merge_sequence([body, body])
        case "While":  # the body may run any number of times, including zero
            condition, body = _summarize_loads([node.condition], axes), _summarize_statement(node.body, axes)
            return _merge_branches([_merge_sequence([condition, body, condition, body, condition])])
        case "IfThenElse":  # TVM inserts no barrier inside
            branches = [branch for branch in (node.then_case, node.else_case) if branch is not None]
            summary = _merge_branches(_summarize_statement(branch, axes) for branch in branches)
            return _merge_sequence([_summarize_loads([node.condition], axes), summary])
        case "BufferStore":
            stores = {("store", element) for element in _find_shared_elements([(node.buffer, node.indices[0])], axes)}
            accesses = _summarize_loads([node.value, *node.indices], axes).accesses_before_barrier | stores
            return _AccessSummary(accesses_before_barrier=accesses, accesses_after_barrier=accesses)
        case "Bind":
            return _summarize_loads([node.value], axes)
        case "Evaluate":
            return _AccessSummary(has_barrier=True) if _is_barrier(node.value) else _AccessSummary()
        case "AllocBuffer" | "DeclBuffer":
            return _AccessSummary()
        case kind:
            raise AnalysisError(f"a kernel with shared memory and a statement of the kind {kind}")


def _merge_branches(summaries: Iterable[_AccessSummary]) -> _AccessSummary:
    """Summarize statements of which at most one runs."""
    branches = list(summaries)
    return _AccessSummary(
        accesses_before_barrier=frozenset().union(*(branch.accesses_before_barrier for branch in branches)),
        accesses_after_barrier=frozenset().union(*(branch.accesses_after_barrier for branch in branches)),
        races=frozenset().union(*(branch.races for branch in branches)),
    )


def _merge_sequence(summaries: Iterable[_AccessSummary]) -> _AccessSummary:
    accesses_before: set[_Access] = set()
    accesses_after: set[_Access] = set()
    races: set[_SharedElement] = set()
    has_barrier = False
    for summary in summaries:
        races |= summary.races
        conflicts = {(_CONFLICTING_ACCESS[kind], element) for kind, element in summary.accesses_before_barrier}
        races |= {element for _, element in conflicts & accesses_after}
        if not has_barrier:
            accesses_before |= summary.accesses_before_barrier
        if summary.has_barrier:
            accesses_after = set()
        accesses_after |= summary.accesses_after_barrier
        has_barrier |= summary.has_barrier
    return _AccessSummary(accesses_before, accesses_after, has_barrier, races)


def _summarize_loads(expressions: Iterable[Any], axes: Mapping[str, Any]) -> _AccessSummary:
    from tvm.ir import TensorLoad

    loads = [(load.source, load.indices[0]) for node in expressions for load in collect_nodes(node, TensorLoad)]
    accesses = frozenset({("load", element) for element in _find_shared_elements(loads, axes)})
    return _AccessSummary(accesses_before_barrier=accesses, accesses_after_barrier=accesses)


def _find_shared_elements(accesses: Iterable[tuple[Any, Any]], axes: Mapping[str, Any]) -> Iterator[_SharedElement]:
    """Yield the shared-memory elements that several threads access, from pairs of a buffer and an index."""
    import tvm_ffi
    from tvm import tirx

    for buffer, index in accesses:
        if _is_shared(buffer):
            variables = collect_nodes(index, tirx.Var)
            missing_axes = tuple(tag for tag, axis in axes.items() if not any(map(axis.same_as, variables)))
            if missing_axes:
                yield _SharedElement(buffer, tvm_ffi.StructuralKey(index), missing_axes)


def _is_shared(buffer: Any) -> bool:
    return str(buffer.scope()).startswith("shared")  # or "shared.dyn"


def _is_barrier(expression: Any) -> bool:
    return type(expression).__name__ == "Call" and expression.op.name == BARRIER_OP
