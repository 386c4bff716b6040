"""Section 1: the times of one workload by schedules and libraries, as bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tvmconv.reports.page import svg
from tvmconv.reports.page.markup import Markup, join_markup, make_details, make_element, make_paragraph
from tvmconv.reports.tables import format_significant
from tvmconv.reports.timing_groups import NamedTiming, TimingGroup

COMPUTED_NOTE = "No log has a time of this workload: these are estimates, computed and not measured."


def render_workload_results(groups: Sequence[TimingGroup]) -> Markup:
    """Render the times of one workload, grouped by what was measured together.

    Args:
        groups: Times of the workload; all bars have the same scale.
    """
    if not groups:
        return make_paragraph("There is no time of this workload, and none can be computed.")
    full_seconds = svg.compute_full_width([timing.seconds for group in groups for timing in group.timings])
    return join_markup(_render_group(group, full_seconds) for group in groups)


def _render_group(group: TimingGroup, full_seconds: float) -> Markup:
    source_text = f"{group.source}, on {group.device}" if group.device else group.source
    heading = make_element("h3", f"From {source_text}")
    fragments = [heading, *([make_paragraph(COMPUTED_NOTE, "soft")] if group.is_computed else [])]
    if group.timings:
        fragments.append(render_bars(group.timings, full_seconds))
    if group.failures:
        failure_items = join_markup(make_element("li", f"{name}: {reason}") for name, reason in group.failures)
        fragments.append(make_details(f"{len(group.failures)} without a time", make_element("ul", failure_items)))
    return join_markup(fragments)


def render_bars(
    timings: Sequence[NamedTiming], full_seconds: float, style_by_name: Mapping[str, str] | None = None
) -> Markup:
    """Render one row per time, the fastest first.

    Args:
        timings: Comparable times.
        full_seconds: Seconds of a bar of full width.
        style_by_name: Color class by name; by default one for libraries and one for schedules.
    """
    best = timings[0].seconds
    lines = []
    for timing in timings:
        style = style_by_name[timing.name] if style_by_name else "s1" if timing.is_library else "s0"
        label = f"{timing.name}: {svg.format_microseconds(timing.seconds)}"
        name = join_markup(
            [timing.name, *([" ", make_element("span", timing.note, class_="soft")] if timing.note else [])]
        )
        lines.append(
            make_element(
                "tr",
                make_element("th", name, scope="row"),
                make_element("td", svg.format_microseconds(timing.seconds)),
                make_element("td", f"{format_significant(timing.seconds / best)} ×"),
                make_element("td", svg.make_bar(0, timing.seconds / full_seconds, style, label), class_="bar-cell"),
            )
        )
    return make_bar_table(("", "time", "× of the fastest", ""), lines)


def make_bar_table(headers: Sequence[str], lines: Sequence[Markup]) -> Markup:
    """Return a table whose last column contains bars."""
    first_header, *remaining_headers = headers
    head = join_markup(
        [make_element("td", first_header), *(make_element("th", header, scope="col") for header in remaining_headers)]
    )
    return make_element(
        "table",
        make_element("thead", make_element("tr", head)),
        make_element("tbody", join_markup(lines)),
        class_="bars",
    )
