"""Elements of charts as SVG: scales, axes, bars and marks, colored by the page's style."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvmconv import palette
from tvmconv.reports.page.markup import Markup, format_number, join_markup, make_element, make_scroll_box
from tvmconv.reports.tables import format_significant

# Smallest width of a chart on a narrow screen, as a fraction of its width; the classes w1 to w16 are steps of 100 px.
MIN_WIDTH_FRACTION = 0.75
MAX_WIDTH_CLASS = 16
MAX_BAR_RATIO = 12  # of the longest unbroken bar to the shortest one
NUM_OTHER_STYLES = 6  # colors of series that are no schedules: classes s0 to s5
OTHER_MARKERS = "osDv^h"  # their markers
DARK_PAPER = "#12161b"  # as in page.css


@dataclass(frozen=True)
class AxisScale:
    """The mapping of an axis from values to coordinates."""

    min_value: float
    max_value: float
    start_coordinate: float  # of the smallest value
    end_coordinate: float  # of the largest value
    is_log: bool = False
    is_integer: bool = False  # whether only integers are labeled

    def __call__(self, value: float) -> float:
        """Return the coordinate of a value, clamped to the ends of the axis."""
        min_scaled, max_scaled, value = (
            math.log(number) if self.is_log else number for number in (self.min_value, self.max_value, value)
        )
        fraction = (value - min_scaled) / (max_scaled - min_scaled) if max_scaled > min_scaled else 0.5
        return self.start_coordinate + min(max(fraction, 0.0), 1.0) * (self.end_coordinate - self.start_coordinate)

    def list_ticks(self) -> list[float]:
        """Return about six round values to label: 1, 2 and 5 times powers of ten, or only powers if these are many."""
        if not self.is_log:
            interval = max(_choose_round_step((self.max_value - self.min_value) / 5), float(self.is_integer))
            first, last = math.ceil(self.min_value / interval - 1e-9), math.floor(self.max_value / interval + 1e-9)
            return [i * interval for i in range(first, last + 1)]
        powers = range(math.floor(math.log10(self.min_value)), math.ceil(math.log10(self.max_value)) + 1)
        for factors in ((1, 2, 5), (1,)):
            ticks = [factor * 10.0**power for power in powers for factor in factors]
            ticks = [value for value in ticks if self.min_value * (1 - 1e-9) <= value <= self.max_value * (1 + 1e-9)]
            if len(ticks) <= 7:
                break
        return ticks


def _choose_round_step(min_step: float) -> float:
    """Return the smallest of 1, 2 and 5 times a power of ten that is at least `min_step`."""
    power = 10.0 ** math.floor(math.log10(min_step)) if min_step > 0 else 1.0
    return next((factor * power for factor in (1, 2, 5, 10) if factor * power >= min_step * (1 - 1e-9)), 10 * power)


def make_chart(label: str, width: float, height: float, *children: str, has_buttons: bool = False) -> Markup:
    """Return a labeled picture of these sizes in a box that scrolls if the screen is too narrow. The label describes it
    for screen readers, which treat a picture without buttons as one image.
    """
    svg_element = make_element(
        "svg",
        *children,
        viewBox=f"0 0 {format_number(width)} {format_number(height)}",
        width=width,
        height=height,
        class_=f"chart w{min(int(width * MIN_WIDTH_FRACTION / 100), MAX_WIDTH_CLASS)}",
        role="group" if has_buttons else "img",
        aria_label=label,
    )
    return make_element("figure", make_scroll_box(svg_element, label))


def make_rect(x: float, y: float, width: float, height: float, class_: str | None = None, **attributes: Any) -> Markup:
    """Return a rectangle."""
    return make_element("rect", x=x, y=y, width=width, height=height, class_=class_, **attributes)


def make_bar(
    start_fraction: float, end_fraction: float, class_: str, label: str, tick_fraction: float | None = None
) -> Markup:
    """Return a bar in a cell between two fractions of its width; a bar longer than the cell is drawn broken. The class
    sets its color, the label describes it for screen readers, and the tick is an additional line.
    """
    width = max(100 * (min(end_fraction, 1.0) - start_fraction), 0.5)
    rects = [make_rect(100 * start_fraction, 0, width, 10, class_)]
    if end_fraction > 1:
        rects.append(make_element("path", d="M90 11L92 -1H94L92 11Z", class_="gap"))
    if tick_fraction is not None:
        rects.append(make_rect(100 * tick_fraction - 0.3, 0, 0.6, 10, "measured"))
    svg_attributes = {"viewBox": "0 0 100 10", "preserveAspectRatio": "none", "class_": "bar", "role": "img"}
    return make_element("svg", *rects, **svg_attributes, aria_label=label)


def compute_full_width(values: Sequence[float]) -> float:
    """Return the value of a full-width bar: the largest value, but at most `MAX_BAR_RATIO` times the smallest. Longer
    bars are drawn broken, so that a few large values do not hide the others.
    """
    return min(max(values), MAX_BAR_RATIO * min(values)) if values else 0.0


def make_text(x: float, y: float, content: str, anchor: str | None = None, class_: str | None = None) -> Markup:
    """Return a text; `anchor` is "middle" or "end" if it does not begin at x."""
    return make_element("text", content, x=x, y=y, text_anchor=anchor, class_=class_)


def make_line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    """Return a straight line."""
    return make_element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def make_path(points: Sequence[tuple[float, float]], class_: str, title: str = "", **attributes: str) -> Markup:
    """Return an unfilled line through points."""
    data = "M" + "L".join(f"{format_number(x)} {format_number(y)}" for x, y in points)
    titles = [make_element("title", title)] if title else []
    return make_element("path", *titles, d=data, class_=class_, fill="none", **attributes)


@dataclass(frozen=True)
class DrawnStyle:
    """How a series is drawn on the page."""

    class_: str  # of the style sheet, for its color
    marker: str  # Matplotlib's name, one of `_CORNERS`; a circle for others


LIBRARY_STYLE = DrawnStyle("library", "s")


def choose_styles(is_library_by_name: Mapping[str, bool]) -> dict[str, DrawnStyle]:
    """Return the styles of the series of a chart: a schedule has its color of `tvmconv.palette`, and the first library
    the color of text. Other series, and a second one of the same schedule, have colors in turn.
    """
    styles: dict[str, DrawnStyle] = {}
    for name, is_library in is_library_by_name.items():
        known = palette.find_style_name(name)
        if is_library:
            style = LIBRARY_STYLE
        else:
            style = DrawnStyle(f"p-{known}", palette.STYLES[known].marker) if known else LIBRARY_STYLE
        if style in styles.values() or not (is_library or known):
            number = len(styles) % NUM_OTHER_STYLES
            style = DrawnStyle(f"s{number}", OTHER_MARKERS[number])
        styles[name] = style
    return styles


def format_palette() -> str:
    """Return the rules of the style sheet for `choose_styles`, in light and in dark colors."""
    light = {name: style.color for name, style in palette.STYLES.items()}
    dark = {name: palette.lighten(color, DARK_PAPER) for name, color in light.items()}
    light_rules, dark_rules = (
        "".join(f".p-{name}{{fill:{color};stroke:{color}}}" for name, color in colors.items())
        for colors in (light, dark)
    )
    return f"{light_rules}@media (prefers-color-scheme:dark){{{dark_rules}}}"


def _compute_star(num_points: int, inner_radius: float, turn: float = 0.0) -> tuple[tuple[float, float], ...]:
    """Return the corners of a star whose first point is above its center; a polygon has no inner corners."""
    corners = []
    for i in range(2 * num_points):
        radius, angle = (1.3 if i % 2 == 0 else inner_radius), math.pi * (i / num_points + turn)
        if radius:
            corners.append((radius * math.sin(angle), -radius * math.cos(angle)))
    return tuple(corners)


_PLUS = ((-0.4, -1.2), (0.4, -1.2), (0.4, -0.4), (1.2, -0.4), (1.2, 0.4), (0.4, 0.4))
_CORNERS = {
    "s": ((-1, -1), (1, -1), (1, 1), (-1, 1)),
    "^": _compute_star(3, 0),
    "v": _compute_star(3, 0, 1),
    "<": _compute_star(3, 0, 1.5),
    ">": _compute_star(3, 0, 0.5),
    "D": _compute_star(4, 0),
    "d": ((0, -1.4), (0.9, 0), (0, 1.4), (-0.9, 0)),
    "p": _compute_star(5, 0),
    "h": _compute_star(6, 0),
    "*": _compute_star(5, 0.55),
    "P": (*_PLUS, *((-x, -y) for x, y in _PLUS)),
    "X": _compute_star(4, 0.5, 0.25),
}


def make_mark(style: DrawnStyle, x: float, y: float, title: str, size: float = 5) -> Markup:
    """Return the mark of a series, which has its own shape and color."""
    class_, title_element = f"mark {style.class_}", make_element("title", title)
    corners = _CORNERS.get(style.marker)
    if corners is None:
        return make_element("circle", title_element, cx=x, cy=y, r=size, class_=class_)
    points = " ".join(f"{format_number(x + size * dx)},{format_number(y + size * dy)}" for dx, dy in corners)
    return make_element("polygon", title_element, points=points, class_=class_)


def make_legend(icons: Mapping[str, Markup]) -> Markup:
    """Return a legend of icons of 16 × 16 px by their texts."""
    entries = (
        make_element("li", make_element("svg", icon, viewBox="0 0 16 16", aria_hidden="true"), f" {name}")
        for name, icon in icons.items()
    )
    return make_element("ul", join_markup(entries), class_="legend")


def make_axes(x: AxisScale, y: AxisScale, x_label: str, y_label: str) -> Markup:
    """Return both axes with grid lines, numbers at round values, and labels."""
    bottom, top, left_x, right = y.start_coordinate, y.end_coordinate, x.start_coordinate, x.end_coordinate
    fragments = []
    for value in x.list_ticks():
        fragments.append(make_line(x(value), bottom, x(value), top, "grid"))
        fragments.append(make_text(x(value), bottom + 16, format_tick(value), "middle"))
    for value in y.list_ticks():
        fragments.append(make_line(left_x, y(value), right, y(value), "grid"))
        fragments.append(make_text(left_x - 6, y(value) + 4, format_tick(value), "end"))
    fragments += [make_line(left_x, bottom, right, bottom, "axis"), make_line(left_x, bottom, left_x, top, "axis")]
    fragments += [make_text((left_x + right) / 2, bottom + 34, x_label, "middle"), make_text(left_x, top - 10, y_label)]
    return join_markup(fragments)


def format_tick(value: float) -> str:
    """Return a round value in short form: 0.5, 20, 1,000, 50k."""
    if value >= 10_000:
        return f"{value / 1000:,.4g}k"
    return f"{value:,.4g}" if value >= 1000 else f"{value:.4g}"


def spread_labels(positions: Sequence[float], min_gap: float, min_position: float, max_position: float) -> list[float]:
    """Return positions of labels that do not overlap, each as close to its wanted position as possible. Positions
    exceed the largest one only if there is no room.
    """
    order = sorted(range(len(positions)), key=lambda i: positions[i])
    label_positions = [0.0] * len(positions)
    next_position = min_position
    for i in order:
        label_positions[i] = max(positions[i], next_position)
        next_position = label_positions[i] + min_gap
    last_position = max(max_position, min_position + min_gap * (len(positions) - 1))
    for i in reversed(order):
        label_positions[i] = min(label_positions[i], last_position)
        last_position = label_positions[i] - min_gap
    return label_positions


def format_microseconds(seconds: float) -> str:
    """Return a time with its unit: "10.3 µs", "1.25 ms"."""
    return f"{format_significant(seconds * 1e3)} ms" if seconds >= 1e-3 else f"{format_significant(seconds * 1e6)} µs"
