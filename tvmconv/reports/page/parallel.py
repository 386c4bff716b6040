"""Parallel coordinates of a search: an axis a knob, a line a trial, the darker the faster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvmconv.arithmetic import ceil_div
from tvmconv.knobs import Value, format_value
from tvmconv.logs.record import Record
from tvmconv.reports.page import svg
from tvmconv.reports.page.markup import Markup, element, joined, paragraph
from tvmconv.reports.trials import standing_for_all

GAP, TOP, BOTTOM, HEIGHT = 92, 46, 20, 380  # between axes; above and below them; of all
CLASSES = (0.02, 0.1, 0.3, 0.6, 1.0)  # of trials, from the fastest: the least share of each colour
LABELS = 14  # values that are named on an axis
LONGEST = 13  # of a name on it
LETTER = 6.6  # width of one, about


def parallel(records: Sequence[Record]) -> Markup:
    """Trials over their knobs; knobs that have the same value in all are named below.

    Args:
        records: with times, of one search.
    """
    shown = standing_for_all(records)
    knobs = list(shown[0].config)
    values = {knob: sorted({record.config.get(knob, "") for record in records}, key=_order) for knob in knobs}
    axes = [knob for knob in knobs if len(values[knob]) > 1]
    fixed = [f"{knob}={format_value(values[knob][0])}" for knob in knobs if knob not in axes]
    if not axes:
        return paragraph("All trials have the same config.", "soft")
    width = GAP * len(axes) + 60
    top, bottom = TOP, HEIGHT - BOTTOM
    heights = {
        knob: {value: _height(place, len(values[knob]), top, bottom) for place, value in enumerate(values[knob])}
        for knob in axes
    }
    lines = []
    for rank, record in reversed(list(enumerate(shown))):  # the fastest on top
        points = [(_across(i), heights[knob][record.config.get(knob, "")]) for i, knob in enumerate(axes)]
        title = f"{svg.microseconds(record.cost)}"
        kind = next(i for i, share in enumerate(CLASSES) if rank <= share * (len(shown) - 1))
        indices = " ".join(str(values[knob].index(record.config.get(knob, ""))) for knob in axes)
        lines.append(svg.path(points, f"trial c{kind}", title, data_values=indices))
    drawn = [_axis(i, knob, values[knob], heights[knob], top, bottom) for i, knob in enumerate(axes)]
    label = f"{len(shown)} of {len(records)} trials over {len(axes)} knobs"
    told = [paragraph(f"{label}, the fastest on top and in the strongest colour. Choose values to see theirs.", "soft")]
    if fixed:
        told.append(paragraph(f"The same in all: {', '.join(fixed)}.", "soft"))
    picture = svg.chart(label, width, HEIGHT, element("g", *lines), *drawn, group=True)
    return joined([*told, picture])


def _across(place: int) -> float:
    return 50 + GAP * place


def _height(place: int, count: int, top: float, bottom: float) -> float:
    return bottom - (bottom - top) * (place + 0.5) / count


def _order(value: Value) -> tuple[Any, ...]:
    """Numbers by size, splits place by place, words last by the alphabet."""
    if isinstance(value, tuple):
        return (1, value)
    return (0, value) if isinstance(value, (int, float)) else (2, value)


def _axis(
    place: int, knob: str, values: Sequence[Value], heights: dict[Value, float], top: float, bottom: float
) -> Markup:
    x = _across(place)
    parts = [
        svg.line(x, top, x, bottom, "axis"),
        svg.text(x, (20, 34)[place % 2], knob, "middle"),  # in two lines, as names are longer than the gap
    ]
    every = ceil_div(len(values), LABELS)
    for number, value in enumerate(values):
        if number % every == 0:
            name = format_value(value)
            short = name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…"
            parts.append(
                element(
                    "g",
                    element("title", f"{knob}={name}"),
                    element("rect", x=x + 2, y=heights[value] - 9, width=LETTER * len(short) + 6, height=18, rx=3),
                    svg.text(x + 5, heights[value] + 4, short),
                    class_="value",
                    data_axis=str(place),
                    data_value=str(number),
                    aria_label=f"{knob}={name}",
                )
            )
    return joined(parts)
