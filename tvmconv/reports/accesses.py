"""What the accesses of a kernel cost, with the line that each is in and the width that the compiler made of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from tvmconv.analysis.block_accesses import count_block_accesses
from tvmconv.analysis.sass.instruction_mix import count_access_widths
from tvmconv.analysis.sass.linked_sources import LinkedSources
from tvmconv.kernel import Kernel
from tvmconv.reports.tables import EMPTY_CELL, Table, format_significant

MAX_WORST_ACCESSES = 3  # accesses that are named at the end
_MAX_LISTED_LINES = 3  # lines that are told of one access
_MAX_LINE_CHARACTERS = 120  # characters of a line that are shown


@dataclass(frozen=True)
class AccessCost:
    """An access, or several that are alike: what it takes of its unit, and what it has to.

    Attributes:
        memory: shared or global.
        array: the name of the buffer or the array, and of the step where there are several.
        kind: load or store.
        access_bytes: that a thread accesses at once, at most.
        unit: wavefronts or sectors.
        requests: of warps, in one block.
        units_taken: of the unit, in one block.
        min_units: that would do.
        lines: of the stage `lowered`.
        widths: what the compiler made: instructions by name, such as `LDS.128`, and how many.
        num_occurrences: of the text.
    """

    memory: Literal["shared", "global"]
    array: str
    kind: Literal["load", "store"]
    access_bytes: int
    unit: str
    requests: int
    units_taken: int
    min_units: int
    lines: tuple[int, ...] = ()
    widths: Counter[str] = field(default_factory=Counter)
    num_occurrences: int = 1

    @property
    def cost_ratio(self) -> float:
        """How many times as much as it has to."""
        return self.units_taken / self.min_units if self.min_units else 1.0

    @property
    def similarity_key(self) -> tuple[str, str, str, int, float]:
        """The same for accesses of which one line tells as much as several."""
        return self.memory, self.array, self.kind, self.access_bytes, self.cost_ratio

    def merge(self, other_cost: AccessCost) -> AccessCost:
        """Both together; the instructions of one line count once."""
        sums = {
            name: getattr(self, name) + getattr(other_cost, name)
            for name in ("requests", "units_taken", "min_units", "num_occurrences")
        }
        if set(other_cost.lines) <= set(self.lines):
            return replace(self, **sums)
        return replace(self, **sums, lines=self.lines + other_cost.lines, widths=self.widths + other_cost.widths)


def compute_access_costs(kernel: Kernel, linked_sources: list[LinkedSources] | None) -> list[AccessCost]:
    """The accesses of a kernel's steps in one block, those that are alike together.

    Args:
        kernel: for an NVIDIA architecture.
        linked_sources: its statements; without them neither lines nor widths are told.

    Raises:
        AnalysisError: what the kernel does cannot be counted.
    """
    costs_by_key: dict[tuple[str, str, str, int, float], AccessCost] = {}
    for _, cost in _iterate_access_costs(kernel, linked_sources):
        costs_by_key[cost.similarity_key] = (
            costs_by_key[cost.similarity_key].merge(cost) if cost.similarity_key in costs_by_key else cost
        )
    return list(costs_by_key.values())


def format_access_costs(kernel: Kernel, access_costs: list[AccessCost]) -> str:
    """What accesses cost as a table, and below it those that cost most beyond what they have to."""
    headers = ("memory", "array", "access", "bytes", "line", "as", "places", "requests", "takes", "of", "at least", "×")
    rows = [
        (
            *(
                cost.memory,
                cost.array,
                cost.kind,
                str(cost.access_bytes),
                _format_lines(cost.lines),
                _format_instructions(cost),
                str(cost.num_occurrences),
            ),
            *(
                f"{cost.requests:,}",
                f"{cost.units_taken:,}",
                cost.unit,
                f"{cost.min_units:,}",
                format_significant(cost.cost_ratio),
            ),
        )
        for cost in access_costs
    ]
    table = Table(headers, rows, left_aligned=frozenset({"memory", "array", "access", "as", "of"}))
    lines = ["One block (lines of `--stage lowered`, and what the compiler made of them):", table.format_text()]
    lowered_lines = kernel.format_ir_level("lowered").split("\n")
    for index, cost in enumerate(select_worst(access_costs)):
        lines += ["Most is lost by"] if index == 0 else []
        lines.append(f"  {cost.kind} of {cost.array}: {cost.units_taken:,} {cost.unit}, {cost.min_units:,} would do")
        lines += [f"    {line}: {_truncate(lowered_lines[line - 1].strip())}" for line in cost.lines[:1]]
    return "\n".join(lines)


def select_worst(access_costs: list[AccessCost]) -> list[AccessCost]:
    """The accesses that cost most beyond what they have to, at most `MAX_WORST_ACCESSES`."""
    wasteful_costs = [cost for cost in access_costs if cost.units_taken > cost.min_units]
    return sorted(wasteful_costs, key=lambda cost: cost.min_units - cost.units_taken)[:MAX_WORST_ACCESSES]


class DominantKnob:
    """Of the accesses of a kernel that cost most, which of the steps of its knobs changes the cost most.

    Args:
        kernel: that steps are taken from.
    """

    def __init__(self, kernel: Kernel) -> None:
        self._access_names = [
            (cost.memory, cost.array, cost.kind, cost.unit) for cost in select_worst(compute_access_costs(kernel, None))
        ]
        self._current_costs = _sum_kernel_costs(kernel)
        self._neighbor_costs: list[tuple[str, Counter[tuple[str, str, str]]]] = []

    def add_neighbor(self, neighbor_name: str, kernel: Kernel) -> None:
        """Take a step into account, of which the kernel came."""
        self._neighbor_costs.append((neighbor_name, _sum_kernel_costs(kernel)))

    def format_lines(self) -> list[str]:
        """For each access the step that changes it most, and to what; nothing of those that no step changes."""
        lines = []
        for *name, unit in self._access_names:
            memory, array, kind = key = name[0], name[1], name[2]
            current_cost = self._current_costs[key]
            changes = [
                (abs(neighbor_costs[key] - current_cost), neighbor_name, neighbor_costs[key])
                for neighbor_name, neighbor_costs in self._neighbor_costs
                if neighbor_costs[key]
            ]
            if changes and max(changes)[0]:
                _, neighbor_name, neighbor_costs = max(changes)
                lines.append(
                    f"  {kind} of {array}, {memory} memory: {neighbor_name} makes {neighbor_costs:,} "
                    f"{unit} of {current_cost:,}"
                )
        return ["What governs the accesses that lose most, of the whole kernel:", *lines] if lines else []


def _sum_kernel_costs(kernel: Kernel) -> Counter[tuple[str, str, str]]:
    """What the accesses to each array take in all blocks, by memory, array and kind."""
    costs_by_access: Counter[tuple[str, str, str]] = Counter()
    blocks = {
        kernel_index: lowered_kernel.launch.num_blocks for kernel_index, lowered_kernel in enumerate(kernel.kernels)
    }
    for kernel_index, cost in _iterate_access_costs(kernel, None):
        costs_by_access[cost.memory, cost.array, cost.kind] += cost.units_taken * blocks[kernel_index]
    return costs_by_access


def _iterate_access_costs(
    kernel: Kernel, linked_sources: list[LinkedSources] | None
) -> Iterator[tuple[int, AccessCost]]:
    """Each access with the place of its step."""
    for kernel_index, lowered_kernel in enumerate(kernel.kernels):
        kernel_suffix = f" of {lowered_kernel.name}" if len(kernel.kernels) > 1 else ""
        sources = linked_sources[kernel_index] if linked_sources else None
        access_counts = count_block_accesses(kernel, lowered_kernel)
        for shared_access in access_counts.shared_accesses:
            amounts = (shared_access.num_requests, shared_access.wavefronts, shared_access.min_wavefronts)
            cost = AccessCost(
                "shared",
                shared_access.buffer + kernel_suffix,
                shared_access.kind,
                shared_access.nbytes,
                "wavefronts",
                *amounts,
            )
            yield kernel_index, _add_source_lines(cost, sources, shared_access.statement_index)
        for global_access in access_counts.global_accesses:
            amounts = (global_access.num_requests, global_access.sectors, global_access.min_sectors)
            cost = AccessCost(
                "global",
                global_access.array + kernel_suffix,
                global_access.kind,
                global_access.nbytes,
                "sectors",
                *amounts,
            )
            yield kernel_index, _add_source_lines(cost, sources, global_access.statement_index)


def _add_source_lines(cost: AccessCost, sources: LinkedSources | None, statement: int) -> AccessCost:
    if sources is None or statement not in sources.lowered_lines:
        return cost
    width_counts = count_access_widths(sources.instructions_by_statement.get(statement, ()), cost.memory, cost.kind)
    return replace(cost, lines=(sources.lowered_lines[statement].start,), widths=Counter(width_counts))


def _format_instructions(cost: AccessCost) -> str:
    """The instructions of an access, the most frequent first."""
    return (
        " ".join(name if count == 1 else f"{count}×{name}" for name, count in cost.widths.most_common()) or EMPTY_CELL
    )


def _format_lines(lines: tuple[int, ...]) -> str:
    return (
        ",".join(map(str, lines[:_MAX_LISTED_LINES])) + ("…" if len(lines) > _MAX_LISTED_LINES else "")
        if lines
        else EMPTY_CELL
    )


def _truncate(line: str) -> str:
    return line if len(line) <= _MAX_LINE_CHARACTERS else line[: _MAX_LINE_CHARACTERS - 1] + "…"
