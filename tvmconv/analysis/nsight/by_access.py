"""What is counted of a kernel, access by access, each with the instructions that it became.

An access is a statement's to global or shared memory. Statements of one body to shared memory are one, as the compiler
merges what they access (`merged`); of instructions by name, which it moves and of which it makes one where they are
alike, all those of a body that load or store.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tvmconv.analysis.lowered.tir import has_instructions, statements
from tvmconv.analysis.machine_code.linked import linked
from tvmconv.analysis.machine_code.merged import bodies
from tvmconv.analysis.machine_code.mix import ACCESSES
from tvmconv.analysis.memory.banks import SharedAccess
from tvmconv.compiler.lines import tir_lines
from tvmconv.errors import AnalysisError, CompileError

if TYPE_CHECKING:
    from tvmconv.analysis.machine_code.linked import Linked
    from tvmconv.analysis.memory.coalescing import GlobalAccess
    from tvmconv.analysis.nsight.source_view import Executed
    from tvmconv.compiler.lower import LoweredStep
    from tvmconv.kernel import Kernel

SECTORS, TAGS, WAVEFRONTS = "sectors", "tags", "wavefronts"


@dataclass
class ByAccess:
    """One access, over a launch.

    Attributes:
        space: global or shared.
        kind: load or store.
        arrays: that it accesses, by name.
        line: of the stage `lowered`; None where it is not known.
        counts: sectors, tags (lines that L1 looks up), wavefronts.
        rows: its instructions, by their place in the machine code.
    """

    space: str
    kind: str
    arrays: list[str] = field(default_factory=list)
    line: int | None = None
    counts: dict[str, float] = field(default_factory=dict)
    rows: list[int] = field(default_factory=list)

    def measured(self, launch: Sequence[Executed]) -> Counter[str]:
        """What a launch took for it, by the names of `counts`."""
        found: Counter[str] = Counter()
        for row in self.rows:
            each = launch[row]
            if self.space == "shared":
                found[WAVEFRONTS] += each.wavefronts
            else:
                found[SECTORS] += each.sectors
                found[TAGS] += each.tags
        return found


class Accesses:
    """Adds up what is counted of the accesses of a step.

    Args:
        kernel: for an NVIDIA architecture.
        step: one of its steps.
    """

    def __init__(self, kernel: Kernel, step: LoweredStep) -> None:
        self._found: defaultdict[tuple[str, str, int | None], ByAccess]
        self._found = defaultdict(lambda: ByAccess("", ""))
        self._first = _first_of_loops(step) if has_instructions(step.function) else _first_of_bodies(step)
        self._linked: Linked | None = None
        with contextlib.suppress(CompileError):  # there is no disassembler
            (self._linked,) = (each for each in linked(kernel) if each.step is step)

    def add(self, accesses: Iterable[SharedAccess | GlobalAccess], blocks: float) -> None:
        """Take the accesses of one block into account, which stands for so many."""
        for access in accesses:
            if isinstance(access, SharedAccess):
                space, name, took = "shared", access.buffer, {WAVEFRONTS: access.wavefronts}
            else:
                space, name, took = "global", access.array, {SECTORS: access.sectors, TAGS: access.lines}
            one = self._one(space, access.kind, access.statement)
            if name not in one.arrays:
                one.arrays.append(name)
            for unit, count in took.items():
                one.counts[unit] = one.counts.get(unit, 0.0) + count * blocks

    def all(self) -> list[ByAccess]:
        """All, in the order of the text; what is of no statement that is known comes last."""
        if self._linked:
            for row, instruction in enumerate(self._linked.listing):
                for (space, kind), opcodes in ACCESSES.items():
                    if instruction.opcode in opcodes:
                        self._one(space, kind, self._linked.statement(instruction)).rows.append(row)
        return sorted(self._found.values(), key=lambda each: (each.line is None, each.line, each.space, each.kind))

    def _one(self, space: str, kind: str, statement: int | None) -> ByAccess:
        one = self._found[space, kind, self._first.get((space, kind, statement), statement)]
        one.space, one.kind = space, kind
        lines = self._linked.lowered.get(statement) if self._linked and statement is not None else None
        if one.line is None and lines:
            one.line = lines.start
        return one


_First = dict[tuple[str, str, int | None], int]


def _first_of_bodies(step: LoweredStep) -> _First:
    """The first statement of the body that a statement is of, for its shared accesses of a kind."""
    return {
        ("shared", kind, access.statement): own[0].statement
        for (kind, _), own in bodies(step.function).items()
        for access in own
    }


def _first_of_loops(step: LoweredStep) -> _First:
    """The first statement with the same loops around it as a statement, for all its accesses; else the first of all."""
    try:
        around = [tuple(loop for loop, _, _ in scope.loops) for _, scope in statements(step.function)]
    except AnalysisError:  # it has loops of other kinds, which are not told apart
        around = [()] * len(tir_lines(step.function) or ())
    return {
        (space, kind, number): around.index(loops) for number, loops in enumerate(around) for space, kind in ACCESSES
    }
