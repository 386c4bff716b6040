"""The comparison of counters predicted from the code with those that the GPU measured, as tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tvmconv.experiments.counter_comparison import CounterComparison
from tvmconv.reports.tables import EMPTY_CELL, Table, format_significant

COUNT_TOLERANCE, BYTES_TOLERANCE = 0.02, 0.1
MAX_IGNORED_DIFFERENCE = 64  # sectors or wavefronts per launch, too few for a meaningful ratio
ALL_ACCESS_COUNTS = "sectors and wavefronts"
MAX_DIFFERENCES = 10  # accesses that a summary lists
OVERVIEW_COLUMNS = {  # each column is the sum of some counts
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
# The source view counts all instructions; the metrics of whole launches omit asynchronous copies and `ldmatrix`.
_ACCESS_COUNT_KEYS = {
    "global_load_sectors": ("global", "load", "sectors"),
    "global_store_sectors": ("global", "store", "sectors"),
    "shared_load_wavefronts": ("shared", "load", "wavefronts"),
    "shared_store_wavefronts": ("shared", "store", "wavefronts"),
}
ACCESS_LEGEND = (
    "Each access has the line of `tvmconv show --stage lowered` at which it, or the body that contains it, begins, and "
    "the number of instructions that the compiler generated for it. Sectors and wavefronts are predicted from the code "
    "(counted) and measured by Nsight Compute's source view for these instructions. Instructions that the compiler "
    "moved to another line count there."
)
LEGEND = (
    "Numbers are counted over measured values of a whole launch; — means that both are zero or one is unknown. Sectors "
    "and wavefronts: the source view's `L2 Theoretical Sectors Global` and `L1 Wavefronts Shared`, summed over the "
    "instructions. Requests: `l1tex__t_requests_pipe_lsu_mem_global_op_ld` and `_st`. Instructions: "
    "`smsp__inst_executed`. DRAM: bytes read with caches that ncu flushes before each launch, `dram__bytes_read`, and "
    "all bytes including `dram__bytes_write`, where the arrays exceed the L2 cache. Occupancy: counted, with the "
    "measured one where it differs (`sm__maximum_warps_per_active_cycle_pct`)."
)


def make_table(rows: Sequence[CounterComparison]) -> Table:
    """Return a table of ratios with one row per device function of a kernel."""
    headers = ("workload", "schedule", *COUNTS, "occupancy")
    return Table(headers, [_format_row(row) for row in rows], left_aligned=frozenset({"workload", "schedule"}))


def make_access_table(rows: Sequence[CounterComparison]) -> Table:
    """Return a table with one row per access of a kernel: its predicted and its measured count."""
    return _make_access_table(_list_accesses(rows))


def make_largest_differences_table(rows: Sequence[CounterComparison], max_accesses: int = MAX_DIFFERENCES) -> Table:
    """Return a table of the accesses whose predicted and measured counts differ by more than `COUNT_TOLERANCE`.

    Args:
        rows: Device functions of kernels.
        max_accesses: Largest number of rows; the largest differences come first.
    """
    differing_accesses = [
        (row, access) for row, access in _list_accesses(rows) if not _is_within_tolerance(_compute_access_ratio(access))
    ]
    differing_accesses.sort(key=lambda entry: -_compute_distance(_compute_access_ratio(entry[1])))
    return _make_access_table(differing_accesses[:max_accesses])


def make_overview_table(rows: Sequence[CounterComparison]) -> Table:
    """Return a table with one row per device function: predicted and measured counts, and how many accesses agree."""
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
    """Return the accesses of some device functions that use sectors or wavefronts, each with its device function."""
    return [(row, access) for row in rows for access in row.accesses if any(_get_access_counts(access)[1:])]


def _get_access_counts(access: Mapping[str, Any]) -> tuple[str, float, int]:
    """Return the unit of an access, its predicted count, and its measured count."""
    unit = "wavefronts" if access["space"] == "shared" else "sectors"
    return unit, access["counts"].get(unit, 0.0), access["measured"].get(unit, 0)


def _compute_access_ratio(access: Mapping[str, Any]) -> float:
    _, predicted, measured_count = _get_access_counts(access)
    return _divide_counts(predicted, measured_count)


def _is_within_tolerance(ratio: float) -> bool:
    return abs(ratio - 1) <= COUNT_TOLERANCE


def _compute_distance(ratio: float) -> float:
    """Return the distance of a ratio from 1, which is equal for a number and its reciprocal."""
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
    """Return the predicted count, the measured count and their ratio, summed over some keys."""
    if "error" in row.counted or not any(key in row.measured for key in keys):
        return [EMPTY_CELL] * 3
    predicted, measured = map(sum, zip(*(_sum_counts(row, key) for key in keys), strict=True))
    return [
        f"{predicted:,.0f}",
        f"{measured:,.0f}",
        _format_ratio(_divide_counts(predicted, measured)) if predicted or measured else EMPTY_CELL,
    ]


def make_summary_table(rows: Sequence[CounterComparison]) -> Table:
    """Return a table of how many kernels agree, with one row per count."""
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
    """Yield the device functions that differ by more than the tolerance, each with the names of what differs."""
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
    """Return a table with one row per device function that differs or could not be analyzed, and the reason."""
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
    """Return the predicted and the measured value of a count, by the source view if it is available."""
    if row.accesses and key in _ACCESS_COUNT_KEYS:
        space, kind, unit = _ACCESS_COUNT_KEYS[key]
        matching_accesses = [access for access in row.accesses if (access["space"], access["kind"]) == (space, kind)]
        predicted, measured = (
            sum(access[side].get(unit, 0) for access in matching_accesses) for side in ("counts", "measured")
        )
        return predicted, measured
    return row.counted.get("counts", {}).get(key, 0.0), row.measured.get(key, 0)


def compute_ratio(row: CounterComparison, key: str) -> float | None:
    """Return predicted over measured; None if both are zero or one is unknown, 1 if the difference is negligible."""
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
