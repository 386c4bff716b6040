"""Section 1: how long schedules and libraries take for one workload, as bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tvmconv.reports.measured import Timed, Together
from tvmconv.reports.page import svg
from tvmconv.reports.page.markup import Markup, element, folded, joined, paragraph
from tvmconv.reports.tables import significant

COMPUTED = "No log has a time of this workload: these are estimates, computed and not measured."


def workload_results(groups: Sequence[Together]) -> Markup:
    """The times of one workload, those that were taken together side by side.

    Args:
        groups: of it; all bars have the same scale.
    """
    if not groups:
        return paragraph("There is no time of this workload, and nothing to compute one from.")
    longest = svg.full_width([each.seconds for group in groups for each in group.times])
    return joined(_group(group, longest) for group in groups)


def _group(group: Together, longest: float) -> Markup:
    where = f"{group.source}, on {group.device}" if group.device else group.source
    heading = element("h3", f"From {where}")
    parts = [heading, *([paragraph(COMPUTED, "soft")] if group.computed else [])]
    if group.times:
        parts.append(bars(group.times, longest))
    if group.failed:
        told = joined(element("li", f"{name}: {why}") for name, why in group.failed)
        parts.append(folded(f"{len(group.failed)} without a time", element("ul", told)))
    return joined(parts)


def bars(times: Sequence[Timed], longest: float, kinds: Mapping[str, str] | None = None) -> Markup:
    """A line a time, the fastest first.

    Args:
        times: that may be compared.
        longest: what a bar of the full width stands for.
        kinds: the colour of each by its name; by default libraries have one, and schedules another.
    """
    best = times[0].seconds
    lines = []
    for each in times:
        kind = kinds[each.name] if kinds else "s1" if each.library else "s0"
        label = f"{each.name}: {svg.microseconds(each.seconds)}"
        name = joined([each.name, *([" ", element("span", each.note, class_="soft")] if each.note else [])])
        lines.append(
            element(
                "tr",
                element("th", name, scope="row"),
                element("td", svg.microseconds(each.seconds)),
                element("td", f"{significant(each.seconds / best)} ×"),
                element("td", svg.bar(0, each.seconds / longest, kind, label), class_="bar-cell"),
            )
        )
    return bar_table(("", "time", "× of the fastest", ""), lines)


def bar_table(headers: Sequence[str], lines: Sequence[Markup]) -> Markup:
    """A table whose last column is bars."""
    first, *others = headers
    head = joined([element("td", first), *(element("th", each, scope="col") for each in others)])
    return element("table", element("thead", element("tr", head)), element("tbody", joined(lines)), class_="bars")
