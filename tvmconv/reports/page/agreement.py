"""Section 6: what is counted from the code beside what Nsight Compute counted; and where all numbers come from."""

from __future__ import annotations

from collections.abc import Sequence

from tvmconv.experiments.beside import Beside
from tvmconv.reports import beside
from tvmconv.reports.page.markup import Markup, element, joined, paragraph, table


def agreement(rows: Sequence[Beside]) -> Markup:
    """A line for each step of a kernel that was profiled.

    Args:
        rows: of the workloads that the page is about.
    """
    if not rows:
        return paragraph("No counters were given; --counters FILE takes what tvmconv counters writes.", "soft")
    return joined([table(beside.table(rows), "Counted over measured"), paragraph(beside.LEGEND, "soft")])


def provenance(lines: Sequence[tuple[str, str]]) -> Markup:
    """Where numbers are from: a list of what, and whence."""
    return element("dl", joined(joined([element("dt", what), element("dd", whence)]) for what, whence in lines))
