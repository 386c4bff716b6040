"""What a kernel's busiest block loads, stores and computes, as text."""

from __future__ import annotations

import math

from tvmconv.analysis.memory.traffic import Traffic
from tvmconv.reports.tables import NOTHING, Table, significant


def table(counted: Traffic) -> Table:
    """One line an operation that happens."""
    headers = ("operation", "an output", "a block", "warp-wide")
    rows = [
        (name, significant(counted.an_output(name)), f"{count.elements:,}", f"{count.requests:,}")
        for name, count in counted.counts.items()
        if count.elements
    ]
    return Table(headers, rows, left=frozenset(headers[:1]))


def text(counted: Traffic) -> str:
    """The table under what was counted, and the ratios."""
    ratio, bytes_ratio = (
        significant(value) if math.isfinite(value) else NOTHING for value in (counted.ratio, counted.bytes_ratio)
    )
    return "\n".join(
        [
            f"the busiest block: {counted.threads:,} threads, {counted.outputs:,} outputs",
            "",
            table(counted).text(),
            "",
            f"FLOP for each element read from global memory: {ratio}; for each byte read and written: {bytes_ratio}",
        ]
    )
