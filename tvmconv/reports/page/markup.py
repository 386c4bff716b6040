"""HTML and SVG as text; everything that is not marked as markup is escaped, so that names cannot inject markup."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence

from tvmconv.reports.tables import Table

VOID_ELEMENTS = frozenset({"meta", "br"})
# Characters that HTML does not allow even escaped, and unpaired surrogates, which UTF-8 cannot encode.
_NOT_TEXT = re.compile("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")


class Markup(str):
    """Markup, as opposed to text; `make_element` and `join_markup` return it."""

    __slots__ = ()


def escape_text(text: str) -> Markup:
    """Return a text as escaped markup, and markup unchanged."""
    return text if isinstance(text, Markup) else Markup(html.escape(_NOT_TEXT.sub("\N{REPLACEMENT CHARACTER}", text)))


def join_markup(fragments: Iterable[str]) -> Markup:
    """Concatenate fragments of markup."""
    return Markup("".join(map(escape_text, fragments)))


def make_element(name: str, /, *children: str, **attributes: str | float | bool | None) -> Markup:
    """Return an element.

    Args:
        name: Tag name, such as "p".
        children: Markup, or texts, which are escaped.
        attributes: Attributes by name, with `class_` for class and `aria_label` for aria-label. None and False leave an
            attribute out, and numbers are written with at most two decimals.
    """
    attribute_text = "".join(map(_format_attribute, attributes.items()))
    content = join_markup(children)
    return Markup(
        f"<{name}{attribute_text}>" if name in VOID_ELEMENTS else f"<{name}{attribute_text}>{content}</{name}>"
    )


def _format_attribute(item: tuple[str, str | float | bool | None]) -> str:
    name, value = item
    name = name.rstrip("_").replace("_", "-")
    if value is None or value is False:
        return ""
    if value is True:
        return f" {name}"
    return f' {name}="{escape_text(str(value)) if isinstance(value, str) else format_number(value)}"'


def format_number(value: float) -> str:
    """Return a coordinate with at most two decimals: 12, 0.5, 3.25."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def make_paragraph(text: str, class_: str | None = None) -> Markup:
    """Return a paragraph."""
    return make_element("p", text, class_=class_)


def render_table(contents: Table, caption: str = "") -> Markup:
    """Render a table in a box that scrolls on narrow screens; the first cell of each row is its header."""
    sides = ["left" if header in contents.left_aligned else None for header in contents.headers]
    head = join_markup(
        make_element("th", header, scope="col", class_=side)
        for header, side in zip(contents.headers, sides, strict=True)
    )
    body = join_markup(_render_row(row, sides) for row in contents.rows)
    table_element = make_element(
        "table",
        *([make_element("caption", caption)] if caption else []),
        make_element("thead", make_element("tr", head)),
        make_element("tbody", body),
    )
    return make_scroll_box(table_element, caption or "table")


def _render_row(row: Sequence[str], sides: Sequence[str | None]) -> Markup:
    first_cell, *remaining_cells = row
    cells = (make_element("td", cell, class_=side) for cell, side in zip(remaining_cells, sides[1:], strict=True))
    return make_element("tr", make_element("th", first_cell, scope="row", class_=sides[0]), join_markup(cells))


def make_scroll_box(content: str, label: str) -> Markup:
    """Return content in a box that scrolls by itself, also by the keyboard."""
    return make_element("div", content, class_="scroll", tabindex="0", role="region", aria_label=label)


def make_details(summary: str, *content: str, is_open: bool = False) -> Markup:
    """Return content that is unfolded on request without a script."""
    return make_element("details", make_element("summary", summary), *content, open=is_open)
