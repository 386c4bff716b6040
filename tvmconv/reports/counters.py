"""Why one schedule beats another: what a GPU counted while each ran, as tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tvmconv.analysis.lowered.operations import (
    CONSTANT_LOADS,
    GLOBAL_LOADS,
    SHARED_LOADS,
    SHARED_STORES,
    SHUFFLES,
    TEXTURE_FETCHES,
)
from tvmconv.experiments.counters import Counters
from tvmconv.gpu import WARP
from tvmconv.reports.tables import NOTHING, Table, significant

SECTOR_BYTES = 32
TOP = 2  # stall reasons that the table names

LEGEND = (
    "One launch under ncu, with cold caches and free clocks: its time is not that of a benchmark. Busy: the share of "
    "its peak rate at which a unit works; the L1 has shared memory and textures in it. Bytes are for each "
    "output; instructions, requests and wavefronts are of warps, for each 32 outputs. Stalled: the warps that wait for "
    "that reason, on average, when an instruction is issued. Code: counted from the TIR of the busiest block, "
    "before the compiler merges loads of one element; flop/load is per element loaded from global memory."
)
SUMMARY_LEGEND = (
    "One launch under ncu, the fastest first. Busy: the share of its peak rate at which a unit works; the L1 has "
    "shared memory and textures in it. Instructions are of warps, for each 32 outputs, and bytes for each output. "
    "Stalled: the warps that wait for that reason when an instruction is issued. Code: operations for each element "
    "loaded from global memory, counted from the TIR."
)


def tables(rows: Sequence[Counters]) -> list[Table]:
    """One line a schedule: what moved and what warps waited for; then the instructions and requests."""
    return [_table(rows, columns) for columns in (MOVED, EXECUTED)]


def summary(rows: Sequence[Counters]) -> Table:
    """One line a schedule, the fastest first: what was busy, and how much there was to do."""
    return _table(sorted(rows, key=lambda row: row.metrics.get("nanoseconds", math.inf)), SUMMARY)


def _table(rows: Sequence[Counters], columns: Cells) -> Table:
    lines = [[row.schedule, *(cell(row) for cell in columns.values())] for row in rows]
    return Table(["schedule", *columns], lines, left=frozenset({"schedule", "stalled"}))


def _stalled(row: Counters) -> str:
    first = sorted(row.stalls.items(), key=lambda stall: stall[1], reverse=True)[:TOP]
    return ", ".join(f"{reason.replace('_', ' ')} {warps:.2f}" for reason, warps in first) or NOTHING


def _shown(value: float | None, scale: float = 1) -> str:
    return NOTHING if value is None else significant(value * scale)


def _percent(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1f}%"


Cells = dict[str, Callable[[Counters], str]]  # of a line, by the headers of their columns

MOVED: Cells = {
    "time [µs]": lambda row: _shown(row.metrics.get("nanoseconds"), 1e-3),
    "DRAM busy": lambda row: _percent(row.metrics.get("dram_busy_percent")),
    "L1 busy": lambda row: _percent(row.metrics.get("l1_busy_percent")),
    "issue busy": lambda row: _percent(row.metrics.get("issue_busy_percent")),
    "DRAM read [B]": lambda row: _shown(row.each(["dram_read_bytes"], 1)),
    "DRAM written [B]": lambda row: _shown(row.each(["dram_write_bytes"], 1)),
    "L2 [B]": lambda row: _shown(row.each(["l2_sectors"], SECTOR_BYTES)),
    "L2 hits": lambda row: _percent(row.metrics.get("l2_hit_percent")),
    "L1 loads [B]": lambda row: _shown(row.each(["global_load_sectors", "texture_sectors"], SECTOR_BYTES)),
    "L1 hits": lambda row: _percent(row.metrics.get("l1_hit_percent")),
    "registers": lambda row: _shown(row.metrics.get("registers")),
    "warps active": lambda row: _percent(row.metrics.get("occupancy_percent")),
    "stalled": _stalled,
}
EXECUTED: Cells = {
    "instructions": lambda row: _shown(row.each(["warp_instructions"], WARP)),
    "FMA": lambda row: _shown(row.each(["thread_fmas"], 1)),
    "global loads": lambda row: _shown(row.each(["global_load_requests"], WARP)),
    "global, code": lambda row: _shown(row.code[GLOBAL_LOADS]),
    "texture": lambda row: _shown(row.each(["texture_requests"], WARP)),
    "texture, code": lambda row: _shown(row.code[TEXTURE_FETCHES]),
    "shared wavefronts": lambda row: _shown(row.each(["shared_load_wavefronts", "shared_store_wavefronts"], WARP)),
    "shared, code": lambda row: _shown(row.code[SHARED_LOADS] + row.code[SHARED_STORES]),
    "constant": lambda row: _shown(row.each(["constant_requests"], WARP)),
    "constant misses": lambda row: _shown(row.each(["constant_misses"], WARP)),
    "constant, code": lambda row: _shown(row.code[CONSTANT_LOADS]),
    "shuffles, code": lambda row: _shown(row.code[SHUFFLES]),
    "flop/load, code": lambda row: _shown(row.ratio),
}
SUMMARY: Cells = {
    header: {**MOVED, **EXECUTED}[header]
    for header in (
        "time [µs]",
        "DRAM busy",
        "L1 busy",
        "issue busy",
        "instructions",
        "DRAM read [B]",
        "flop/load, code",
        "stalled",
    )
}
