"""HTML and SVG as text: whatever is not marked as markup is escaped, so that no name and no message becomes any."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence

from tvmconv.reports.tables import Table

VOID = frozenset({"meta", "br"})
# What HTML does not allow even escaped; and halves of surrogate pairs, which JSON can spell and UTF-8 cannot.
_NOT_TEXT = re.compile("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")


class Markup(str):
    """Markup, as opposed to text; made by `element` and `joined`."""

    __slots__ = ()


def escaped(text: str) -> Markup:
    """A text as markup that shows it; markup as it is."""
    return text if isinstance(text, Markup) else Markup(html.escape(_NOT_TEXT.sub("\N{REPLACEMENT CHARACTER}", text)))


def joined(parts: Iterable[str]) -> Markup:
    """Parts one after another."""
    return Markup("".join(map(escaped, parts)))


def element(name: str, /, *children: str, **attributes: str | float | bool | None) -> Markup:
    """An element.

    Args:
        name: of it, such as "p".
        children: markup, or texts, which are escaped.
        attributes: by name, `class_` for class and `aria_label` for aria-label; those that are None or False are left
            out, and numbers are written briefly.
    """
    told = "".join(map(_attribute, attributes.items()))
    inner = joined(children)
    return Markup(f"<{name}{told}>" if name in VOID else f"<{name}{told}>{inner}</{name}>")


def _attribute(item: tuple[str, str | float | bool | None]) -> str:
    name, value = item
    name = name.rstrip("_").replace("_", "-")
    if value is None or value is False:
        return ""
    if value is True:
        return f" {name}"
    return f' {name}="{escaped(str(value)) if isinstance(value, str) else number(value)}"'


def number(value: float) -> str:
    """A coordinate with two decimals at most: 12, 0.5, 3.25."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def paragraph(text: str, class_: str | None = None) -> Markup:
    """A paragraph."""
    return element("p", text, class_=class_)


def table(told: Table, caption: str = "") -> Markup:
    """A table, in a box of its own that scrolls where the screen is narrow; each line is headed by its first cell."""
    sides = ["left" if header in told.left else None for header in told.headers]
    head = joined(
        element("th", header, scope="col", class_=side) for header, side in zip(told.headers, sides, strict=True)
    )
    body = joined(_line(row, sides) for row in told.rows)
    whole = element(
        "table",
        *([element("caption", caption)] if caption else []),
        element("thead", element("tr", head)),
        element("tbody", body),
    )
    return scrolling(whole, caption or "table")


def _line(row: Sequence[str], sides: Sequence[str | None]) -> Markup:
    first, *others = row
    cells = (element("td", cell, class_=side) for cell, side in zip(others, sides[1:], strict=True))
    return element("tr", element("th", first, scope="row", class_=sides[0]), joined(cells))


def scrolling(content: str, label: str) -> Markup:
    """Something wide in a box that scrolls by itself, with the keyboard too."""
    return element("div", content, class_="scroll", tabindex="0", role="region", aria_label=label)


def folded(summary: str, *content: str, open_: bool = False) -> Markup:
    """Something that is unfolded on request, which needs no script."""
    return element("details", element("summary", summary), *content, open=open_)
