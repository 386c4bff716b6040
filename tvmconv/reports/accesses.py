"""The costs of a kernel's memory accesses, with the source line and the machine instructions of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from tvmconv.analysis.block_accesses import count_block_accesses
from tvmconv.analysis.sass.instruction_mix import count_access_widths
from tvmconv.analysis.sass.linked_sources import LinkedSources
from tvmconv.kernel import Kernel
from tvmconv.reports.tables import Columns, Table, TableFormatter, format_significant, make_table

MAX_WORST_ACCESSES = 3  # accesses listed below the table
_MAX_LISTED_LINES = 3  # line numbers per access
_MAX_LINE_CHARACTERS = 120  # longer lines are truncated


@dataclass(frozen=True)
class AccessCost:
    """The cost in one block of an access, or of several similar ones."""

    memory: Literal["shared", "global"]
    array: str  # name of the buffer or array, with that of the device function if there are several
    kind: Literal["load", "store"]
    access_bytes: int  # largest number of bytes that a thread accesses at once
    unit: str  # "wavefronts" or "sectors"
    requests: int  # of warps
    units_taken: int
    min_units: int  # for the same bytes
    lines: tuple[int, ...] = ()  # at the IR level `lowered`
    widths: Counter[str] = field(default_factory=Counter)  # machine instructions by name, such as `LDS.128`
    num_occurrences: int = 1  # such accesses in the TIR

    @property
    def cost_ratio(self) -> float:
        """Units taken divided by the minimum."""
        return self.units_taken / self.min_units if self.min_units else 1.0

    def merge(self, other: AccessCost) -> AccessCost:
        """Return the sum of two costs; instructions of one line count once."""
        is_known_line = set(other.lines) <= set(self.lines)
        return replace(
            self,
            requests=self.requests + other.requests,
            units_taken=self.units_taken + other.units_taken,
            min_units=self.min_units + other.min_units,
            num_occurrences=self.num_occurrences + other.num_occurrences,
            lines=self.lines if is_known_line else self.lines + other.lines,
            widths=self.widths if is_known_line else self.widths + other.widths,
        )


def compute_access_costs(kernel: Kernel, linked_sources: Sequence[LinkedSources] | None) -> list[AccessCost]:
    """Return the costs of a kernel's accesses in one block; similar accesses are merged. Without linked sources, lines
    and instructions are unknown. If the kernel's operations cannot be counted, AnalysisError is raised.
    """
    costs: dict[tuple[str, str, str, int, float], AccessCost] = {}
    for _, cost in _iterate_access_costs(kernel, linked_sources):
        key = cost.memory, cost.array, cost.kind, cost.access_bytes, cost.cost_ratio
        costs[key] = costs[key].merge(cost) if key in costs else cost
    return list(costs.values())


def sum_kernel_costs(kernel: Kernel) -> Counter[tuple[str, str, str]]:
    """Return the units taken by the accesses to each array in all blocks, by memory, array and kind."""
    costs_by_access: Counter[tuple[str, str, str]] = Counter()
    for kernel_index, cost in _iterate_access_costs(kernel, None):
        num_blocks = kernel.kernels[kernel_index].launch.num_blocks
        costs_by_access[cost.memory, cost.array, cost.kind] += cost.units_taken * num_blocks
    return costs_by_access


def _iterate_access_costs(
    kernel: Kernel, linked_sources: Sequence[LinkedSources] | None
) -> Iterator[tuple[int, AccessCost]]:
    """Yield each access with the index of its device function."""
    for kernel_index, lowered_kernel in enumerate(kernel.kernels):
        kernel_suffix = f" of {lowered_kernel.name}" if len(kernel.kernels) > 1 else ""
        sources = linked_sources[kernel_index] if linked_sources else None
        counts = count_block_accesses(kernel, lowered_kernel)
        for shared in counts.shared_accesses:
            amounts = shared.num_requests, shared.wavefronts, shared.min_wavefronts
            array = shared.buffer + kernel_suffix
            cost = AccessCost("shared", array, shared.kind, shared.nbytes, "wavefronts", *amounts)
            yield kernel_index, _add_source_lines(cost, sources, shared.statement_index)
        for access in counts.global_accesses:
            amounts = access.num_requests, access.sectors, access.min_sectors
            array = access.array + kernel_suffix
            cost = AccessCost("global", array, access.kind, access.nbytes, "sectors", *amounts)
            yield kernel_index, _add_source_lines(cost, sources, access.statement_index)


def _add_source_lines(cost: AccessCost, sources: LinkedSources | None, statement: int) -> AccessCost:
    if sources is None or statement not in sources.lowered_lines:
        return cost
    widths = count_access_widths(sources.instructions_by_statement.get(statement, ()), cost.memory, cost.kind)
    return replace(cost, lines=(sources.lowered_lines[statement].start,), widths=Counter(widths))


def format_access_costs(
    kernel: Kernel, access_costs: Sequence[AccessCost], formatter: TableFormatter = Table.format_text
) -> str:
    """Return a table of access costs, followed by the accesses that exceed their minimum most. The excess is what an
    access takes, divided by the least that it could take. `formatter` returns the table as text.
    """
    columns: Columns = {
        "memory": lambda cost: cost.memory,
        "array": lambda cost: cost.array,
        "access": lambda cost: cost.kind,
        "bytes": lambda cost: str(cost.access_bytes),
        "line": lambda cost: _format_lines(cost.lines),
        "as": lambda cost: _format_instructions(cost.widths),
        "places": lambda cost: str(cost.num_occurrences),
        "requests": lambda cost: f"{cost.requests:,}",
        "takes": lambda cost: f"{cost.units_taken:,}",
        "of": lambda cost: cost.unit,
        "at least": lambda cost: f"{cost.min_units:,}",
        "excess": lambda cost: format_significant(cost.cost_ratio),
    }
    table = make_table(access_costs, columns, {"memory", "array", "access", "as", "of"})
    table = replace(table, optional=("places", "bytes", "requests", "of", "at least"))
    lines = ["One block (lines of `--stage lowered`, and the instructions that the compiler generated):"]
    lines.append(formatter(table))
    lowered_lines = kernel.format_ir_level("lowered").split("\n")
    for index, cost in enumerate(select_worst(access_costs)):
        lines += ["Largest excess"] if index == 0 else []
        lines.append(f"  {cost.kind} of {cost.array}: {cost.units_taken:,} {cost.unit}, at least {cost.min_units:,}")
        lines += [f"    {line}: {_truncate(lowered_lines[line - 1].strip())}" for line in cost.lines[:1]]
    return "\n".join(lines)


def select_worst(access_costs: Sequence[AccessCost]) -> list[AccessCost]:
    """Return the accesses that exceed their minimum most, at most `MAX_WORST_ACCESSES`."""
    wasteful_costs = [cost for cost in access_costs if cost.units_taken > cost.min_units]
    return sorted(wasteful_costs, key=lambda cost: cost.min_units - cost.units_taken)[:MAX_WORST_ACCESSES]


def _format_instructions(widths: Counter[str]) -> str | None:
    """Return the instructions of an access, the most frequent first."""
    return " ".join(name if count == 1 else f"{count}×{name}" for name, count in widths.most_common()) or None


def _format_lines(lines: Sequence[int]) -> str | None:
    ellipsis = "…" if len(lines) > _MAX_LISTED_LINES else ""
    return ",".join(map(str, lines[:_MAX_LISTED_LINES])) + ellipsis or None


def _truncate(line: str) -> str:
    return line if len(line) <= _MAX_LINE_CHARACTERS else line[: _MAX_LINE_CHARACTERS - 1] + "…"
