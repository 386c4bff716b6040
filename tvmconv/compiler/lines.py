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

    from tvmconv.compiler.lowered import Lowered

Lines = tuple[range, ...]  # by statement, its lines from 1 on; an empty range where it has none

_MARK = re.compile(r"\b__(begin|end)_of_(\d+)_(\d+)\b")


def tir_lines(function: PrimFunc, text: str | None = None) -> Lines | None:
    """The lines of each statement in `function.script()`.

    Args:
        function: TIR, lowered or not.
        text: what `function.script()` is, where that is known.

    Returns:
        By `BufferStore`, `Evaluate` and `Bind`, in the order of `tvmconv.analysis.lowered.tir.statements`; None where
        it cannot be told.
    """
    marked, count = _marked(function, 0)
    found = _located(function.script() if text is None else text, marked.script(), [count])
    return found[0] if found else None


def source_lines(lowered: Lowered) -> tuple[Lines, ...] | None:
    """The lines of each statement in `lowered.source`, by step; as for `tir_lines`.

    Raises:
        CompileError: TVM cannot write the text.
    """
    import tvm

    order = {step.name: number for number, step in enumerate(lowered.steps)}
    counts, functions = [0] * len(order), {}
    for variable, function in lowered.device.functions.items():
        number = order[str(function.attrs["global_symbol"])]
        functions[variable], counts[number] = _marked(function, number)
    marked = replace(lowered, device=tvm.IRModule(functions, attrs=lowered.device.attrs))
    return _located(lowered.source, marked.source, counts)


def _marked(function: PrimFunc, step: int) -> tuple[PrimFunc, int]:
    """A function with marks around each statement, and how many it has."""
    import tvm_ffi
    from tvm import tirx

    count = 0

    def between_marks(statement: Any) -> Any:
        nonlocal count
        begin, end = (
            tirx.Evaluate(tirx.call_extern("int32", f"__{side}_of_{step}_{count}")) for side in ("begin", "end")
        )
        count += 1
        return tirx.SeqStmt([begin, statement, end])

    kinds = (tirx.BufferStore, tirx.Evaluate, tirx.Bind)
    # Callbacks come in the order of the text, but for the statements of a block's init, which TVM visits as it likes:
    # the marks have the numbers, and whoever asks walks in the same way.
    body = tvm_ffi.structural_map(function.body, (kinds, between_marks), order="post")
    return function.with_body(body), count


def _located(plain: str, marked: str, counts: Sequence[int]) -> tuple[Lines, ...] | None:
    """The lines of the statements in a text, by step, from the marks in another that is the same but for these."""
    found = [[range(0)] * count for count in counts]
    kept: list[str] = []
    begun: dict[tuple[int, int], int] = {}
    for line in marked.split("\n"):
        mark = _MARK.search(line)
        if mark is None:
            kept.append(line)
        elif mark[1] == "begin":
            begun[int(mark[2]), int(mark[3])] = len(kept) + 1
        else:
            step, number = int(mark[2]), int(mark[3])
            found[step][number] = range(begun.pop((step, number)), len(kept) + 1)
    if kept != plain.split("\n"):
        return None
    return tuple(map(tuple, found))
