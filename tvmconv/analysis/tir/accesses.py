"""The memory accesses in the text of a kernel whose indices are expressions: loads, stores and asynchronous copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from tvmconv.analysis.tir.scopes import ASYNC_COPY, Scope, iterate_parts, iterate_statements
from tvmconv.errors import AnalysisError
from tvmconv.workloads.dtypes import get_numpy_dtype

if TYPE_CHECKING:
    from tvm.tirx import PrimFunc


@dataclass(frozen=True)
class Access:
    """An access to a buffer: so many neighbouring elements, from an index on.

    Attributes:
        kind: load or store.
        buffer: TVM's.
        index: of the first element.
        num_elements: how many.
        scope: where in the text.
        statement_index: the index of the statement that it is of, in the order of
            `tvmconv.analysis.tir.scopes.iterate_statements`.
    """

    kind: Literal["load", "store"]
    buffer: Any
    index: Any
    num_elements: int
    scope: Scope
    statement_index: int

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return get_numpy_dtype(str(self.buffer.dtype)).itemsize

    @property
    def nbytes(self) -> int:
        """Bytes that a thread accesses."""
        return self.num_elements * self.itemsize


def iterate_accesses(function: PrimFunc, is_selected: Callable[[Any], bool]) -> Iterator[Access]:
    """The accesses to some buffers, in the order of the text; an asynchronous copy is a load and a store.

    Args:
        function: a lowered device function.
        is_selected: whether a buffer counts.

    Raises:
        AnalysisError: the elements of a vector are no neighbours.
    """
    for statement_index, (statement, scope) in enumerate(iterate_statements(function)):
        for expression, part_scope in iterate_parts(statement.value, scope):
            kind = type(expression).__name__
            if kind == "TensorLoad" and is_selected(expression.source):
                yield Access(
                    "load", expression.source, *_split_vector_index(expression.indices[0]), part_scope, statement_index
                )
            elif kind == "Call" and expression.op.name == ASYNC_COPY:
                yield from _iterate_copy_accesses(expression, part_scope, is_selected, statement_index)
        if type(statement).__name__ == "BufferStore" and is_selected(statement.buffer):
            yield Access("store", statement.buffer, *_split_vector_index(statement.indices[0]), scope, statement_index)


def _iterate_copy_accesses(
    call: Any, scope: Scope, is_selected: Callable[[Any], bool], statement_index: int
) -> Iterator[Access]:
    """Both sides of a copy; where it does not load, it stores zeros."""
    target, source = call.args[0].args[0], call.args[2].args[0]
    for kind, buffer, index in (("load", source, call.args[3]), ("store", target, call.args[1])):
        if is_selected(buffer):
            load_scope = scope.add_condition(call.args[5], True) if kind == "load" and len(call.args) > 5 else scope
            num_elements = int(call.args[4]) // get_numpy_dtype(str(buffer.dtype)).itemsize
            yield Access(kind, buffer, index, num_elements, load_scope, statement_index)  # type: ignore[arg-type]


def _split_vector_index(index: Any) -> tuple[Any, int]:
    """The first of the elements of an index, and how many."""
    if type(index).__name__ != "Ramp":
        return index, 1
    if int(index.stride) != 1:
        raise AnalysisError(f"a vector whose elements are no neighbours: {index}")
    return index.base, int(index.lanes)
