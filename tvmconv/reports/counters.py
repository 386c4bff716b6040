"""Tables of the hardware counters of schedules, which explain why one schedule is faster than another."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tvmconv.analysis.tir.operations import (
    CONSTANT_LOADS,
    GLOBAL_LOADS,
    SHARED_LOADS,
    SHARED_STORES,
    SHUFFLES,
    TEXTURE_FETCHES,
)
from tvmconv.experiments.counters import Counters
from tvmconv.reports.tables import Columns, Table, format_optional, make_table
from tvmconv.target import SECTOR_BYTES, WARP_SIZE

MAX_STALL_REASONS = 2  # in a cell of the table

LEGEND = (
    "One launch under ncu, with cold caches and free clocks: the time is no benchmark's. Busy: the fraction of "
    "its peak rate at which a unit works; the L1 includes shared memory and textures. Bytes are per output; warp "
    "instructions, requests and wavefronts are per 32 outputs. Stalled: the mean number of warps that wait for that "
    "reason when an instruction is issued. Code: counted from the TIR of the busiest block, before the compiler merges "
    "loads of one element; flop/load is per element loaded from global memory."
)
SUMMARY_LEGEND = (
    "One launch under ncu, the fastest first. Busy: the fraction of its peak rate at which a unit works; the L1 "
    "includes shared memory and textures. Warp instructions are per 32 outputs, and bytes are per output. Stalled: the "
    "mean number of warps that wait for that reason when an instruction is issued. Code: operations per element loaded "
    "from global memory, counted from the TIR."
)

WORKLOADS_LEGEND = (
    "One launch under ncu, with cold caches and free clocks. Busy: the fraction of its peak rate at which a unit "
    "works; the L1 includes shared memory. Stalled: the mean number of warps that wait for that reason when an "
    "instruction is issued."
)


def make_tables(rows: Sequence[Counters]) -> list[Table]:
    """Return two tables with one row per schedule: memory traffic and stalls, then instructions and requests."""
    return [_make_table(rows, columns) for columns in (MEMORY_COLUMNS, INSTRUCTION_COLUMNS)]


def make_summary_table(rows: Sequence[Counters]) -> Table:
    """Return a table with one row per schedule, the fastest first: busy units and amounts of work."""
    return _make_table(sorted(rows, key=lambda row: row.metrics.get("nanoseconds", math.inf)), SUMMARY_COLUMNS)


def make_workloads_table(rows: Sequence[Counters]) -> Table:
    """Return a table with one row per workload, each of one kernel, the slowest first."""
    slowest = sorted(rows, key=lambda row: row.metrics.get("nanoseconds", 0.0), reverse=True)
    return make_table(
        slowest, {"workload": lambda row: f"`{row.workload}`", **WORKLOAD_COLUMNS}, {"workload", "stalled"}
    )


def _make_table(rows: Sequence[Counters], columns: Columns) -> Table:
    return make_table(rows, {"schedule": lambda row: row.schedule, **columns}, {"schedule", "stalled"})


def _format_code(row: Counters, *names: str) -> str | None:
    """Return the sum of counts from the code; None if they were not counted."""
    return format_optional(sum(row.code[name] for name in names)) if row.code else None


def _format_stalls(row: Counters) -> str | None:
    top_stalls = sorted(row.stalls.items(), key=lambda stall: stall[1], reverse=True)[:MAX_STALL_REASONS]
    return ", ".join(f"{reason.replace('_', ' ')} {warps:.2f}" for reason, warps in top_stalls) or None


def _format_megabytes(row: Counters, metrics: Sequence[str], scale: float) -> str | None:
    return format_optional(row.compute_per_output(metrics, scale), row.outputs / 1e6)


def _format_percent(value: float | None) -> str | None:
    return None if value is None else f"{value:.1f}%"


MEMORY_COLUMNS: Columns = {
    "time [µs]": lambda row: format_optional(row.metrics.get("nanoseconds"), 1e-3),
    "DRAM busy": lambda row: _format_percent(row.metrics.get("dram_busy_percent")),
    "L1 busy": lambda row: _format_percent(row.metrics.get("l1_busy_percent")),
    "issue busy": lambda row: _format_percent(row.metrics.get("issue_busy_percent")),
    "DRAM read [B]": lambda row: format_optional(row.compute_per_output(["dram_read_bytes"], 1)),
    "DRAM written [B]": lambda row: format_optional(row.compute_per_output(["dram_write_bytes"], 1)),
    "L2 [B]": lambda row: format_optional(row.compute_per_output(["l2_sectors"], SECTOR_BYTES)),
    "L2 hits": lambda row: _format_percent(row.metrics.get("l2_hit_percent")),
    "L1 loads [B]": lambda row: format_optional(
        row.compute_per_output(["global_load_sectors", "texture_sectors"], SECTOR_BYTES)
    ),
    "L1 hits": lambda row: _format_percent(row.metrics.get("l1_hit_percent")),
    "registers": lambda row: format_optional(row.metrics.get("registers")),
    "warps active": lambda row: _format_percent(row.metrics.get("occupancy_percent")),
    "stalled": _format_stalls,
}
INSTRUCTION_COLUMNS: Columns = {
    "instructions": lambda row: format_optional(row.compute_per_output(["warp_instructions"], WARP_SIZE)),
    "FMA": lambda row: format_optional(row.compute_per_output(["thread_fmas"], 1)),
    "global loads": lambda row: format_optional(row.compute_per_output(["global_load_requests"], WARP_SIZE)),
    "global, code": lambda row: _format_code(row, GLOBAL_LOADS),
    "texture": lambda row: format_optional(row.compute_per_output(["texture_requests"], WARP_SIZE)),
    "texture, code": lambda row: _format_code(row, TEXTURE_FETCHES),
    "shared wavefronts": lambda row: format_optional(
        row.compute_per_output(["shared_load_wavefronts", "shared_store_wavefronts"], WARP_SIZE)
    ),
    "shared, code": lambda row: _format_code(row, SHARED_LOADS, SHARED_STORES),
    "constant": lambda row: format_optional(row.compute_per_output(["constant_requests"], WARP_SIZE)),
    "constant misses": lambda row: format_optional(row.compute_per_output(["constant_misses"], WARP_SIZE)),
    "constant, code": lambda row: _format_code(row, CONSTANT_LOADS),
    "shuffles, code": lambda row: _format_code(row, SHUFFLES),
    "flop/load, code": lambda row: format_optional(row.ratio),
}
SUMMARY_HEADERS = (
    *("time [µs]", "DRAM busy", "L1 busy", "issue busy", "instructions"),
    *("DRAM read [B]", "flop/load, code", "stalled"),
)
SUMMARY_COLUMNS: Columns = {header: {**MEMORY_COLUMNS, **INSTRUCTION_COLUMNS}[header] for header in SUMMARY_HEADERS}
WORKLOAD_COLUMNS: Columns = {
    "time [µs]": MEMORY_COLUMNS["time [µs]"],
    "DRAM [MB]": lambda row: _format_megabytes(row, ("dram_read_bytes", "dram_write_bytes"), 1),
    "L2 [MB]": lambda row: _format_megabytes(row, ("l2_sectors",), SECTOR_BYTES),
    **{
        header: MEMORY_COLUMNS[header] for header in ("DRAM busy", "L1 busy", "issue busy", "registers", "warps active")
    },
    "stalled": _format_stalls,
}
