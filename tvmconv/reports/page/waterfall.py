"""Section 5: the knob waterfall, drawn: each bar spans the least times before and after its knob."""

from __future__ import annotations

from collections.abc import Sequence

from tvmconv.analysis.waterfall import Fall
from tvmconv.reports.page import svg
from tvmconv.reports.page.markup import Markup, element, folded, joined, paragraph, table
from tvmconv.reports.waterfall import LEGEND, changed, waterfall_table


def waterfall(way: Sequence[Fall]) -> Markup:
    """From the default config to the best one.

    Args:
        way: the configs between, both ends included.
    """
    longest = max(max(fall.seconds, fall.measured or 0.0) for fall in way)
    lines = []
    for before, fall in zip([None, *way], way, strict=False):
        begin, end = (before.seconds if before else 0.0), fall.seconds
        kind = "level" if before is None else "gain" if end < begin else "loss"
        times = f"{end / begin:.2f} ×" if before else ""
        measured = f", measured {svg.microseconds(fall.measured)}" if fall.measured else ""
        label = f"{changed(fall)}: {svg.microseconds(end)}"
        low, high = sorted((begin, end))
        lines.append(
            element(
                "tr",
                element("th", changed(fall), element("span", measured, class_="soft"), scope="row"),
                element("td", svg.microseconds(end)),
                element("td", times),
                element(
                    "td",
                    svg.bar(low / longest, high / longest, kind, label, fall.measured and fall.measured / longest),
                    class_="bar-cell",
                ),
            )
        )
    last = way[-1]
    lines.append(
        element(
            "tr",
            element("th", "the best config", scope="row"),
            element("td", svg.microseconds(last.seconds)),
            element("td", f"{last.seconds / way[0].seconds:.2f} ×"),
            element("td", svg.bar(0, last.seconds / longest, "level", "the best config"), class_="bar-cell"),
        )
    )
    return joined(
        [
            element("table", element("tbody", joined(lines)), class_="bars"),
            paragraph(f"{LEGEND} A line across a bar is what was measured.", "soft"),
            folded("In numbers: occupancy, registers, wavefronts and sectors", table(waterfall_table(way))),
        ]
    )
