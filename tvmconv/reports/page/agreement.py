"""Section 6: counters predicted from the code compared with Nsight Compute's, and the provenance of all numbers."""

from __future__ import annotations

from collections.abc import Sequence

from tvmconv.experiments.counter_comparison import CounterComparison
from tvmconv.reports import counter_comparison
from tvmconv.reports.page.markup import Markup, join_markup, make_element, make_paragraph, render_table


def render_agreement(rows: Sequence[CounterComparison]) -> Markup:
    """Render a table with one row per profiled device function.

    Args:
        rows: Predicted and measured counters of the page's workloads.
    """
    if not rows:
        return make_paragraph(
            "No counters were given; --counters FILE takes a file that tvmconv counters has written.", "soft"
        )
    return join_markup(
        [
            render_table(counter_comparison.make_table(rows), "Counted over measured"),
            make_paragraph(counter_comparison.LEGEND, "soft"),
        ]
    )


def render_provenance(lines: Sequence[tuple[str, str]]) -> Markup:
    """Render a list of sources and their origins."""
    return make_element(
        "dl",
        join_markup(join_markup([make_element("dt", label), make_element("dd", origin)]) for label, origin in lines),
    )
