"""The comparison of counters predicted from the code with those that the GPU measured, as tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tvmconv.experiments.counter_comparison import CounterComparison
from tvmconv.reports.tables import EMPTY_CELL, Columns, Table, format_significant
from tvmconv.reports.tables import make_table as make_column_table

COUNT_TOLERANCE, BYTES_TOLERANCE = 0.02, 0.1
MAX_IGNORED_DIFFERENCE = 64  # sectors or wavefronts per launch, too few for a meaningful ratio
ALL_ACCESS_COUNTS = "sectors and wavefronts"
MAX_DIFFERENCES = 10  # accesses that a summary lists
DRAM_READ_BYTES, DRAM_BYTES = "dram_read_bytes", "dram_bytes"
DRAM_PARTS = (DRAM_READ_BYTES, "dram_write_bytes")
OVERVIEW_COLUMNS = {  # each column is the sum of some counts
    "sectors": ("global_load_sectors", "global_store_sectors"),
    "wavefronts": ("shared_load_wavefronts", "shared_store_wavefronts"),
    "instructions": ("warp_instructions",),
    "DRAM read [B]": (DRAM_READ_BYTES,),
}
COUNTS = {
    "sectors, loads": "global_load_sectors",
    "sectors, stores": "global_store_sectors",
    "requests, loads": "global_load_requests",
    "requests, stores": "global_store_requests",
    "wavefronts, loads": "shared_load_wavefronts",
    "wavefronts, stores": "shared_store_wavefronts",
    "instructions": "warp_instructions",
    "DRAM, read": DRAM_READ_BYTES,
    "DRAM, all": DRAM_BYTES,
}
# The source view counts all instructions; the metrics of whole launches omit asynchronous copies and `ldmatrix`.
_ACCESS_KEYS = {
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
    columns: Columns = {
        "workload": lambda row: row.workload,
        "schedule": _format_name,
        **{name: partial(_format_count_ratio, key) for name, key in COUNTS.items()},
        "occupancy": _format_occupancy,
    }
    return make_column_table(rows, columns, {"workload", "schedule"})


def _format_name(row: CounterComparison) -> str:
    return f"{row.schedule}, step {row.step}" if row.step else row.schedule


def _format_count_ratio(key: str, row: CounterComparison) -> str | None:
    return _format_ratio(compute_ratio(row, key))


def _format_ratio(ratio: float | None) -> str | None:
    if ratio is None:
        return None
    return format_significant(ratio) if math.isfinite(ratio) else "∞"


def _format_occupancy(row: CounterComparison) -> str | None:
    if "error" in row.counted:
        return row.counted["error"]
    if "occupancy" not in row.counted:
        return None
    difference = "" if _has_same_occupancy(row) else f" ({row.measured['occupancy_percent']:.1f}%)"
    return f"{row.counted['occupancy']:.0%}{difference}"


def _has_same_occupancy(row: CounterComparison) -> bool:
    """Return whether occupancies agree, or one of them is unknown."""
    if "occupancy" not in row.counted or "occupancy_percent" not in row.measured:
        return True
    return abs(100 * row.counted["occupancy"] - row.measured["occupancy_percent"]) < 0.01


@dataclass(frozen=True)
class _AccessComparison:
    """The predicted and the measured sectors or wavefronts of one access of a device function."""

    row: CounterComparison
    access: Mapping[str, Any]

    @property
    def unit(self) -> str:
        return "wavefronts" if self.access["space"] == "shared" else "sectors"

    @property
    def predicted(self) -> float:
        return float(self.access["counts"].get(self.unit, 0))

    @property
    def measured(self) -> int:
        return int(self.access["measured"].get(self.unit, 0))

    @property
    def ratio(self) -> float:
        return _divide_counts(self.predicted, self.measured)

    @property
    def is_within_tolerance(self) -> bool:
        return abs(self.ratio - 1) <= COUNT_TOLERANCE

    @property
    def distance(self) -> float:
        """Distance of the ratio from 1, which is equal for a number and its reciprocal."""
        return abs(math.log(self.ratio)) if 0 < self.ratio < math.inf else math.inf


def _list_accesses(rows: Sequence[CounterComparison]) -> list[_AccessComparison]:
    """Return the accesses of some device functions that use sectors or wavefronts."""
    accesses = [_AccessComparison(row, access) for row in rows for access in row.accesses]
    return [access for access in accesses if access.predicted or access.measured]


def make_access_table(rows: Sequence[CounterComparison]) -> Table:
    """Return a table with one row per access of a kernel: its predicted and its measured count."""
    return _make_access_table(_list_accesses(rows))


def make_largest_differences_table(rows: Sequence[CounterComparison]) -> Table:
    """Return a table of the `MAX_DIFFERENCES` accesses that differ most, by more than `COUNT_TOLERANCE`."""
    accesses = [access for access in _list_accesses(rows) if not access.is_within_tolerance]
    return _make_access_table(sorted(accesses, key=lambda access: -access.distance)[:MAX_DIFFERENCES])


def _make_access_table(accesses: Sequence[_AccessComparison]) -> Table:
    columns: Columns = {
        "workload": lambda each: each.row.workload,
        "schedule": lambda each: _format_name(each.row),
        "line": lambda each: None if each.access["line"] is None else str(each.access["line"]),
        "access": lambda each: (
            f"{each.access['kind']} of {', '.join(each.access['arrays']) or EMPTY_CELL}, {each.access['space']}"
        ),
        "instructions": lambda each: str(each.access["rows"]),
        "of": lambda each: each.unit,
        "counted": lambda each: f"{each.predicted:,.0f}",
        "measured": lambda each: f"{each.measured:,}",
        "ratio": lambda each: _format_ratio(each.ratio),
    }
    return make_column_table(accesses, columns, {"workload", "schedule", "access", "of"})


def make_overview_table(rows: Sequence[CounterComparison]) -> Table:
    """Return a table with one row per device function: predicted and measured counts, and how many accesses agree."""
    headers = ["workload", "schedule"]
    for name in OVERVIEW_COLUMNS:
        headers += [f"{name}, counted", "measured", "ratio"]
    lines = []
    for row in rows:
        cells = [row.workload, _format_name(row)]
        for keys in OVERVIEW_COLUMNS.values():
            cells += _format_comparison(row, keys)
        matches = [access.is_within_tolerance for access in _list_accesses([row])]
        lines.append([*cells, f"{sum(matches)} of {len(matches)}" if matches else EMPTY_CELL])
    return Table([*headers, "accesses that agree"], lines, {"workload", "schedule"})


def _format_comparison(row: CounterComparison, keys: Sequence[str]) -> list[str]:
    """Return the predicted count, the measured count and their ratio, summed over some keys."""
    if "error" in row.counted or not any(key in row.measured for key in keys):
        return [EMPTY_CELL] * 3
    predicted, measured = map(sum, zip(*(_sum_counts(row, key) for key in keys), strict=True))
    ratio = _format_ratio(_divide_counts(predicted, measured)) if predicted or measured else None
    return [f"{predicted:,.0f}", f"{measured:,.0f}", ratio or EMPTY_CELL]


def make_summary_table(rows: Sequence[CounterComparison]) -> Table:
    """Return a table of how many kernels agree, with one row per count."""
    counted_rows = [row for row in rows if "error" not in row.counted]
    matches = {ALL_ACCESS_COUNTS: [all(_agrees(row, key) is not False for key in _ACCESS_KEYS) for row in counted_rows]}
    for name, key in COUNTS.items():
        matches[name] = [agrees for row in rows if (agrees := _agrees(row, key)) is not None]
    rows_with_occupancy = [row for row in rows if "occupancy" in row.counted and "occupancy_percent" in row.measured]
    matches["occupancy"] = [_has_same_occupancy(row) for row in rows_with_occupancy]
    columns: Columns = {
        "counted": lambda item: item[0],
        "within": lambda item: "0%" if item[0] == "occupancy" else f"{_select_tolerance(COUNTS.get(item[0], '')):.0%}",
        "steps": lambda item: str(len(item[1])),
        "are": lambda item: str(sum(item[1])),
        "share": lambda item: f"{sum(item[1]) / len(item[1]):.1%}" if item[1] else None,
    }
    return make_column_table(matches.items(), columns, {"counted"})


def iterate_differing(rows: Sequence[CounterComparison]) -> Iterator[tuple[CounterComparison, list[str]]]:
    """Yield the device functions that differ by more than the tolerance, each with the names of what differs."""
    for row in rows:
        names = [name for name, key in COUNTS.items() if _agrees(row, key) is False]
        names += [] if _has_same_occupancy(row) else ["occupancy"]
        if names:
            yield row, names


def make_differences_table(rows: Sequence[CounterComparison]) -> Table:
    """Return a table with one row per device function that differs or could not be analyzed, and the reason."""
    lines = []
    for row, names in iterate_differing(rows):
        texts = [f"{name} {_format_count_ratio(COUNTS[name], row)}" if name in COUNTS else name for name in names]
        lines.append((row.workload, _format_name(row), ", ".join(texts)))
    lines += [(row.workload, _format_name(row), row.counted["error"]) for row in rows if "error" in row.counted]
    headers = ("workload", "schedule", "what")
    return Table(headers, lines, headers)


def compute_ratio(row: CounterComparison, key: str) -> float | None:
    """Return predicted over measured; None if both are zero or one is unknown, 1 if the difference is negligible."""
    if "error" in row.counted:
        return None
    counts = row.counted.get("counts", {})
    if key == DRAM_BYTES:
        if not set(DRAM_PARTS) <= counts.keys() & row.measured.keys():
            return None
        predicted, measured = (sum(side[part] for part in DRAM_PARTS) for side in (counts, row.measured))
    elif (row.accesses and key in _ACCESS_KEYS) or key in row.measured:
        predicted, measured = _sum_counts(row, key)
    else:
        return None
    return _divide_counts(predicted, measured) if predicted or measured else None


def _sum_counts(row: CounterComparison, key: str) -> tuple[float, float]:
    """Return the predicted and the measured value of a count, by the source view if it is available."""
    if row.accesses and key in _ACCESS_KEYS:
        space, kind, unit = _ACCESS_KEYS[key]
        accesses = [access for access in row.accesses if (access["space"], access["kind"]) == (space, kind)]
        predicted = sum(access["counts"].get(unit, 0) for access in accesses)
        return predicted, sum(access["measured"].get(unit, 0) for access in accesses)
    return row.counted.get("counts", {}).get(key, 0.0), row.measured.get(key, 0)


def _agrees(row: CounterComparison, key: str) -> bool | None:
    """Return whether a count is within its tolerance; None without a ratio."""
    ratio = compute_ratio(row, key)
    return None if ratio is None else abs(ratio - 1) <= _select_tolerance(key)


def _select_tolerance(key: str) -> float:
    return BYTES_TOLERANCE if key in (DRAM_READ_BYTES, DRAM_BYTES) else COUNT_TOLERANCE


def _divide_counts(predicted: float, measured: float) -> float:
    if abs(predicted - measured) <= MAX_IGNORED_DIFFERENCE:
        return 1.0
    return predicted / measured if measured else math.inf
