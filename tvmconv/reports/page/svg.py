"""A small vocabulary to draw with: scales, axes, bars and marks, in SVG coloured by the page's style."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tvmconv.reports.page.markup import Markup, element, joined, number, scrolling
from tvmconv.reports.tables import significant

SHRINK = 0.75  # of its width, down to which a chart goes on a narrow screen; in steps of 100: classes w1 to w16
WIDEST = 16
ROOM = 12  # times the least value, beyond which bars are broken
MARKS = 6  # shapes and colours that tell series apart: classes s0 to s5


@dataclass(frozen=True)
class Scale:
    """From values to coordinates.

    Attributes:
        low: the least value.
        high: the greatest.
        begin: coordinate of the least.
        end: coordinate of the greatest.
        log: whether equal ratios are equally long, not equal differences.
        whole: whether only whole numbers are labelled.
    """

    low: float
    high: float
    begin: float
    end: float
    log: bool = False
    whole: bool = False

    def __call__(self, value: float) -> float:
        """The coordinate of a value; of one beyond the ends that of the end."""
        low, high, value = (math.log(each) if self.log else each for each in (self.low, self.high, value))
        share = (value - low) / (high - low) if high > low else 0.5
        return self.begin + min(max(share, 0.0), 1.0) * (self.end - self.begin)

    def ticks(self) -> list[float]:
        """Round values to label: 1, 2 and 5 times powers of ten, some six; powers alone where these are many."""
        if not self.log:
            step = max(_round_step((self.high - self.low) / 5), float(self.whole))
            first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
            return [i * step for i in range(first, last + 1)]
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for factors in ((1, 2, 5), (1,)):
            found = [factor * 10.0**power for power in powers for factor in factors]
            found = [value for value in found if self.low * (1 - 1e-9) <= value <= self.high * (1 + 1e-9)]
            if len(found) <= 7:
                break
        return found


def _round_step(least: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that is at least so much."""
    power = 10.0 ** math.floor(math.log10(least)) if least > 0 else 1.0
    return next((factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9)), 10 * power)


def chart(label: str, width: float, height: float, *children: str, group: bool = False) -> Markup:
    """A picture with a name, in a box that scrolls where the screen is narrower than it can be read on.

    Args:
        label: what it shows, for who does not see it.
        width: of its coordinates.
        height: of them.
        children: of the picture.
        group: whether there are buttons in it; else it is one image to who listens.
    """
    drawn = element(
        "svg",
        *children,
        viewBox=f"0 0 {number(width)} {number(height)}",
        width=width,
        height=height,
        class_=f"chart w{min(int(width * SHRINK / 100), WIDEST)}",
        role="group" if group else "img",
        aria_label=label,
    )
    return element("figure", scrolling(drawn, label))


def bar(begin: float, end: float, class_: str, label: str, tick: float | None = None) -> Markup:
    """A bar across a cell, from one share of its width to another; one that is longer than the cell is broken.

    Args:
        begin: 0 at the left.
        end: 1 at the right.
        class_: its colour.
        label: what it says, for who does not see it.
        tick: a share at which a line is drawn, too.
    """
    rects = [
        element("rect", x=100 * begin, y=0, width=max(100 * (min(end, 1.0) - begin), 0.5), height=10, class_=class_)
    ]
    if end > 1:
        rects.append(element("path", d="M90 11L92 -1H94L92 11Z", class_="gap"))
    if tick is not None:
        rects.append(element("rect", x=100 * tick - 0.3, y=0, width=0.6, height=10, class_="measured"))
    how = {"viewBox": "0 0 100 10", "preserveAspectRatio": "none", "class_": "bar", "role": "img"}
    return element("svg", *rects, **how, aria_label=label)


def full_width(values: Sequence[float]) -> float:
    """What the longest bar stands for: the greatest value, unless it and others would leave no room for the rest.

    Then it is `ROOM` times the least, and longer bars are broken.
    """
    return min(max(values), ROOM * min(values)) if values else 0.0


def text(x: float, y: float, content: str, anchor: str | None = None, class_: str | None = None) -> Markup:
    """A text; `anchor` is "middle" or "end" where it does not begin at x."""
    return element("text", content, x=x, y=y, text_anchor=anchor, class_=class_)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    """A straight line."""
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def path(points: Sequence[tuple[float, float]], class_: str, title: str = "", **more: str) -> Markup:
    """A line through points, none of it filled."""
    spelled = "M" + "L".join(f"{number(x)} {number(y)}" for x, y in points)
    return element("path", *([element("title", title)] if title else []), d=spelled, class_=class_, fill="none", **more)


def mark(series: int, x: float, y: float, title: str, size: float = 5) -> Markup:
    """A mark of a series, which its shape tells as well as its colour."""
    corners = {0: (), 1: ((-1, -1), (1, -1), (1, 1), (-1, 1)), 2: ((0, -1.3), (1.2, 1), (-1.2, 1))}
    corners |= {3: ((0, -1.4), (1.4, 0), (0, 1.4), (-1.4, 0)), 4: ((0, 1.3), (1.2, -1), (-1.2, -1)), 5: ()}
    shape, kind = series % MARKS, f"mark s{series % MARKS}"
    told = element("title", title)
    if not corners[shape]:
        return element("circle", told, cx=x, cy=y, r=size, class_=kind + " hollow" * (shape == 5))
    points = " ".join(f"{number(x + size * dx)},{number(y + size * dy)}" for dx, dy in corners[shape])
    return element("polygon", told, points=points, class_=kind)


def legend(icons: Mapping[str, Markup]) -> Markup:
    """What icons of 16 by 16 stand for, by what is said beside each."""
    entries = (
        element("li", element("svg", icon, viewBox="0 0 16 16", aria_hidden="true"), f" {name}")
        for name, icon in icons.items()
    )
    return element("ul", joined(entries), class_="legend")


def axes(x: Scale, y: Scale, x_label: str, y_label: str) -> Markup:
    """Both axes with grid lines, numbers at round values, and what they are."""
    bottom, top, left, right = y.begin, y.end, x.begin, x.end
    parts = []
    for value in x.ticks():
        parts.append(line(x(value), bottom, x(value), top, "grid"))
        parts.append(text(x(value), bottom + 16, tick(value), "middle"))
    for value in y.ticks():
        parts.append(line(left, y(value), right, y(value), "grid"))
        parts.append(text(left - 6, y(value) + 4, tick(value), "end"))
    parts += [line(left, bottom, right, bottom, "axis"), line(left, bottom, left, top, "axis")]
    parts += [text((left + right) / 2, bottom + 34, x_label, "middle"), text(left, top - 10, y_label)]
    return joined(parts)


def tick(value: float) -> str:
    """A round value, briefly: 0.5, 20, 1,000, 50k."""
    if value >= 10_000:
        return f"{value / 1000:,.4g}k"
    return f"{value:,.4g}" if value >= 1000 else f"{value:.4g}"


def apart(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Where labels go so that none covers another, each as near to its place as that allows.

    Args:
        places: where they would be.
        gap: between two of them.
        low: none is above this.
        high: nor below this, unless there is no room.
    """
    order = sorted(range(len(places)), key=lambda i: places[i])
    found = [0.0] * len(places)
    least = low
    for i in order:
        found[i] = max(places[i], least)
        least = found[i] + gap
    most = max(high, low + gap * (len(places) - 1))
    for i in reversed(order):
        found[i] = min(found[i], most)
        most = found[i] - gap
    return found


def microseconds(seconds: float) -> str:
    """A time with its unit: "10.3 µs", "1.25 ms"."""
    return f"{significant(seconds * 1e3)} ms" if seconds >= 1e-3 else f"{significant(seconds * 1e6)} µs"
