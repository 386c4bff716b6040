"""Counters of a kernel for each memory access, with the SASS instructions that implement it.

An access is one TIR statement's access to global or shared memory. Some statements share an access because the compiler
merges them: those of one loop body that access shared memory, and, for instructions by name, all loads or all stores of
a loop body.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tvmconv.analysis.nsight.ncu import ProfiledInstruction
from tvmconv.analysis.sass.instruction_mix import ACCESSES
from tvmconv.analysis.sass.interpreter.request_counts import LaunchCounts, list_array_names
from tvmconv.analysis.sass.linked_sources import LinkedSources
from tvmconv.analysis.tir.accesses import Access, is_shared, iterate_accesses
from tvmconv.analysis.tir.scopes import has_instructions, iterate_statements
from tvmconv.compiler.lowered_module import LoweredKernel
from tvmconv.compiler.source_lines import map_tir_lines
from tvmconv.errors import AnalysisError
from tvmconv.kernel import Kernel

SECTORS, TAGS, WAVEFRONTS = "sectors", "tags", "wavefronts"
_COUNT_FIELDS = {SECTORS: "num_sectors", TAGS: "num_lines", WAVEFRONTS: "num_wavefronts"}


@dataclass
class AccessCounters:
    """Counters of one access over a launch."""

    space: str  # "global" or "shared"
    kind: str  # "load" or "store"
    arrays: list[str] = field(default_factory=list)  # names of the accessed arrays
    line: int | None = None  # line of the lowered TIR; None if it is unknown
    # sectors, tags (lines that L1 looks up) and wavefronts
    counts: dict[str, float] = field(default_factory=dict)
    rows: list[int] = field(default_factory=list)  # indices of the access's instructions in the machine code

    def sum_measured(self, launch: Sequence[ProfiledInstruction]) -> Counter[str]:
        """Return the measured counts of a launch for this access, by the names of `counts`."""
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
    """Return the counters of a device kernel's accesses in the order of the TIR, with unknown statements last."""
    group = _group_instructions if has_instructions(sources.lowered_kernel.function) else _group_by_body
    access_names = group(sources.lowered_kernel)
    array_names = list_array_names(kernel, sources.lowered_kernel)
    counters_by_access: dict[tuple[str, str, int | None], AccessCounters] = {}
    instructions = zip(sources.listing, launch_counts.instruction_counts, strict=True)
    for row, (instruction, instruction_counts) in enumerate(instructions):
        for (space, kind), opcodes in ACCESSES.items():
            if instruction.opcode not in opcodes:
                continue
            statement = sources.find_statement(instruction)
            first_statement, names = access_names.get((space, kind, statement), (statement, ()))
            counters = counters_by_access.setdefault((space, kind, first_statement), AccessCounters(space, kind))
            counters.rows.append(row)
            if space == "global":
                names = tuple(array_names[index] for index in sorted(instruction_counts.array_indices))
            counters.arrays += [name for name in names if name not in counters.arrays]
            if statement is not None and (lines := sources.lowered_lines.get(statement)):
                counters.line = lines.start if counters.line is None else min(counters.line, lines.start)
            for unit in (WAVEFRONTS,) if space == "shared" else (SECTORS, TAGS):
                count = getattr(instruction_counts, _COUNT_FIELDS[unit]) / launch_counts.block_fraction
                counters.counts[unit] = counters.counts.get(unit, 0.0) + count
    return sorted(
        counters_by_access.values(),
        key=lambda counters: (counters.line is None, counters.line, counters.space, counters.kind),
    )


# By memory space, kind and statement: the first statement of the same access, and its shared buffers.
_AccessNames = dict[tuple[str, str, int | None], tuple[int, tuple[str, ...]]]


def _group_by_body(lowered_kernel: LoweredKernel) -> _AccessNames:
    """Group the shared accesses of a kind by the loops around them."""
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
    """Group all accesses of a kind by the loops around them, or into one group if the loops are unknown."""
    try:
        statements = iterate_statements(lowered_kernel.function)
        loops_by_statement = [tuple(loop for loop, _, _ in scope.loops) for _, scope in statements]
    except AnalysisError:  # a loop of an unsupported kind
        loops_by_statement = [()] * len(map_tir_lines(lowered_kernel.function) or ())
    return {
        (space, kind, statement_index): (loops_by_statement.index(loops), ("shared",))
        for statement_index, loops in enumerate(loops_by_statement)
        for space, kind in ACCESSES
    }
