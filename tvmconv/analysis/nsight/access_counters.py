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

from tvmconv.analysis.memory.bank_conflicts import is_shared
from tvmconv.analysis.sass.instruction_mix import ACCESSES
from tvmconv.analysis.sass.interpreter.request_counts import list_array_names
from tvmconv.analysis.tir.accesses import Access, iterate_accesses
from tvmconv.analysis.tir.scopes import has_instructions, iterate_statements
from tvmconv.compiler.source_lines import map_tir_lines
from tvmconv.errors import AnalysisError

if TYPE_CHECKING:
    from tvmconv.analysis.nsight.source_view import ProfiledInstruction
    from tvmconv.analysis.sass.interpreter.request_counts import LaunchCounts
    from tvmconv.analysis.sass.linked_sources import LinkedSources
    from tvmconv.compiler.lowered_module import LoweredKernel
    from tvmconv.kernel import Kernel

SECTORS, TAGS, WAVEFRONTS = "sectors", "tags", "wavefronts"
_COUNT_FIELDS = {SECTORS: "num_sectors", TAGS: "num_lines", WAVEFRONTS: "num_wavefronts"}


@dataclass
class AccessCounters:
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

    def sum_measured(self, launch: Sequence[ProfiledInstruction]) -> Counter[str]:
        """What a launch took for it, by the names of `counts`."""
        totals: Counter[str] = Counter()
        for instruction_index in self.rows:
            instruction = launch[instruction_index]
            if self.space == "shared":
                totals[WAVEFRONTS] += instruction.num_wavefronts
            else:
                totals[SECTORS] += instruction.num_sectors
                totals[TAGS] += instruction.num_tags
        return totals


def group_by_access(kernel: Kernel, sources: LinkedSources, launch_counts: LaunchCounts) -> list[AccessCounters]:
    """What is counted of the accesses of a step, in the order of the text; what is of no known statement comes last.

    Args:
        kernel: for an NVIDIA architecture.
        sources: one of its steps, with its machine code.
        launch_counts: what its instructions ask.
    """
    access_names = (
        _group_instructions(sources.lowered_kernel)
        if has_instructions(sources.lowered_kernel.function)
        else _group_by_body(sources.lowered_kernel)
    )
    array_names_by_index = list_array_names(kernel, sources.lowered_kernel)
    counters_by_access: defaultdict[tuple[str, str, int | None], AccessCounters] = defaultdict(
        lambda: AccessCounters("", "")
    )
    for instruction_index, (instruction, instruction_counts) in enumerate(
        zip(sources.listing, launch_counts.instruction_counts, strict=True)
    ):
        for (space, kind), opcodes in ACCESSES.items():
            if instruction.opcode not in opcodes:
                continue
            statement = sources.find_statement(instruction)
            first_statement, buffers = access_names.get((space, kind, statement), (statement, ()))
            counters = counters_by_access[space, kind, first_statement]
            counters.space, counters.kind = space, kind
            counters.rows.append(instruction_index)
            for name in (
                [array_names_by_index[index] for index in sorted(instruction_counts.array_indices)]
                if space == "global"
                else buffers
            ):
                if name not in counters.arrays:
                    counters.arrays.append(name)
            if statement is not None and (lines := sources.lowered_lines.get(statement)):
                counters.line = lines.start if counters.line is None else min(counters.line, lines.start)
            for unit in (WAVEFRONTS,) if space == "shared" else (SECTORS, TAGS):
                counters.counts[unit] = (
                    counters.counts.get(unit, 0.0)
                    + getattr(instruction_counts, _COUNT_FIELDS[unit]) / launch_counts.block_fraction
                )
    return sorted(
        counters_by_access.values(),
        key=lambda counters_entry: (
            counters_entry.line is None,
            counters_entry.line,
            counters_entry.space,
            counters_entry.kind,
        ),
    )


# Of a space, a kind and a statement: the first statement of the same access, and its shared buffers.
_AccessNames = dict[tuple[str, str, int | None], tuple[int, tuple[str, ...]]]


def _group_by_body(lowered_kernel: LoweredKernel) -> _AccessNames:
    """The shared accesses of a kind with the same loops around them are one."""
    bodies: defaultdict[tuple[str, tuple[Any, ...]], list[Access]] = defaultdict(list)
    for access in iterate_accesses(lowered_kernel.function, is_shared):
        bodies[access.kind, tuple(variable for variable, _, _ in access.scope.loops)].append(access)
    access_names: _AccessNames = {}
    for (kind, _), body_accesses in bodies.items():
        buffers = tuple(dict.fromkeys(str(access.buffer.name) for access in body_accesses))
        for access in body_accesses:
            access_names["shared", kind, access.statement_index] = body_accesses[0].statement_index, buffers
    return access_names


def _group_instructions(lowered_kernel: LoweredKernel) -> _AccessNames:
    """All accesses of a kind with the same loops around them are one; else all."""
    try:
        loops_by_statement = [
            tuple(loop for loop, _, _ in scope.loops) for _, scope in iterate_statements(lowered_kernel.function)
        ]
    except AnalysisError:  # it has loops of other kinds, which are not told apart
        loops_by_statement = [()] * len(map_tir_lines(lowered_kernel.function) or ())
    return {
        (space, kind, statement_index): (loops_by_statement.index(loops), ("shared",))
        for statement_index, loops in enumerate(loops_by_statement)
        for space, kind in ACCESSES
    }
