"""Counted from the code beside counted by the GPU, as tables, and which kernels differ."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tvmconv.experiments.counter_comparison import CounterComparison
from tvmconv.reports.tables import EMPTY_CELL, Table, format_significant

COUNT_TOLERANCE, BYTES_TOLERANCE = 0.02, 0.1
MAX_IGNORED_DIFFERENCE = (
    64  # sectors or wavefronts of a whole launch, of which a difference of some is no share worth a word
)
ALL_ACCESS_COUNTS = "sectors and wavefronts"  # all of them
MAX_DIFFERENCES = 10  # accesses that a summary lists
OVERVIEW_COLUMNS = {  # columns of the overview, each the sum of some counts
    "sectors": ("global_load_sectors", "global_store_sectors"),
    "wavefronts": ("shared_load_wavefronts", "shared_store_wavefronts"),
    "instructions": ("warp_instructions",),
    "DRAM read [B]": ("dram_read_bytes",),
}
DRAM_READ, DRAM_TOTAL = "DRAM, read", "DRAM, all"
COUNTS = {
    "sectors, loads": "global_load_sectors",
    "sectors, stores": "global_store_sectors",
    "requests, loads": "global_load_requests",
    "requests, stores": "global_store_requests",
    "wavefronts, loads": "shared_load_wavefronts",
    "wavefronts, stores": "shared_store_wavefronts",
    "instructions": "warp_instructions",
    DRAM_READ: "dram_read_bytes",
    DRAM_TOTAL: "dram_bytes",
}
# What the source view tells of each instruction is more than the metrics of whole launches: these leave out what
# asynchronous copies and `ldmatrix` do.
_ACCESS_COUNT_KEYS = {
    "global_load_sectors": ("global", "load", "sectors"),
    "global_store_sectors": ("global", "store", "sectors"),
    "shared_load_wavefronts": ("shared", "load", "wavefronts"),
    "shared_store_wavefronts": ("shared", "store", "wavefronts"),
}
ACCESS_LEGEND = (
    "By access: the line of `tvmconv show --stage lowered` at which it, or the body that it is in, begins; the "
    "instructions that the compiler made of it; sectors and wavefronts that are counted and those that Nsight "
    "Compute's source view tells of these instructions. What the compiler has moved to a line without a statement, "
    "or to another statement's, counts there."
)
LEGEND = (
    "Counted over measured, of a whole launch; — where neither counts any, or it is not told. Sectors and wavefronts: "
    "the source view's, added up over the instructions, `L2 Theoretical Sectors Global` and `L1 Wavefronts Shared`. "
    "Requests: `l1tex__t_requests_pipe_lsu_mem_global_op_ld` and `_st`. Instructions: `smsp__inst_executed`. DRAM: "
    "bytes read, by caches that ncu empties before each launch, `dram__bytes_read`, and all bytes, where the arrays "
    "exceed the L2 cache, with `dram__bytes_write`. Occupancy: counted, and the measured one where it differs "
    "(`sm__maximum_warps_per_active_cycle_pct`)."
)


def make_table(rows: Sequence[CounterComparison]) -> Table:
    """One line a step of a kernel."""
    headers = ("workload", "schedule", *COUNTS, "occupancy")
    return Table(headers, [_format_row(row) for row in rows], left_aligned=frozenset({"workload", "schedule"}))


def make_access_table(rows: Sequence[CounterComparison]) -> Table:
    """One line an access of a kernel: what is counted of it and what was measured, by the source view."""
    return _make_access_table(_list_accesses(rows))


def make_largest_differences_table(rows: Sequence[CounterComparison], max_accesses: int = MAX_DIFFERENCES) -> Table:
    """Return the accesses whose counted and measured numbers differ by more than `COUNT_TOLERANCE`, those that differ
    most first.

    Args:
        rows: steps of kernels.
        max_accesses: number of accesses at most.
    """
    differing_accesses = [
        (row, access) for row, access in _list_accesses(rows) if not _is_within_tolerance(_compute_access_ratio(access))
    ]
    differing_accesses.sort(key=lambda entry: -_compute_distance(_compute_access_ratio(entry[1])))
    return _make_access_table(differing_accesses[:max_accesses])


def make_overview_table(rows: Sequence[CounterComparison]) -> Table:
    """Return one line a step of a kernel: what is counted beside what was measured, and how many accesses agree."""
    headers = ["workload", "schedule"]
    for name in OVERVIEW_COLUMNS:
        headers += [f"{name}, counted", "measured", "×"]
    lines = []
    for row in rows:
        cells = [row.workload, _format_name(row)]
        for keys in OVERVIEW_COLUMNS.values():
            cells += _format_comparison(row, keys)
        access_matches = [_is_within_tolerance(_compute_access_ratio(access)) for _, access in _list_accesses([row])]
        cells.append(f"{sum(access_matches)} of {len(access_matches)}" if access_matches else EMPTY_CELL)
        lines.append(tuple(cells))
    return Table((*headers, "accesses that agree"), lines, left_aligned=frozenset({"workload", "schedule"}))


def _list_accesses(rows: Sequence[CounterComparison]) -> list[tuple[CounterComparison, Mapping[str, Any]]]:
    """The accesses of some steps that take sectors or wavefronts, each with its step."""
    return [(row, access) for row in rows for access in row.accesses if any(_get_access_counts(access)[1:])]


def _get_access_counts(access: Mapping[str, Any]) -> tuple[str, float, int]:
    """The unit that an access takes, how much of it is counted, and how much was measured."""
    unit = "wavefronts" if access["space"] == "shared" else "sectors"
    return unit, access["counts"].get(unit, 0.0), access["measured"].get(unit, 0)


def _compute_access_ratio(access: Mapping[str, Any]) -> float:
    _, predicted, measured_count = _get_access_counts(access)
    return _divide_counts(predicted, measured_count)


def _is_within_tolerance(ratio: float) -> bool:
    return abs(ratio - 1) <= COUNT_TOLERANCE


def _compute_distance(ratio: float) -> float:
    """How far a ratio is from 1, alike for a number and its reciprocal."""
    return abs(math.log(ratio)) if 0 < ratio < math.inf else math.inf


def _make_access_table(rows_and_accesses: Sequence[tuple[CounterComparison, Mapping[str, Any]]]) -> Table:
    headers = ("workload", "schedule", "line", "access", "instructions", "of", "counted", "measured", "×")
    lines = []
    for row, access in rows_and_accesses:
        unit, predicted, measured = _get_access_counts(access)
        name = f"{access['kind']} of {', '.join(access['arrays']) or EMPTY_CELL}, {access['space']}"
        line = EMPTY_CELL if access["line"] is None else str(access["line"])
        counts = (
            str(access["rows"]),
            unit,
            f"{predicted:,.0f}",
            f"{measured:,}",
            _format_ratio(_divide_counts(predicted, measured)),
        )
        lines.append((row.workload, _format_name(row), line, name, *counts))
    return Table(headers, lines, left_aligned=frozenset({"workload", "schedule", "access", "of"}))


def _format_comparison(row: CounterComparison, keys: Sequence[str]) -> list[str]:
    """What is counted of a step, what was measured, and their ratio, added up over some counts."""
    if "error" in row.counted or not any(key in row.measured for key in keys):
        return [EMPTY_CELL] * 3
    predicted, measured = map(sum, zip(*(_sum_counts(row, key) for key in keys), strict=True))
    return [
        f"{predicted:,.0f}",
        f"{measured:,.0f}",
        _format_ratio(_divide_counts(predicted, measured)) if predicted or measured else EMPTY_CELL,
    ]


def make_summary_table(rows: Sequence[CounterComparison]) -> Table:
    """How many kernels agree, by what is counted."""
    lines = []
    for name, key in COUNTS.items():
        count_ratios = [count_ratio for row in rows if (count_ratio := compute_ratio(row, key)) is not None]
        lines.append(
            _format_summary_row(
                name,
                _select_tolerance(name),
                [abs(count_ratio - 1) <= _select_tolerance(name) for count_ratio in count_ratios],
            )
        )
    lines.insert(
        0,
        _format_summary_row(
            ALL_ACCESS_COUNTS,
            COUNT_TOLERANCE,
            [_has_matching_accesses(row) for row in rows if "error" not in row.counted],
        ),
    )
    rows_with_occupancy = [row for row in rows if "occupancy" in row.counted and "occupancy_percent" in row.measured]
    lines.append(_format_summary_row("occupancy", 0.0, [_has_same_occupancy(row) for row in rows_with_occupancy]))
    return Table(("counted", "within", "steps", "are", "share"), lines, left_aligned=frozenset({"counted"}))


def _has_matching_accesses(row: CounterComparison) -> bool:
    count_ratios = [compute_ratio(row, key) for key in _ACCESS_COUNT_KEYS]
    return all(count_ratio is None or abs(count_ratio - 1) <= COUNT_TOLERANCE for count_ratio in count_ratios)


def _format_summary_row(name: str, tolerance: float, matches: Sequence[bool]) -> tuple[str, ...]:
    count_ratio = f"{sum(matches) / len(matches):.1%}" if matches else EMPTY_CELL
    return name, f"{tolerance:.0%}", str(len(matches)), str(sum(matches)), count_ratio


def iterate_differing(rows: Sequence[CounterComparison]) -> Iterator[tuple[CounterComparison, list[str]]]:
    """The steps that differ by more than they may in a count, or in occupancy, each with what differs."""
    for row in rows:
        count_ratios = {name: compute_ratio(row, key) for name, key in COUNTS.items()}
        names = [
            name
            for name, count_ratio in count_ratios.items()
            if count_ratio is not None and abs(count_ratio - 1) > _select_tolerance(name)
        ]
        if "occupancy" in row.counted and "occupancy_percent" in row.measured and not _has_same_occupancy(row):
            names.append("occupancy")
        if names:
            yield row, names


def make_differences_table(rows: Sequence[CounterComparison]) -> Table:
    """One line a step that differs, or that could not be counted, with what does and by how much."""
    lines = []
    for row, names in iterate_differing(rows):
        count_ratios = ((name, compute_ratio(row, COUNTS[name])) for name in names if name in COUNTS)
        ratio_texts = [f"{name} {_format_ratio(count_ratio)}" for name, count_ratio in count_ratios]
        lines.append(
            (row.workload, _format_name(row), ", ".join(ratio_texts + [name for name in names if name not in COUNTS]))
        )
    lines += [(row.workload, _format_name(row), row.counted["error"]) for row in rows if "error" in row.counted]
    return Table(("workload", "schedule", "what"), lines, left_aligned=frozenset({"workload", "schedule", "what"}))


def _sum_counts(row: CounterComparison, key: str) -> tuple[float, float]:
    """A count of a step and what was measured of it: by the source view where that is known, as it knows more."""
    if row.accesses and key in _ACCESS_COUNT_KEYS:
        space, kind, unit = _ACCESS_COUNT_KEYS[key]
        matching_accesses = [access for access in row.accesses if (access["space"], access["kind"]) == (space, kind)]
        predicted, measured = (
            sum(access[side].get(unit, 0) for access in matching_accesses) for side in ("counts", "measured")
        )
        return predicted, measured
    return row.counted.get("counts", {}).get(key, 0.0), row.measured.get(key, 0)


def compute_ratio(row: CounterComparison, key: str) -> float | None:
    """Counted over measured; None where neither counts any, or one is not known; 1 where they differ by a few."""
    if "error" in row.counted:
        return None
    counts = row.counted.get("counts", {})
    predicted, measured = counts.get(key, 0.0), row.measured.get(key)
    if key == "dram_bytes":
        if not all(
            {"dram_read_bytes", "dram_write_bytes"} <= counts_of_side.keys()
            for counts_of_side in (counts, row.measured)
        ):
            return None
        predicted, measured = (
            sum(counts_of_side[f"dram_{direction}_bytes"] for direction in ("read", "write"))
            for counts_of_side in (counts, row.measured)
        )
    elif row.accesses and key in _ACCESS_COUNT_KEYS:
        predicted, measured = _sum_counts(row, key)
    if measured is None or not (predicted or measured):
        return None
    return _divide_counts(predicted, measured)


def _select_tolerance(name: str) -> float:
    return BYTES_TOLERANCE if name in (DRAM_READ, DRAM_TOTAL) else COUNT_TOLERANCE


def _divide_counts(predicted: float, measured: float) -> float:
    if abs(predicted - measured) <= MAX_IGNORED_DIFFERENCE:
        return 1.0
    return predicted / measured if measured else float("inf")


def _has_same_occupancy(row: CounterComparison) -> bool:
    return abs(100 * row.counted["occupancy"] - row.measured["occupancy_percent"]) < 0.01


def _format_name(row: CounterComparison) -> str:
    return f"{row.schedule}, step {row.step}" if row.step else row.schedule


def _format_row(row: CounterComparison) -> tuple[str, ...]:
    name = _format_name(row)
    if "error" in row.counted:
        return row.workload, name, *(EMPTY_CELL for _ in COUNTS), row.counted["error"]
    count_ratios = (compute_ratio(row, key) for key in COUNTS.values())
    occupancy_text = f"{row.counted['occupancy']:.0%}" if "occupancy" in row.counted else EMPTY_CELL
    if "occupancy" in row.counted and "occupancy_percent" in row.measured and not _has_same_occupancy(row):
        occupancy_text += f" ({row.measured['occupancy_percent']:.1f}%)"
    return row.workload, name, *map(_format_ratio, count_ratios), occupancy_text


def _format_ratio(count_ratio: float | None) -> str:
    if count_ratio is None:
        return EMPTY_CELL
    return format_significant(count_ratio) if math.isfinite(count_ratio) else "∞"
