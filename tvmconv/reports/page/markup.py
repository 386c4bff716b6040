"""HTML as text: elements, in which everything that is not marked as markup is escaped, and the whole document."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources

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
    """Return an element with children that are markup or texts, which are escaped. The attributes are named `class_`
    for class and `aria_label` for aria-label. None and False leave an attribute out, and numbers are written with at
    most two decimals.
    """
    tag = f"<{name}{''.join(map(_format_attribute, attributes, attributes.values()))}>"
    return Markup(tag if name in VOID_ELEMENTS else f"{tag}{join_markup(children)}</{name}>")


def _format_attribute(name: str, value: str | float | bool | None) -> str:
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


def make_soft(text: str) -> Markup:
    """Return a remark inside a line, in a softer color."""
    return make_element("span", text, class_="soft")


def render_table(contents: Table, caption: str = "") -> Markup:
    """Render a table in a box that scrolls on narrow screens; the first cell of each row is its header."""
    sides = ["left" if header in contents.left_aligned else None for header in contents.headers]
    head = (
        make_element("th", header, scope="col", class_=side)
        for header, side in zip(contents.headers, sides, strict=True)
    )
    table_element = make_element(
        "table",
        *([make_element("caption", caption)] if caption else []),
        make_element("thead", make_element("tr", *head)),
        make_element("tbody", *(_render_row(row, sides) for row in contents.rows)),
    )
    return make_scroll_box(table_element, caption or "table")


def _render_row(row: Sequence[str], sides: Sequence[str | None]) -> Markup:
    header = make_element("th", row[0], scope="row", class_=sides[0])
    cells = (make_element("td", cell, class_=side) for cell, side in zip(row[1:], sides[1:], strict=True))
    return make_element("tr", header, *cells)


def make_scroll_box(content: str, label: str) -> Markup:
    """Return content in a box that scrolls by itself, also by the keyboard."""
    return make_element("div", content, class_="scroll", tabindex="0", role="group", aria_label=label)


def make_details(summary: str, *content: str, is_open: bool = False) -> Markup:
    """Return content that is unfolded on request without a script."""
    return make_element("details", make_element("summary", summary), *content, open=is_open)


@dataclass(frozen=True)
class Section:
    """A section of the page, to which the navigation links by its name, an HTML id such as "results"."""

    name: str
    title: str
    body: Markup


def render_document(title: str, lead: Markup, sections: Sequence[Section], extra_style: str = "") -> str:
    """Render the whole page in one text that loads nothing: head, style, script, navigation, lead and sections. The
    rules of `extra_style` follow those of page.css. The
    page's policy allows only its own style and script, which it names by their hashes ("Content Security Policy Level
    3", W3C).
    """
    style, script = (
        Markup(resources.files(__package__).joinpath(name).read_text(encoding="utf-8"))
        for name in ("page.css", "page.js")
    )
    style = Markup(style + extra_style)
    policy = (
        f"default-src 'none'; script-src '{_hash_content(script)}'; style-src '{_hash_content(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    head = make_element(
        "head",
        make_element("meta", charset="utf-8"),
        make_element("meta", http_equiv="Content-Security-Policy", content=policy),
        make_element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        make_element("meta", name="color-scheme", content="light dark"),
        make_element("meta", name="referrer", content="no-referrer"),
        make_element("title", title),
        make_element("style", style),
    )
    links = (make_element("li", make_element("a", section.title, href=f"#{section.name}")) for section in sections)
    body = make_element(
        "body",
        make_element("a", "To the content", class_="skip", href="#content"),
        make_element("header", make_element("h1", title), lead),
        make_element("nav", make_element("ul", *links), aria_label="Sections"),
        make_element("main", *map(_render_section, sections), id="content", tabindex="-1"),
        make_element("p", class_="status", role="status", aria_live="polite"),
        make_element("script", script),
    )
    return f"<!DOCTYPE html>\n{make_element('html', head, body, lang='en')}\n"


def _render_section(section: Section) -> Markup:
    heading = make_element("h2", section.title, id=f"{section.name}-title")
    return make_element("section", heading, section.body, id=section.name, aria_labelledby=f"{section.name}-title")


def _hash_content(content: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"
