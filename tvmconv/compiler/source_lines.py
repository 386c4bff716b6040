"""Lines of TIR statements in TVMScript and in generated CUDA or OpenCL source.

TVM does not record lines. The printers print every call of an external function on its own line. A copy of the function
with marker calls around each statement is therefore printed to locate the statements. Without the marker lines, the
result must equal the original text; otherwise no lines are returned. Returned lines are always exact.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tvmconv.compiler.lowered_module import LoweredModule

if TYPE_CHECKING:
    from tvm.tirx import PrimFunc

StatementLines = tuple[range, ...]  # lines of each statement, from 1; an empty range for a statement without lines

_MARKER = re.compile(r"\b__(begin|end)_of_(\d+)_(\d+)\b")


def map_tir_lines(function: PrimFunc, text: str | None = None) -> StatementLines | None:
    """Return the lines of each statement in `function.script()`, which is `text` if it is already known.

    The statements are each `BufferStore`, `Evaluate` and `Bind` of scheduled or lowered TIR, in the order of
    `tvmconv.analysis.tir.scopes.iterate_statements`; None if their lines cannot be determined.
    """
    marked_function, num_statements = _insert_markers(function, 0)
    text = function.script() if text is None else text
    kernel_lines = _locate_statements(text, marked_function.script(), [num_statements])
    return kernel_lines[0] if kernel_lines else None


def map_source_lines(lowered: LoweredModule) -> tuple[StatementLines, ...] | None:
    """Return the lines of each statement in `lowered.source`, by device function; see `map_tir_lines`."""
    import tvm

    kernel_indices = {kernel.name: kernel_index for kernel_index, kernel in enumerate(lowered.kernels)}
    statement_counts, functions = [0] * len(kernel_indices), {}
    for variable, function in lowered.device_module.functions.items():
        kernel_index = kernel_indices[str(function.attrs["global_symbol"])]
        functions[variable], statement_counts[kernel_index] = _insert_markers(function, kernel_index)
    marked_module = replace(lowered, device_module=tvm.IRModule(functions, attrs=lowered.device_module.attrs))
    return _locate_statements(lowered.source, marked_module.source, statement_counts)


def _insert_markers(function: PrimFunc, kernel_index: int) -> tuple[PrimFunc, int]:
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
    # The order of callbacks is that of the text except for the init of blocks. The markers have the number of the
    # callback, and `iterate_statements` walks in the same order.
    body = tvm_ffi.structural_map(function.body, (kinds, wrap_statement), order="post")
    return function.with_body(body), num_statements


def _locate_statements(
    text: str, marked_text: str, statement_counts: Sequence[int]
) -> tuple[StatementLines, ...] | None:
    """Return the lines of the statements by device function, from a text that is equal except for markers."""
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
            kernel_index, index = int(marker[2]), int(marker[3])
            start_line = start_lines.pop((kernel_index, index))
            statement_lines[kernel_index][index] = range(start_line, len(unmarked_lines) + 1)
    if unmarked_lines != text.split("\n"):
        return None
    return tuple(map(tuple, statement_lines))
