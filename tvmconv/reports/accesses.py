"""What the accesses of a kernel cost, with the line that each is in and the width that the compiler made of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from tvmconv.analysis.asked import asked_by
from tvmconv.analysis.machine_code.linked import Linked
from tvmconv.analysis.machine_code.mix import widths
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
        nbytes: that a thread accesses at once, at most.
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
    for _, cost in _placed(kernel, linked):
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


class Governing:
    """Of the accesses of a kernel that cost most, which of the steps of its knobs changes the cost most.

    Args:
        kernel: that steps are taken from.
    """

    def __init__(self, kernel: Kernel) -> None:
        self._names = [(each.memory, each.array, each.kind, each.unit) for each in worst(costs(kernel, None))]
        self._now = _whole(kernel)
        self._steps: list[tuple[str, Counter[tuple[str, str, str]]]] = []

    def look(self, step: str, kernel: Kernel) -> None:
        """Take a step into account, of which the kernel came."""
        self._steps.append((step, _whole(kernel)))

    def lines(self) -> list[str]:
        """For each access the step that changes it most, and to what; nothing of those that no step changes."""
        found = []
        for *name, unit in self._names:
            memory, array, kind = key = name[0], name[1], name[2]
            now = self._now[key]
            changes = [(abs(then[key] - now), step, then[key]) for step, then in self._steps if then[key]]
            if changes and max(changes)[0]:
                _, step, then = max(changes)
                found.append(f"  {kind} of {array}, {memory} memory: {step} makes {then:,} {unit} of {now:,}")
        return ["What governs the accesses that lose most, of the whole kernel:", *found] if found else []


def _whole(kernel: Kernel) -> Counter[tuple[str, str, str]]:
    """What the accesses to each array take in all blocks, by memory, array and kind."""
    taken: Counter[tuple[str, str, str]] = Counter()
    blocks = {place: step.launch.blocks for place, step in enumerate(kernel.steps)}
    for place, cost in _placed(kernel, None):
        taken[cost.memory, cost.array, cost.kind] += cost.takes * blocks[place]
    return taken


def _placed(kernel: Kernel, linked: list[Linked] | None) -> Iterator[tuple[int, Cost]]:
    """Each access with the place of its step."""
    for place, step in enumerate(kernel.steps):
        of = f" of {step.name}" if len(kernel.steps) > 1 else ""
        own = linked[place] if linked else None
        done = asked_by(kernel, step)
        for held in done.shared:
            numbers = (held.requests, held.wavefronts, held.least)
            cost = Cost("shared", held.buffer + of, held.kind, held.nbytes, "wavefronts", *numbers)
            yield place, _linked(cost, own, held.statement)
        for touched in done.touched:
            numbers = (touched.requests, touched.sectors, touched.least)
            cost = Cost("global", touched.array + of, touched.kind, touched.nbytes, "sectors", *numbers)
            yield place, _linked(cost, own, touched.statement)


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
