"""What the accesses of a kernel cost, with the line that each is in and the width that the compiler made of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from tvmconv.analysis.banks import shared_accesses
from tvmconv.analysis.coalescing import global_accesses
from tvmconv.analysis.linked import Linked
from tvmconv.analysis.mix import widths
from tvmconv.kernel import Kernel
from tvmconv.reports.tables import NOTHING, Table, significant

WORST = 3  # accesses that are named at the end
_FEW = 3  # lines that are told of one access
_WIDE = 120  # characters of a line that are shown


@dataclass(frozen=True)
class Cost:
    """An access, or several that are alike: what it takes of its unit, and what it has to.

    Attributes:
        memory: shared or global.
        array: the name of the buffer or the array, and of the step where there are several.
        kind: load or store.
        nbytes: that a thread accesses in the text.
        unit: wavefronts or sectors.
        requests: of warps, in one block.
        takes: of the unit, in one block.
        least: that would do.
        lines: of the stage `lowered`.
        widths: what the compiler made: instructions by name, such as `LDS.128`, and how many.
        places: of the text.
    """

    memory: Literal["shared", "global"]
    array: str
    kind: Literal["load", "store"]
    nbytes: int
    unit: str
    requests: int
    takes: int
    least: int
    lines: tuple[int, ...] = ()
    widths: Counter[str] = field(default_factory=Counter)
    places: int = 1

    @property
    def times(self) -> float:
        """How many times as much as it has to."""
        return self.takes / self.least if self.least else 1.0

    @property
    def alike(self) -> tuple[str, str, str, int, float]:
        """The same for accesses of which one line tells as much as several."""
        return self.memory, self.array, self.kind, self.nbytes, self.times

    def with_another(self, other: Cost) -> Cost:
        """Both together; the instructions of one line count once."""
        added = {name: getattr(self, name) + getattr(other, name) for name in ("requests", "takes", "least", "places")}
        if set(other.lines) <= set(self.lines):
            return replace(self, **added)
        return replace(self, **added, lines=self.lines + other.lines, widths=self.widths + other.widths)


def costs(kernel: Kernel, linked: list[Linked] | None) -> list[Cost]:
    """The accesses of a kernel's steps in one block, those that are alike together.

    Args:
        kernel: for an NVIDIA architecture.
        linked: its statements; without them neither lines nor widths are told.

    Raises:
        AnalysisError: what the kernel does cannot be counted.
    """
    found: dict[tuple[str, str, str, int, float], Cost] = {}
    for cost in _each(kernel, linked):
        found[cost.alike] = found[cost.alike].with_another(cost) if cost.alike in found else cost
    return list(found.values())


def costs_text(kernel: Kernel, found: list[Cost]) -> str:
    """What accesses cost as a table, and below it those that cost most beyond what they have to."""
    headers = ("memory", "array", "access", "bytes", "line", "as", "places", "requests", "takes", "of", "at least", "×")
    rows = [
        (
            *(each.memory, each.array, each.kind, str(each.nbytes), _lines(each.lines), _made(each), str(each.places)),
            *(f"{each.requests:,}", f"{each.takes:,}", each.unit, f"{each.least:,}", significant(each.times)),
        )
        for each in found
    ]
    table = Table(headers, rows, left=frozenset({"memory", "array", "access", "as", "of"}))
    lines = ["One block (lines of `--stage lowered`, and what the compiler made of them):", table.text()]
    shown = kernel.stage("lowered").split("\n")
    for number, each in enumerate(worst(found)):
        lines += ["Most is lost by"] if number == 0 else []
        lines.append(f"  {each.kind} of {each.array}: {each.takes:,} {each.unit}, {each.least:,} would do")
        lines += [f"    {line}: {_cut(shown[line - 1].strip())}" for line in each.lines[:1]]
    return "\n".join(lines)


def worst(found: list[Cost]) -> list[Cost]:
    """The accesses that cost most beyond what they have to, at most `WORST`."""
    losing = [each for each in found if each.takes > each.least]
    return sorted(losing, key=lambda each: each.least - each.takes)[:WORST]


def _each(kernel: Kernel, linked: list[Linked] | None) -> Iterator[Cost]:
    for place, step in enumerate(kernel.steps):
        of = f" of {step.name}" if len(kernel.steps) > 1 else ""
        own = linked[place] if linked else None
        for held in shared_accesses(kernel, step):
            numbers = (held.requests, held.wavefronts, held.least)
            cost = Cost("shared", held.buffer + of, held.kind, held.nbytes, "wavefronts", *numbers)
            yield _linked(cost, own, held.statement)
        for touched in global_accesses(kernel, step):
            numbers = (touched.requests, touched.sectors, touched.least)
            cost = Cost("global", touched.array + of, touched.kind, touched.nbytes, "sectors", *numbers)
            yield _linked(cost, own, touched.statement)


def _linked(cost: Cost, own: Linked | None, statement: int) -> Cost:
    if own is None or statement not in own.lowered:
        return cost
    made = widths(own.by_statement.get(statement, ()), cost.memory, cost.kind)
    return replace(cost, lines=(own.lowered[statement].start,), widths=Counter(made))


def _made(cost: Cost) -> str:
    """The instructions of an access, the most frequent first."""
    return " ".join(name if count == 1 else f"{count}×{name}" for name, count in cost.widths.most_common()) or NOTHING


def _lines(lines: tuple[int, ...]) -> str:
    return ",".join(map(str, lines[:_FEW])) + ("…" if len(lines) > _FEW else "") if lines else NOTHING


def _cut(line: str) -> str:
    return line if len(line) <= _WIDE else line[: _WIDE - 1] + "…"
