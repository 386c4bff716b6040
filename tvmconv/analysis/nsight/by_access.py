"""What is counted of a kernel, access by access, each with the instructions that it became.

An access is a statement's to global or shared memory. Statements of one body to shared memory are one, as the compiler
merges what they access; of instructions by name, which it moves and of which it makes one where they are
alike, all those of a body that load or store.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tvmconv.analysis.lowered.accesses import Access, accesses
from tvmconv.analysis.lowered.tir import has_instructions, statements
from tvmconv.analysis.machine_code.executed.asked import array_names
from tvmconv.analysis.machine_code.mix import ACCESSES
from tvmconv.analysis.memory.banks import is_shared
from tvmconv.compiler.lines import tir_lines
from tvmconv.errors import AnalysisError

if TYPE_CHECKING:
    from tvmconv.analysis.machine_code.executed.asked import Grid
    from tvmconv.analysis.machine_code.linked import Linked
    from tvmconv.analysis.nsight.source_view import Executed
    from tvmconv.compiler.lowered import LoweredStep
    from tvmconv.kernel import Kernel

SECTORS, TAGS, WAVEFRONTS = "sectors", "tags", "wavefronts"
_COUNTS = {SECTORS: "sectors", TAGS: "lines", WAVEFRONTS: "wavefronts"}


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


def by_access(kernel: Kernel, own: Linked, grid: Grid) -> list[ByAccess]:
    """What is counted of the accesses of a step, in the order of the text; what is of no known statement comes last.

    Args:
        kernel: for an NVIDIA architecture.
        own: one of its steps, with its machine code.
        grid: what its instructions ask.
    """
    named = _named_by_instructions(own.step) if has_instructions(own.step.function) else _first_of_bodies(own.step)
    names = array_names(kernel, own.step)
    found: defaultdict[tuple[str, str, int | None], ByAccess] = defaultdict(lambda: ByAccess("", ""))
    for row, (instruction, counts) in enumerate(zip(own.listing, grid.counts, strict=True)):
        for (space, kind), opcodes in ACCESSES.items():
            if instruction.opcode not in opcodes:
                continue
            statement = own.statement(instruction)
            first, buffers = named.get((space, kind, statement), (statement, ()))
            one = found[space, kind, first]
            one.space, one.kind = space, kind
            one.rows.append(row)
            for name in [names[index] for index in sorted(counts.arrays)] if space == "global" else buffers:
                if name not in one.arrays:
                    one.arrays.append(name)
            if statement is not None and (lines := own.lowered.get(statement)):
                one.line = lines.start if one.line is None else min(one.line, lines.start)
            for unit in (WAVEFRONTS,) if space == "shared" else (SECTORS, TAGS):
                one.counts[unit] = one.counts.get(unit, 0.0) + getattr(counts, _COUNTS[unit]) / grid.share
    return sorted(found.values(), key=lambda each: (each.line is None, each.line, each.space, each.kind))


# Of a space, a kind and a statement: the first statement of the same access, and its shared buffers.
_Named = dict[tuple[str, str, int | None], tuple[int, tuple[str, ...]]]


def _first_of_bodies(step: LoweredStep) -> _Named:
    """The shared accesses of a kind with the same loops around them are one."""
    bodies: defaultdict[tuple[str, tuple[Any, ...]], list[Access]] = defaultdict(list)
    for access in accesses(step.function, is_shared):
        bodies[access.kind, tuple(variable for variable, _, _ in access.scope.loops)].append(access)
    found: _Named = {}
    for (kind, _), own in bodies.items():
        buffers = tuple(dict.fromkeys(str(access.buffer.name) for access in own))
        for access in own:
            found["shared", kind, access.statement] = own[0].statement, buffers
    return found


def _named_by_instructions(step: LoweredStep) -> _Named:
    """All accesses of a kind with the same loops around them are one; else all."""
    try:
        around = [tuple(loop for loop, _, _ in scope.loops) for _, scope in statements(step.function)]
    except AnalysisError:  # it has loops of other kinds, which are not told apart
        around = [()] * len(tir_lines(step.function) or ())
    return {
        (space, kind, number): (around.index(loops), ("shared",))
        for number, loops in enumerate(around)
        for space, kind in ACCESSES
    }
