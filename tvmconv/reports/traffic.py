"""The loads, stores and FLOP of a kernel's busiest block, as text."""

from __future__ import annotations

import math

from tvmconv.analysis.memory.traffic import BlockTraffic
from tvmconv.reports.tables import EMPTY_CELL, Table, format_significant


def make_table(block_traffic: BlockTraffic) -> Table:
    """Return a table with one row per operation that occurs."""
    headers = ("operation", "per output", "per block", "warp requests")
    rows = [
        (
            name,
            format_significant(block_traffic.count_per_output(name)),
            f"{count.num_elements:,}",
            f"{count.num_requests:,}",
        )
        for name, count in block_traffic.counts.items()
        if count.num_elements
    ]
    return Table(headers, rows, left_aligned=frozenset(headers[:1]))


def format_text(block_traffic: BlockTraffic) -> str:
    """Return the size of the block, the table, and the ratios."""
    flops_per_load, flops_per_byte = (
        format_significant(value) if math.isfinite(value) else EMPTY_CELL
        for value in (block_traffic.flops_per_load, block_traffic.flops_per_byte)
    )
    return "\n".join(
        [
            f"the busiest block: {block_traffic.num_threads:,} threads, {block_traffic.num_outputs:,} outputs",
            "",
            make_table(block_traffic).format_text(),
            "",
            f"FLOP per element loaded from global memory: {flops_per_load}; "
            f"per byte loaded and stored: {flops_per_byte}",
        ]
    )
