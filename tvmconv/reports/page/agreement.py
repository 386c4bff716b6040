"""Section 6: what is counted from the code beside what Nsight Compute counted; and where all numbers come from."""

from __future__ import annotations

from collections.abc import Sequence

from tvmconv.reports.agreement import WHAT, share
from tvmconv.reports.page.markup import Markup, element, joined, paragraph, table
from tvmconv.reports.tables import Table


def agreement(rows: Sequence[tuple[str, dict[str, float], dict[str, float]]]) -> Markup:
    """A table for each kernel that was profiled.

    Args:
        rows: of each its name, what is counted of its code, and what was measured, both by `WHAT`.
    """
    if not rows:
        return paragraph("No counters were given; --counters FILE takes those of scripts/counters.py.", "soft")
    told = []
    headers = ("of the whole kernel", "counted", "measured", "counted / measured")
    for name, counted, measured in rows:
        lines = [
            (what, f"{counted[what]:,.0f}", f"{measured[what]:,.0f}", share(counted[what], measured[what]))
            for what in WHAT
            if counted[what] or measured[what]
        ]
        told.append(table(Table(headers, lines, frozenset(headers[:1])), name))
    return joined(told)


def provenance(lines: Sequence[tuple[str, str]]) -> Markup:
    """Where numbers are from: a list of what, and whence."""
    return element("dl", joined(joined([element("dt", what), element("dd", whence)]) for what, whence in lines))
