"""Counted from the code beside counted by the GPU, as tables, and which kernels differ."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tvmconv.experiments.beside import Beside
from tvmconv.reports.tables import NOTHING, Table, significant

NEAR, NEAR_BYTES = 0.02, 0.1
FEW = 64  # sectors or wavefronts of a whole launch, of which a difference of some is no share worth a word
EACH = "sectors and wavefronts"  # all of them
MOST_DIFFERENCES = 10  # accesses that a summary lists
OVERVIEW = {  # columns of the overview, each the sum of some counts
    "sectors": ("global_load_sectors", "global_store_sectors"),
    "wavefronts": ("shared_load_wavefronts", "shared_store_wavefronts"),
    "instructions": ("warp_instructions",),
    "DRAM read [B]": ("dram_read_bytes",),
}
READ, MOVED = "DRAM, read", "DRAM, all"
COUNTS = {
    "sectors, loads": "global_load_sectors",
    "sectors, stores": "global_store_sectors",
    "requests, loads": "global_load_requests",
    "requests, stores": "global_store_requests",
    "wavefronts, loads": "shared_load_wavefronts",
    "wavefronts, stores": "shared_store_wavefronts",
    "instructions": "warp_instructions",
    READ: "dram_read_bytes",
    MOVED: "dram_bytes",
}
# What the source view tells of each instruction is more than the metrics of whole launches: these leave out what
# asynchronous copies and `ldmatrix` do.
_OF_ACCESSES = {
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


def table(rows: Sequence[Beside]) -> Table:
    """One line a step of a kernel."""
    headers = ("workload", "schedule", *COUNTS, "occupancy")
    return Table(headers, [_line(row) for row in rows], left=frozenset({"workload", "schedule"}))


def by_access(rows: Sequence[Beside]) -> Table:
    """One line an access of a kernel: what is counted of it and what was measured, by the source view."""
    return _access_table(_accesses(rows))


def largest_differences(rows: Sequence[Beside], most: int = MOST_DIFFERENCES) -> Table:
    """Return the accesses whose counted and measured numbers differ by more than `NEAR`, those that differ most first.

    Args:
        rows: steps of kernels.
        most: number of accesses at most.
    """
    found = [(row, access) for row, access in _accesses(rows) if not _is_near(_access_ratio(access))]
    found.sort(key=lambda each: -_distance(_access_ratio(each[1])))
    return _access_table(found[:most])


def overview(rows: Sequence[Beside]) -> Table:
    """Return one line a step of a kernel: what is counted beside what was measured, and how many accesses agree."""
    headers = ["workload", "schedule"]
    for name in OVERVIEW:
        headers += [f"{name}, counted", "measured", "×"]
    lines = []
    for row in rows:
        cells = [row.workload, _name(row)]
        for keys in OVERVIEW.values():
            cells += _beside(row, keys)
        of_row = [_is_near(_access_ratio(access)) for _, access in _accesses([row])]
        cells.append(f"{sum(of_row)} of {len(of_row)}" if of_row else NOTHING)
        lines.append(tuple(cells))
    return Table((*headers, "accesses that agree"), lines, left=frozenset({"workload", "schedule"}))


def _accesses(rows: Sequence[Beside]) -> list[tuple[Beside, Mapping[str, Any]]]:
    """The accesses of some steps that take sectors or wavefronts, each with its step."""
    return [(row, access) for row in rows for access in row.accesses if any(_counts_of(access)[1:])]


def _counts_of(access: Mapping[str, Any]) -> tuple[str, float, int]:
    """The unit that an access takes, how much of it is counted, and how much was measured."""
    unit = "wavefronts" if access["space"] == "shared" else "sectors"
    return unit, access["counts"].get(unit, 0.0), access["measured"].get(unit, 0)


def _access_ratio(access: Mapping[str, Any]) -> float:
    _, counted, measured = _counts_of(access)
    return _ratio(counted, measured)


def _is_near(ratio: float) -> bool:
    return abs(ratio - 1) <= NEAR


def _distance(ratio: float) -> float:
    """How far a ratio is from 1, alike for a number and its reciprocal."""
    return abs(math.log(ratio)) if 0 < ratio < math.inf else math.inf


def _access_table(found: Sequence[tuple[Beside, Mapping[str, Any]]]) -> Table:
    headers = ("workload", "schedule", "line", "access", "instructions", "of", "counted", "measured", "×")
    lines = []
    for row, access in found:
        unit, ours, theirs = _counts_of(access)
        name = f"{access['kind']} of {', '.join(access['arrays']) or NOTHING}, {access['space']}"
        line = NOTHING if access["line"] is None else str(access["line"])
        counts = (str(access["rows"]), unit, f"{ours:,.0f}", f"{theirs:,}", _shown(_ratio(ours, theirs)))
        lines.append((row.workload, _name(row), line, name, *counts))
    return Table(headers, lines, left=frozenset({"workload", "schedule", "access", "of"}))


def _beside(row: Beside, keys: Sequence[str]) -> list[str]:
    """What is counted of a step, what was measured, and their ratio, added up over some counts."""
    if "error" in row.counted or not any(key in row.measured for key in keys):
        return [NOTHING] * 3
    ours, theirs = map(sum, zip(*(_counted_and_measured(row, key) for key in keys), strict=True))
    return [f"{ours:,.0f}", f"{theirs:,.0f}", _shown(_ratio(ours, theirs)) if ours or theirs else NOTHING]


def summary(rows: Sequence[Beside]) -> Table:
    """How many kernels agree, by what is counted."""
    lines = []
    for name, key in COUNTS.items():
        shares = [share for row in rows if (share := ratio(row, key)) is not None]
        lines.append(_summed(name, _near(name), [abs(share - 1) <= _near(name) for share in shares]))
    lines.insert(0, _summed(EACH, NEAR, [_agrees(row) for row in rows if "error" not in row.counted]))
    full = [row for row in rows if "occupancy" in row.counted and "occupancy_percent" in row.measured]
    lines.append(_summed("occupancy", 0.0, [_same_occupancy(row) for row in full]))
    return Table(("counted", "within", "steps", "are", "share"), lines, left=frozenset({"counted"}))


def _agrees(row: Beside) -> bool:
    shares = [ratio(row, key) for key in _OF_ACCESSES]
    return all(share is None or abs(share - 1) <= NEAR for share in shares)


def _summed(name: str, near: float, are: Sequence[bool]) -> tuple[str, ...]:
    share = f"{sum(are) / len(are):.1%}" if are else NOTHING
    return name, f"{near:.0%}", str(len(are)), str(sum(are)), share


def differing(rows: Sequence[Beside]) -> Iterator[tuple[Beside, list[str]]]:
    """The steps that differ by more than they may in a count, or in occupancy, each with what differs."""
    for row in rows:
        shares = {name: ratio(row, key) for name, key in COUNTS.items()}
        names = [name for name, share in shares.items() if share is not None and abs(share - 1) > _near(name)]
        if "occupancy" in row.counted and "occupancy_percent" in row.measured and not _same_occupancy(row):
            names.append("occupancy")
        if names:
            yield row, names


def differences(rows: Sequence[Beside]) -> Table:
    """One line a step that differs, or that could not be counted, with what does and by how much."""
    lines = []
    for row, names in differing(rows):
        shares = ((name, ratio(row, COUNTS[name])) for name in names if name in COUNTS)
        told = [f"{name} {_shown(share)}" for name, share in shares]
        lines.append((row.workload, _name(row), ", ".join(told + [name for name in names if name not in COUNTS])))
    lines += [(row.workload, _name(row), row.counted["error"]) for row in rows if "error" in row.counted]
    return Table(("workload", "schedule", "what"), lines, left=frozenset({"workload", "schedule", "what"}))


def _counted_and_measured(row: Beside, key: str) -> tuple[float, float]:
    """A count of a step and what was measured of it: by the source view where that is known, as it knows more."""
    if row.accesses and key in _OF_ACCESSES:
        space, kind, unit = _OF_ACCESSES[key]
        alike = [each for each in row.accesses if (each["space"], each["kind"]) == (space, kind)]
        ours, theirs = (sum(each[how].get(unit, 0) for each in alike) for how in ("counts", "measured"))
        return ours, theirs
    return row.counted.get("counts", {}).get(key, 0.0), row.measured.get(key, 0)


def ratio(row: Beside, key: str) -> float | None:
    """Counted over measured; None where neither counts any, or one is not known; 1 where they differ by a few."""
    if "error" in row.counted:
        return None
    counts = row.counted.get("counts", {})
    ours, theirs = counts.get(key, 0.0), row.measured.get(key)
    if key == "dram_bytes":
        if not all({"dram_read_bytes", "dram_write_bytes"} <= of.keys() for of in (counts, row.measured)):
            return None
        ours, theirs = (sum(of[f"dram_{how}_bytes"] for how in ("read", "write")) for of in (counts, row.measured))
    elif row.accesses and key in _OF_ACCESSES:
        ours, theirs = _counted_and_measured(row, key)
    if theirs is None or not (ours or theirs):
        return None
    return _ratio(ours, theirs)


def _near(name: str) -> float:
    return NEAR_BYTES if name in (READ, MOVED) else NEAR


def _ratio(ours: float, theirs: float) -> float:
    if abs(ours - theirs) <= FEW:
        return 1.0
    return ours / theirs if theirs else float("inf")


def _same_occupancy(row: Beside) -> bool:
    return abs(100 * row.counted["occupancy"] - row.measured["occupancy_percent"]) < 0.01


def _name(row: Beside) -> str:
    return f"{row.schedule}, step {row.step}" if row.step else row.schedule


def _line(row: Beside) -> tuple[str, ...]:
    name = _name(row)
    if "error" in row.counted:
        return row.workload, name, *(NOTHING for _ in COUNTS), row.counted["error"]
    shares = (ratio(row, key) for key in COUNTS.values())
    full = f"{row.counted['occupancy']:.0%}" if "occupancy" in row.counted else NOTHING
    if "occupancy" in row.counted and "occupancy_percent" in row.measured and not _same_occupancy(row):
        full += f" ({row.measured['occupancy_percent']:.1f}%)"
    return row.workload, name, *map(_shown, shares), full


def _shown(share: float | None) -> str:
    if share is None:
        return NOTHING
    return significant(share) if math.isfinite(share) else "∞"
