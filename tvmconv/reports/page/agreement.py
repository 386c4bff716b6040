"""Section 6: what is counted from the code beside what Nsight Compute counted; and where all numbers come from."""

from __future__ import annotations

from collections.abc import Sequence

from tvmconv.experiments.counter_comparison import CounterComparison
from tvmconv.reports import counter_comparison
from tvmconv.reports.page.markup import Markup, join_markup, make_element, make_paragraph, render_table


def render_agreement(rows: Sequence[CounterComparison]) -> Markup:
    """A line for each step of a kernel that was profiled.

    Args:
        rows: of the workloads that the page is about.
    """
    if not rows:
        return make_paragraph("No counters were given; --counters FILE takes what tvmconv counters writes.", "soft")
    return join_markup(
        [
            render_table(counter_comparison.make_table(rows), "Counted over measured"),
            make_paragraph(counter_comparison.LEGEND, "soft"),
        ]
    )


def render_provenance(lines: Sequence[tuple[str, str]]) -> Markup:
    """Where numbers are from: a list of what, and whence."""
    return make_element(
        "dl",
        join_markup(join_markup([make_element("dt", label), make_element("dd", origin)]) for label, origin in lines),
    )
