"""Parallel coordinates of a search: one axis per knob, one line per trial, stronger colors for faster trials."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvmconv.arithmetic import ceil_div
from tvmconv.logs.record import Record
from tvmconv.reports.page import svg
from tvmconv.reports.page.markup import Markup, join_markup, make_element, make_paragraph
from tvmconv.reports.trials import select_representative_trials
from tvmconv.space import Value, format_value

AXIS_GAP, TOP, BOTTOM, HEIGHT = 92, 46, 20, 380  # px: between axes, above them, below them, of the picture
COLOR_FRACTIONS = (0.02, 0.1, 0.3, 0.6, 1.0)  # fastest fractions of trials by color
MAX_AXIS_LABELS = 14
MAX_LABEL_CHARACTERS = 13
LETTER_WIDTH = 6.6  # px, approximate


def render_parallel_coordinates(records: Sequence[Record]) -> Markup:
    """Render trials over their knobs; knobs with one value in all trials are listed below.

    Args:
        records: Records with times, of one search.
    """
    shown_records = select_representative_trials(records)
    knobs = list(shown_records[0].config)
    values = {knob: sorted({record.config.get(knob, "") for record in records}, key=_make_sort_key) for knob in knobs}
    axes = [knob for knob in knobs if len(values[knob]) > 1]
    fixed_knobs = [f"{knob}={format_value(values[knob][0])}" for knob in knobs if knob not in axes]
    if not axes:
        return make_paragraph("All trials have the same config.", "soft")
    width = AXIS_GAP * len(axes) + 60
    top, bottom = TOP, HEIGHT - BOTTOM
    heights = {
        knob: {value: _compute_y(index, len(values[knob]), top, bottom) for index, value in enumerate(values[knob])}
        for knob in axes
    }
    lines = []
    for position, record in reversed(list(enumerate(shown_records))):  # the fastest are drawn last, on top
        points = [
            (_compute_x(axis_index), heights[knob][record.config.get(knob, "")]) for axis_index, knob in enumerate(axes)
        ]
        title = f"{svg.format_microseconds(record.cost)}"
        color_class = next(
            axis_index
            for axis_index, fraction in enumerate(COLOR_FRACTIONS)
            if position <= fraction * (len(shown_records) - 1)
        )
        indices = " ".join(str(values[knob].index(record.config.get(knob, ""))) for knob in axes)
        lines.append(svg.make_path(points, f"trial c{color_class}", title, data_values=indices))
    axis_elements = [
        _render_axis(axis_index, knob, values[knob], heights[knob], top, bottom) for axis_index, knob in enumerate(axes)
    ]
    label = f"{len(shown_records)} of {len(records)} trials over {len(axes)} knobs"
    paragraphs = [
        make_paragraph(
            f"{label}, the fastest on top and in the strongest color. Select values to filter trials.", "soft"
        )
    ]
    if fixed_knobs:
        paragraphs.append(make_paragraph(f"The same in all: {', '.join(fixed_knobs)}.", "soft"))
    picture = svg.make_chart(label, width, HEIGHT, make_element("g", *lines), *axis_elements, has_buttons=True)
    return join_markup([*paragraphs, picture])


def _compute_x(axis_index: int) -> float:
    return 50 + AXIS_GAP * axis_index


def _compute_y(index: int, count: int, top: float, bottom: float) -> float:
    return bottom - (bottom - top) * (index + 0.5) / count


def _make_sort_key(value: Value) -> tuple[Any, ...]:
    """Return a key that sorts numbers by size, then splits by their factors, then words by the alphabet."""
    if isinstance(value, tuple):
        return (1, value)
    return (0, value) if isinstance(value, (int, float)) else (2, value)


def _render_axis(
    axis_index: int, knob: str, values: Sequence[Value], heights: dict[Value, float], top: float, bottom: float
) -> Markup:
    x = _compute_x(axis_index)
    fragments = [
        svg.make_line(x, top, x, bottom, "axis"),
        svg.make_text(
            x, (20, 34)[axis_index % 2], knob, "middle"
        ),  # names alternate between two lines because they exceed the gap
    ]
    label_interval = ceil_div(len(values), MAX_AXIS_LABELS)
    for index, value in enumerate(values):
        if index % label_interval == 0:
            name = format_value(value)
            short_name = name if len(name) <= MAX_LABEL_CHARACTERS else f"{name[: MAX_LABEL_CHARACTERS - 1]}…"
            fragments.append(
                make_element(
                    "g",
                    make_element("title", f"{knob}={name}"),
                    make_element(
                        "rect", x=x + 2, y=heights[value] - 9, width=LETTER_WIDTH * len(short_name) + 6, height=18, rx=3
                    ),
                    svg.make_text(x + 5, heights[value] + 4, short_name),
                    class_="value",
                    data_axis=str(axis_index),
                    data_value=str(index),
                    aria_label=f"{knob}={name}",
                )
            )
    return join_markup(fragments)
