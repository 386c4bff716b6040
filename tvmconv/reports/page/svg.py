"""A small vocabulary to draw with: scales, axes, bars and marks, in SVG coloured by the page's style."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tvmconv.reports.page.markup import Markup, format_number, join_markup, make_element, make_scroll_box
from tvmconv.reports.tables import format_significant

MIN_WIDTH_FRACTION = (
    0.75  # of its width, down to which a chart goes on a narrow screen; in steps of 100: classes w1 to w16
)
MAX_WIDTH_CLASS = 16
MAX_BAR_RATIO = 12  # times the least value, beyond which bars are broken
NUM_MARKS = 6  # shapes and colours that tell series apart: classes s0 to s5


@dataclass(frozen=True)
class AxisScale:
    """From values to coordinates.

    Attributes:
        min_value: the least value.
        max_value: the greatest.
        start_coordinate: coordinate of the least.
        end_coordinate: coordinate of the greatest.
        is_log: whether equal ratios are equally long, not equal differences.
        is_integer: whether only whole numbers are labelled.
    """

    min_value: float
    max_value: float
    start_coordinate: float
    end_coordinate: float
    is_log: bool = False
    is_integer: bool = False

    def __call__(self, value: float) -> float:
        """The coordinate of a value; of one beyond the ends that of the end."""
        min_scaled, max_scaled, value = (
            math.log(number) if self.is_log else number for number in (self.min_value, self.max_value, value)
        )
        fraction = (value - min_scaled) / (max_scaled - min_scaled) if max_scaled > min_scaled else 0.5
        return self.start_coordinate + min(max(fraction, 0.0), 1.0) * (self.end_coordinate - self.start_coordinate)

    def list_ticks(self) -> list[float]:
        """Round values to label: 1, 2 and 5 times powers of ten, some six; powers alone where these are many."""
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
    """The smallest of 1, 2 and 5 times a power of ten that is at least so much."""
    power = 10.0 ** math.floor(math.log10(min_step)) if min_step > 0 else 1.0
    return next((factor * power for factor in (1, 2, 5, 10) if factor * power >= min_step * (1 - 1e-9)), 10 * power)


def make_chart(label: str, width: float, height: float, *children: str, has_buttons: bool = False) -> Markup:
    """A picture with a name, in a box that scrolls where the screen is narrower than it can be read on.

    Args:
        label: what it shows, for who does not see it.
        width: of its coordinates.
        height: of them.
        children: of the picture.
        has_buttons: whether there are buttons in it; else it is one image to who listens.
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


def make_bar(
    start_fraction: float, end_fraction: float, class_: str, label: str, tick_fraction: float | None = None
) -> Markup:
    """A bar across a cell, from one share of its width to another; one that is longer than the cell is broken.

    Args:
        start_fraction: 0 at the left.
        end_fraction: 1 at the right.
        class_: its colour.
        label: what it says, for who does not see it.
        tick_fraction: a share at which a line is drawn, too.
    """
    rects = [
        make_element(
            "rect",
            x=100 * start_fraction,
            y=0,
            width=max(100 * (min(end_fraction, 1.0) - start_fraction), 0.5),
            height=10,
            class_=class_,
        )
    ]
    if end_fraction > 1:
        rects.append(make_element("path", d="M90 11L92 -1H94L92 11Z", class_="gap"))
    if tick_fraction is not None:
        rects.append(make_element("rect", x=100 * tick_fraction - 0.3, y=0, width=0.6, height=10, class_="measured"))
    svg_attributes = {"viewBox": "0 0 100 10", "preserveAspectRatio": "none", "class_": "bar", "role": "img"}
    return make_element("svg", *rects, **svg_attributes, aria_label=label)


def compute_full_width(values: Sequence[float]) -> float:
    """What the longest bar stands for: the greatest value, unless it and others would leave no room for the rest.

    Then it is `MAX_BAR_RATIO` times the least, and longer bars are broken.
    """
    return min(max(values), MAX_BAR_RATIO * min(values)) if values else 0.0


def make_text(x: float, y: float, content: str, anchor: str | None = None, class_: str | None = None) -> Markup:
    """A text; `anchor` is "middle" or "end" where it does not begin at x."""
    return make_element("text", content, x=x, y=y, text_anchor=anchor, class_=class_)


def make_line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    """A straight line."""
    return make_element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def make_path(points: Sequence[tuple[float, float]], class_: str, title: str = "", **attributes: str) -> Markup:
    """A line through points, none of it filled."""
    path_data = "M" + "L".join(f"{format_number(x)} {format_number(y)}" for x, y in points)
    return make_element(
        "path",
        *([make_element("title", title)] if title else []),
        d=path_data,
        class_=class_,
        fill="none",
        **attributes,
    )


def make_mark(series_number: int, x: float, y: float, title: str, size: float = 5) -> Markup:
    """A mark of a series, which its shape tells as well as its colour."""
    corners = {0: (), 1: ((-1, -1), (1, -1), (1, 1), (-1, 1)), 2: ((0, -1.3), (1.2, 1), (-1.2, 1))}
    corners |= {3: ((0, -1.4), (1.4, 0), (0, 1.4), (-1.4, 0)), 4: ((0, 1.3), (1.2, -1), (-1.2, -1)), 5: ()}
    shape, kind = series_number % NUM_MARKS, f"mark s{series_number % NUM_MARKS}"
    title_element = make_element("title", title)
    if not corners[shape]:
        return make_element("circle", title_element, cx=x, cy=y, r=size, class_=kind + " hollow" * (shape == 5))
    points = " ".join(f"{format_number(x + size * dx)},{format_number(y + size * dy)}" for dx, dy in corners[shape])
    return make_element("polygon", title_element, points=points, class_=kind)


def make_legend(icons: Mapping[str, Markup]) -> Markup:
    """What icons of 16 by 16 stand for, by what is said beside each."""
    entries = (
        make_element("li", make_element("svg", icon, viewBox="0 0 16 16", aria_hidden="true"), f" {name}")
        for name, icon in icons.items()
    )
    return make_element("ul", join_markup(entries), class_="legend")


def make_axes(x: AxisScale, y: AxisScale, x_label: str, y_label: str) -> Markup:
    """Both axes with grid lines, numbers at round values, and what they are."""
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
    """A round value, briefly: 0.5, 20, 1,000, 50k."""
    if value >= 10_000:
        return f"{value / 1000:,.4g}k"
    return f"{value:,.4g}" if value >= 1000 else f"{value:.4g}"


def spread_labels(positions: Sequence[float], min_gap: float, min_position: float, max_position: float) -> list[float]:
    """Where labels go so that none covers another, each as near to its place as that allows.

    Args:
        positions: where they would be.
        min_gap: between two of them.
        min_position: none is above this.
        max_position: nor below this, unless there is no room.
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
    """A time with its unit: "10.3 µs", "1.25 ms"."""
    return f"{format_significant(seconds * 1e3)} ms" if seconds >= 1e-3 else f"{format_significant(seconds * 1e6)} µs"
