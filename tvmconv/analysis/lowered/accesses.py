"""The memory accesses in the text of a kernel whose indices are expressions: loads, stores and asynchronous copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from tvmconv.analysis.lowered.tir import ASYNC_COPY, Scope, parts, statements
from tvmconv.errors import AnalysisError
from tvmconv.workloads.dtypes import numpy_dtype

if TYPE_CHECKING:
    from tvm.tirx import PrimFunc


@dataclass(frozen=True)
class Access:
    """An access to a buffer: so many neighbouring elements, from an index on.

    Attributes:
        kind: load or store.
        buffer: TVM's.
        index: of the first element.
        elements: how many.
        scope: where in the text.
        statement: the index of the statement that it is of, in the order of `tvmconv.analysis.lowered.tir.statements`.
    """

    kind: Literal["load", "store"]
    buffer: Any
    index: Any
    elements: int
    scope: Scope
    statement: int

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return numpy_dtype(str(self.buffer.dtype)).itemsize

    @property
    def nbytes(self) -> int:
        """Bytes that a thread accesses."""
        return self.elements * self.itemsize


def accesses(function: PrimFunc, wanted: Callable[[Any], bool]) -> Iterator[Access]:
    """The accesses to some buffers, in the order of the text; an asynchronous copy is a load and a store.

    Args:
        function: a lowered device function.
        wanted: whether a buffer counts.

    Raises:
        AnalysisError: the elements of a vector are no neighbours.
    """
    for number, (statement, scope) in enumerate(statements(function)):
        for part, inside in parts(statement.value, scope):
            kind = type(part).__name__
            if kind == "TensorLoad" and wanted(part.source):
                yield Access("load", part.source, *_neighbours(part.indices[0]), inside, number)
            elif kind == "Call" and part.op.name == ASYNC_COPY:
                yield from _copied(part, inside, wanted, number)
        if type(statement).__name__ == "BufferStore" and wanted(statement.buffer):
            yield Access("store", statement.buffer, *_neighbours(statement.indices[0]), scope, number)


def _copied(call: Any, scope: Scope, wanted: Callable[[Any], bool], statement: int) -> Iterator[Access]:
    """Both sides of a copy; where it does not load, it stores zeros."""
    target, source = call.args[0].args[0], call.args[2].args[0]
    for kind, buffer, index in (("load", source, call.args[3]), ("store", target, call.args[1])):
        if wanted(buffer):
            loading = scope.where(call.args[5], True) if kind == "load" and len(call.args) > 5 else scope
            elements = int(call.args[4]) // numpy_dtype(str(buffer.dtype)).itemsize
            yield Access(kind, buffer, index, elements, loading, statement)  # type: ignore[arg-type]


def _neighbours(index: Any) -> tuple[Any, int]:
    """The first of the elements of an index, and how many."""
    if type(index).__name__ != "Ramp":
        return index, 1
    if int(index.stride) != 1:
        raise AnalysisError(f"a vector whose elements are no neighbours: {index}")
    return index.base, int(index.lanes)
