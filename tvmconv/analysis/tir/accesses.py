"""Memory accesses of the TIR whose indices are expressions: loads, stores and asynchronous copies."""

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
    """One access to contiguous elements of a buffer.

    Attributes:
        kind: "load" or "store".
        buffer: TIR buffer.
        index: Expression of the first element's index.
        num_elements: Number of elements.
        scope: Loops and conditions around the access.
        statement_index: Index of the statement in the order of `tvmconv.analysis.tir.scopes.iterate_statements`.
    """

    kind: Literal["load", "store"]
    buffer: Any
    index: Any
    num_elements: int
    scope: Scope
    statement_index: int

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return get_numpy_dtype(str(self.buffer.dtype)).itemsize

    @property
    def nbytes(self) -> int:
        """Bytes that a thread accesses."""
        return self.num_elements * self.itemsize


def iterate_accesses(function: PrimFunc, is_selected: Callable[[Any], bool]) -> Iterator[Access]:
    """Yield the accesses to some buffers in the order of the TIR; an asynchronous copy is a load and a store.

    Args:
        function: A lowered device function.
        is_selected: Predicate that selects buffers.

    Raises:
        AnalysisError: The elements of a vector are not contiguous.
    """
    for statement_index, (statement, scope) in enumerate(iterate_statements(function)):
        for expression, part_scope in iterate_parts(statement.value, scope):
            kind = type(expression).__name__
            if kind == "TensorLoad" and is_selected(expression.source):
                index = _split_vector_index(expression.indices[0])
                yield Access("load", expression.source, *index, part_scope, statement_index)
            elif kind == "Call" and expression.op.name == ASYNC_COPY:
                yield from _iterate_copy_accesses(expression, part_scope, is_selected, statement_index)
        if type(statement).__name__ == "BufferStore" and is_selected(statement.buffer):
            yield Access("store", statement.buffer, *_split_vector_index(statement.indices[0]), scope, statement_index)


def _iterate_copy_accesses(
    call: Any, scope: Scope, is_selected: Callable[[Any], bool], statement_index: int
) -> Iterator[Access]:
    """Yield the load and the store of a copy; if the copy's condition is false, it stores zeros without a load."""
    target, source = call.args[0].args[0], call.args[2].args[0]
    for kind, buffer, index in (("load", source, call.args[3]), ("store", target, call.args[1])):
        if is_selected(buffer):
            load_scope = scope.add_condition(call.args[5], True) if kind == "load" and len(call.args) > 5 else scope
            num_elements = int(call.args[4]) // get_numpy_dtype(str(buffer.dtype)).itemsize
            yield Access(kind, buffer, index, num_elements, load_scope, statement_index)  # type: ignore[arg-type]


def _split_vector_index(index: Any) -> tuple[Any, int]:
    """Return the index of the first element, and the number of elements."""
    if type(index).__name__ != "Ramp":
        return index, 1
    if int(index.stride) != 1:
        raise AnalysisError(f"the vector {index} has a stride of {index.stride}; only contiguous vectors are supported")
    return index.base, int(index.lanes)
