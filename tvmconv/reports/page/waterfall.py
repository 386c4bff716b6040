"""Section 5: the knob waterfall as a chart; each bar spans the estimated times before and after a change of a knob."""

from __future__ import annotations

from collections.abc import Sequence

from tvmconv.analysis.waterfall import WaterfallStep
from tvmconv.reports.page import svg
from tvmconv.reports.page.markup import Markup, join_markup, make_details, make_element, make_paragraph, render_table
from tvmconv.reports.waterfall import LEGEND, format_changes, make_waterfall_table


def render_waterfall(steps: Sequence[WaterfallStep]) -> Markup:
    """Render the steps from the default config to the best one.

    Args:
        steps: Configs of all steps, both ends included.
    """
    full_seconds = max(max(step.seconds, step.measured_seconds or 0.0) for step in steps)
    lines = []
    for previous, step in zip([None, *steps], steps, strict=False):
        start_seconds, end_seconds = (previous.seconds if previous else 0.0), step.seconds
        kind = "level" if previous is None else "gain" if end_seconds < start_seconds else "loss"
        times = f"{end_seconds / start_seconds:.2f} ×" if previous else ""
        measured_text = f", measured {svg.format_microseconds(step.measured_seconds)}" if step.measured_seconds else ""
        label = f"{format_changes(step)}: {svg.format_microseconds(end_seconds)}"
        low_seconds, high_seconds = sorted((start_seconds, end_seconds))
        lines.append(
            make_element(
                "tr",
                make_element(
                    "th", format_changes(step), make_element("span", measured_text, class_="soft"), scope="row"
                ),
                make_element("td", svg.format_microseconds(end_seconds)),
                make_element("td", times),
                make_element(
                    "td",
                    svg.make_bar(
                        low_seconds / full_seconds,
                        high_seconds / full_seconds,
                        kind,
                        label,
                        step.measured_seconds and step.measured_seconds / full_seconds,
                    ),
                    class_="bar-cell",
                ),
            )
        )
    last_step = steps[-1]
    lines.append(
        make_element(
            "tr",
            make_element("th", "the best config", scope="row"),
            make_element("td", svg.format_microseconds(last_step.seconds)),
            make_element("td", f"{last_step.seconds / steps[0].seconds:.2f} ×"),
            make_element(
                "td", svg.make_bar(0, last_step.seconds / full_seconds, "level", "the best config"), class_="bar-cell"
            ),
        )
    )
    return join_markup(
        [
            make_element("table", make_element("tbody", join_markup(lines)), class_="bars"),
            make_paragraph(f"{LEGEND} A line across a bar marks the measured time.", "soft"),
            make_details(
                "Table with occupancy, registers, wavefronts and sectors", render_table(make_waterfall_table(steps))
            ),
        ]
    )
