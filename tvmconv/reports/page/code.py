"""The page's code: declaration, scheduled TIR, CUDA and machine code side by side, line by line.

A line that is of statements has their groups, by which the page lights what belongs together, and its cost beside it.
Of long texts some lines of each statement are shown, of machine code the inner loop, then the rest that statements
have; what is left out is told.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from html import escape

from tvmconv.analysis.asked import asked_by
from tvmconv.analysis.machine_code.linked import Linked, linked
from tvmconv.analysis.machine_code.mix import inner_loop, reachable
from tvmconv.errors import AnalysisError, CompileError
from tvmconv.kernel import Kernel

MOST_LINES = 400  # of a column that are shown for one step
_AROUND = 1  # lines that are shown on either side of one that a statement has
_OF_EACH = 4  # lines of each statement that are shown before all others
_WIDE = 160  # characters of a line that are shown


@dataclass
class _Line:
    """A line of a column: its number or address, its text, the statements that it is of, and what it costs."""

    label: str
    text: str
    statements: set[int] = field(default_factory=set)
    cost: str = ""
    kept: bool = False  # even where the column is too long


def code(kernel: Kernel, number: int) -> str:
    """The columns of a kernel's code, for each of its steps.

    Args:
        kernel: for an NVIDIA architecture.
        number: of the kernel on the page, as in the ids of its statements' groups.

    Returns:
        HTML; the same for the same kernel.
    """
    try:
        found = linked(kernel)
    except CompileError as error:
        return f"<p>The code cannot be shown: {escape(str(error))}</p>"
    parts = []
    for place, own in enumerate(found):
        title = f"<h4>{escape(own.step.name)}</h4>" if len(found) > 1 else ""
        columns = "".join(
            _column(name, lines, f"k{number}s{place}n") for name, lines in _columns(kernel, own, place).items()
        )
        parts.append(f'{title}<div class="columns code">{columns}</div>')
    return "".join(parts)


def _columns(kernel: Kernel, own: Linked, place: int) -> dict[str, list[_Line]]:
    """The lines of each column."""
    memory = _memory(kernel, place)
    instructions = {n: Counter(instructions=len(each)) for n, each in own.by_statement.items() if n is not None}
    inside = _span(own.source)
    return {
        "TE": _lines(kernel.stage("te"), own.declared, {}),
        "scheduled TIR": _lines(kernel.stage("tir"), own.scheduled, memory),
        "CUDA": [
            line
            for line in _lines(
                kernel.stage("source"),
                {number: (lines,) for number, lines in own.source.items()},
                instructions,
            )
            if int(line.label) in inside
        ],
        "SASS": list(_machine_code(own)),
    }


def _span(lines: Mapping[int, range]) -> range:
    """From the first of some lines to the last."""
    return range(min((e.start for e in lines.values()), default=1), max((e.stop for e in lines.values()), default=1))


def _lines(text: str, statements: Mapping[int, Iterable[range]], costs: Mapping[int, Counter[str]]) -> list[_Line]:
    """A text's lines with their statements; the cost of statements is told at the first line of each."""
    lines = [_Line(str(number), line) for number, line in enumerate(text.split("\n"), 1)]
    told: defaultdict[int, Counter[str]] = defaultdict(Counter)
    for number, ranges in statements.items():
        for each in ranges:
            for line in each:
                lines[line - 1].statements.add(number)
            if number in costs:
                told[each.start] += costs[number]
    for line, found in told.items():
        lines[line - 1].cost = ", ".join(f"{count:,} {unit}" for unit, count in found.items())
    return lines


def _memory(kernel: Kernel, place: int) -> dict[int, Counter[str]]:
    """What each statement's accesses take in one block; none where that cannot be counted."""
    step = kernel.steps[place]
    taken: defaultdict[int, Counter[str]] = defaultdict(Counter)
    try:
        done = asked_by(kernel, step)
        for held in done.shared:
            taken[held.statement]["wavefronts"] += held.wavefronts
        for touched in done.touched:
            taken[touched.statement]["sectors"] += touched.sectors
    except AnalysisError:
        return {}
    return taken


def _machine_code(own: Linked) -> Iterator[_Line]:
    loop = inner_loop(own.listing)
    inside = loop.inside if loop else frozenset()
    for place, each in enumerate(reachable(own.listing)):
        statement = own.statement(each)
        mark = "loop" if place in inside else ""
        found = set() if statement is None else {statement}
        yield _Line(f"{each.address:04x}", each.text, found, mark, kept=place in inside)


def _column(name: str, lines: list[_Line], prefix: str) -> str:
    """A column; a long one is shown in part."""
    shown = _shown(lines)
    items, hidden = [], 0
    for place, line in enumerate(lines):
        if place not in shown:
            hidden += 1
            continue
        items += [_left_out(hidden)] if hidden else []
        hidden = 0
        items.append(_item(line, prefix))
    items += [_left_out(hidden)] if hidden else []
    return f"<section><h5>{escape(name)}</h5><ol>{''.join(items)}</ol></section>"


def _shown(lines: list[_Line]) -> set[int]:
    """Which lines are shown: of a long column some of each statement, the inner loop, then the rest of statements."""
    if len(lines) <= MOST_LINES:
        return set(range(len(lines)))
    seen: Counter[int] = Counter()
    first: list[int] = []
    own: list[int] = []
    for place, line in enumerate(lines):
        if line.statements:
            own += range(max(0, place - _AROUND), min(len(lines), place + _AROUND + 1))
            first += [place] if any(seen[each] < _OF_EACH for each in line.statements) else []
            seen.update(line.statements)
    kept = [place for place, line in enumerate(lines) if line.kept]
    return set(list(dict.fromkeys([*first, *kept, *own]))[:MOST_LINES])


def _left_out(count: int) -> str:
    return f'<li class="left-out">{count:,} lines left out</li>'


def _item(line: _Line, prefix: str) -> str:
    bare = line.text.lstrip()
    text = " " * ((len(line.text) - len(bare)) // 2) + bare  # deep loops would leave no room
    text = text if len(text) <= _WIDE else text[: _WIDE - 1] + "…"
    groups = " ".join(f"{prefix}{number}" for number in sorted(line.statements))
    linking = f' data-groups="{groups}" tabindex="0"' if groups else ""
    cost = f"<small>{escape(line.cost)}</small>" if line.cost else ""
    return f"<li{linking}><b>{escape(line.label)}</b><code>{escape(text)}</code>{cost}</li>"
