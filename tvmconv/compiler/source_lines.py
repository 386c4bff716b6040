"""Where the statements of a lowered function are in texts: in TIR's own, and in the CUDA or OpenCL made of it.

TVM keeps no lines. But what prints a function prints a call to a function of any name as a line of its own, so a copy
of the function with such calls around each statement, printed, tells between which of its lines a statement is. The
text without the lines of these marks has to be that of the function itself, line by line: where it is not, nothing is
told. So a line that is told is certain.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tvm.tirx import PrimFunc

    from tvmconv.compiler.lowered_module import LoweredModule

StatementLines = tuple[range, ...]  # by statement, its lines from 1 on; an empty range where it has none

_MARKER = re.compile(r"\b__(begin|end)_of_(\d+)_(\d+)\b")


def map_tir_lines(function: PrimFunc, text: str | None = None) -> StatementLines | None:
    """The lines of each statement in `function.script()`.

    Args:
        function: TIR, lowered or not.
        text: what `function.script()` is, where that is known.

    Returns:
        By `BufferStore`, `Evaluate` and `Bind`, in the order of `tvmconv.analysis.tir.scopes.iterate_statements`; None
        where it cannot be told.
    """
    marked_function, num_statements = _insert_markers(function, 0)
    kernel_lines = _locate_statements(
        function.script() if text is None else text, marked_function.script(), [num_statements]
    )
    return kernel_lines[0] if kernel_lines else None


def map_source_lines(lowered: LoweredModule) -> tuple[StatementLines, ...] | None:
    """The lines of each statement in `lowered.source`, by step; as for `map_tir_lines`.

    Raises:
        CompileError: TVM cannot write the text.
    """
    import tvm

    kernel_indices = {kernel.name: kernel_index for kernel_index, kernel in enumerate(lowered.kernels)}
    statement_counts, functions = [0] * len(kernel_indices), {}
    for variable, function in lowered.device_module.functions.items():
        kernel_index = kernel_indices[str(function.attrs["global_symbol"])]
        functions[variable], statement_counts[kernel_index] = _insert_markers(function, kernel_index)
    marked_module = replace(lowered, device_module=tvm.IRModule(functions, attrs=lowered.device_module.attrs))
    return _locate_statements(lowered.source, marked_module.source, statement_counts)


def _insert_markers(function: PrimFunc, kernel_index: int) -> tuple[PrimFunc, int]:
    """A function with marks around each statement, and how many it has."""
    import tvm_ffi
    from tvm import tirx

    num_statements = 0

    def wrap_statement(statement: Any) -> Any:
        nonlocal num_statements
        start_marker, end_marker = (
            tirx.Evaluate(tirx.call_extern("int32", f"__{side}_of_{kernel_index}_{num_statements}"))
            for side in ("begin", "end")
        )
        num_statements += 1
        return tirx.SeqStmt([start_marker, statement, end_marker])

    kinds = (tirx.BufferStore, tirx.Evaluate, tirx.Bind)
    # Callbacks come in the order of the text, but for the statements of a block's init, which TVM visits as it likes:
    # the marks have the numbers, and whoever asks walks in the same way.
    body = tvm_ffi.structural_map(function.body, (kinds, wrap_statement), order="post")
    return function.with_body(body), num_statements


def _locate_statements(
    text: str, marked_text: str, statement_counts: Sequence[int]
) -> tuple[StatementLines, ...] | None:
    """The lines of the statements in a text, by step, from the marks in another that is the same but for these."""
    statement_lines = [[range(0)] * num_statements for num_statements in statement_counts]
    unmarked_lines: list[str] = []
    start_lines: dict[tuple[int, int], int] = {}
    for line in marked_text.split("\n"):
        marker = _MARKER.search(line)
        if marker is None:
            unmarked_lines.append(line)
        elif marker[1] == "begin":
            start_lines[int(marker[2]), int(marker[3])] = len(unmarked_lines) + 1
        else:
            kernel_index, statement_index = int(marker[2]), int(marker[3])
            statement_lines[kernel_index][statement_index] = range(
                start_lines.pop((kernel_index, statement_index)), len(unmarked_lines) + 1
            )
    if unmarked_lines != text.split("\n"):
        return None
    return tuple(map(tuple, statement_lines))
