"""The code of a kernel side by side: declaration, scheduled TIR, CUDA and machine code, line by line.

A line that belongs to statements has their groups, by which the page highlights corresponding lines, and its cost. Of
long texts, some lines of each statement are shown first, then the inner loop of machine code, then other lines of
statements. The number of omitted lines is shown.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from html import escape

from tvmconv.analysis.block_accesses import count_block_accesses
from tvmconv.analysis.sass.instruction_mix import find_inner_loop, select_reachable
from tvmconv.analysis.sass.linked_sources import LinkedSources, link_sources
from tvmconv.errors import AnalysisError, CompileError
from tvmconv.kernel import Kernel

MAX_COLUMN_LINES = 400  # shown lines of a column per device function
_CONTEXT_LINES = 1  # shown lines before and after a line of a statement
_LINES_PER_STATEMENT = 4  # lines of each statement that have precedence
_MAX_LINE_CHARACTERS = 160  # longer lines are truncated


@dataclass
class _CodeLine:
    """A line of a column: its number or address, its text, its statements, and its cost."""

    label: str
    text: str
    statements: set[int] = field(default_factory=set)
    cost: str = ""
    is_essential: bool = False  # whether it has precedence in a long column


def render_code(kernel: Kernel, kernel_number: int) -> str:
    """Render the columns of a kernel's code, for each of its device functions, as HTML that is equal for equal kernels.
    The kernel has this number on the page, as in the ids of its statements' groups.
    """
    try:
        linked_sources = link_sources(kernel)
    except CompileError as error:
        return f"<p>The code cannot be shown: {escape(str(error))}</p>"
    fragments = []
    for kernel_index, sources in enumerate(linked_sources):
        has_title = len(linked_sources) > 1
        title = f"<h3>{escape(sources.lowered_kernel.name)}</h3>" if has_title else ""
        columns = "".join(
            _render_column(name, lines, f"k{kernel_number}s{kernel_index}n", "h4" if has_title else "h3")
            for name, lines in _make_columns(kernel, sources).items()
        )
        fragments.append(f'{title}<div class="columns code">{columns}</div>')
    return "".join(fragments)


def _make_columns(kernel: Kernel, sources: LinkedSources) -> dict[str, list[_CodeLine]]:
    """Return the lines of each column by its name; of CUDA, those from the first statement to the last."""
    access_costs = _count_statement_accesses(kernel, sources)
    instructions = {
        statement_index: Counter(instructions=len(statement_instructions))
        for statement_index, statement_instructions in sources.instructions_by_statement.items()
        if statement_index is not None
    }
    cuda_ranges = {number: (lines,) for number, lines in sources.cuda_lines.items()}
    cuda_lines = _make_lines(kernel.format_ir_level("source"), cuda_ranges, instructions)
    first_line = min((lines.start for lines in sources.cuda_lines.values()), default=1)
    end_line = max((lines.stop for lines in sources.cuda_lines.values()), default=1)
    return {
        "TE": _make_lines(kernel.format_ir_level("te"), sources.te_lines, {}),
        "scheduled TIR": _make_lines(kernel.format_ir_level("tir"), sources.tir_lines, access_costs),
        "CUDA": cuda_lines[first_line - 1 : end_line - 1],
        "SASS": list(_iterate_sass_lines(sources)),
    }


def _make_lines(
    text: str, statements: Mapping[int, Iterable[range]], costs: Mapping[int, Counter[str]]
) -> list[_CodeLine]:
    """Return a text's lines with their statements; the first line of each statement has its cost."""
    lines = [_CodeLine(str(number), line) for number, line in enumerate(text.split("\n"), 1)]
    costs_by_line: defaultdict[int, Counter[str]] = defaultdict(Counter)
    for number, ranges in statements.items():
        for line_range in ranges:
            for line in line_range:
                lines[line - 1].statements.add(number)
            if number in costs:
                costs_by_line[line_range.start] += costs[number]
    for line, line_costs in costs_by_line.items():
        lines[line - 1].cost = ", ".join(f"{count:,} {unit}" for unit, count in line_costs.items())
    return lines


def _count_statement_accesses(kernel: Kernel, sources: LinkedSources) -> dict[int, Counter[str]]:
    """Return the cost of each statement's accesses in one block; empty if they cannot be counted."""
    costs_by_statement: defaultdict[int, Counter[str]] = defaultdict(Counter)
    try:
        access_counts = count_block_accesses(kernel, sources.lowered_kernel)
        for shared_access in access_counts.shared_accesses:
            costs_by_statement[shared_access.statement_index]["wavefronts"] += shared_access.wavefronts
        for global_access in access_counts.global_accesses:
            costs_by_statement[global_access.statement_index]["sectors"] += global_access.sectors
    except AnalysisError:
        return {}
    return costs_by_statement


def _iterate_sass_lines(sources: LinkedSources) -> Iterator[_CodeLine]:
    loop = find_inner_loop(sources.listing)
    loop_indices = loop.all_indices if loop else frozenset()
    for index, instruction in enumerate(select_reachable(sources.listing)):
        statement = sources.find_statement(instruction)
        loop_mark = "loop" if index in loop_indices else ""
        statements = set() if statement is None else {statement}
        yield _CodeLine(
            f"{instruction.address:04x}", instruction.text, statements, loop_mark, is_essential=index in loop_indices
        )


def _render_column(name: str, lines: list[_CodeLine], prefix: str, heading_tag: str) -> str:
    """Render a column, shortened if it is long."""
    heading = f"<{heading_tag}>{escape(name)}</{heading_tag}>"
    shown_indices = sorted(_select_shown_lines(lines))
    items = []
    for previous, index in zip([-1, *shown_indices], [*shown_indices, len(lines)], strict=True):
        if num_omitted := index - previous - 1:
            noun = "line" if num_omitted == 1 else "lines"
            items.append(f'<div class="left-out">{num_omitted:,} {noun} left out</div>')
        items += [_render_line(line, prefix) for line in lines[index : index + 1]]
    lines_group = f'<div class="lines" role="group" aria-label="{escape(name)}">{"".join(items)}</div>'
    return f'<section data-level="{escape(name)}">{heading}{lines_group}</section>'


def _select_shown_lines(lines: list[_CodeLine]) -> set[int]:
    """Return the indices of the shown lines; see the module's docstring for long columns."""
    if len(lines) <= MAX_COLUMN_LINES:
        return set(range(len(lines)))
    lines_by_statement: Counter[int] = Counter()
    first_lines: list[int] = []
    statement_lines: list[int] = []
    for index, line in enumerate(lines):
        if line.statements:
            statement_lines += range(max(0, index - _CONTEXT_LINES), min(len(lines), index + _CONTEXT_LINES + 1))
            if any(lines_by_statement[statement] < _LINES_PER_STATEMENT for statement in line.statements):
                first_lines.append(index)
            lines_by_statement.update(line.statements)
    essential_lines = [index for index, line in enumerate(lines) if line.is_essential]
    return set(list(dict.fromkeys([*first_lines, *essential_lines, *statement_lines]))[:MAX_COLUMN_LINES])


def _render_line(line: _CodeLine, prefix: str) -> str:
    stripped = line.text.lstrip()
    text = " " * ((len(line.text) - len(stripped)) // 2) + stripped  # halved indentation leaves room in deep loops
    text = text if len(text) <= _MAX_LINE_CHARACTERS else text[: _MAX_LINE_CHARACTERS - 1] + "…"
    groups = " ".join(f"{prefix}{number}" for number in sorted(line.statements))
    link_attributes = f' data-groups="{groups}" tabindex="0"' if groups else ""
    cost = f"<small>{escape(line.cost)}</small>" if line.cost else ""
    return f"<div{link_attributes}><b>{escape(line.label)}</b><code>{escape(text)}</code>{cost}</div>"
