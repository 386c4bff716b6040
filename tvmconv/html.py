"""HTML of objects in notebooks: tables, bars and details. Notebooks show what `_repr_html_` of an object returns.

The fragments have no style sheet and no fixed colors of texts, so that they follow the theme of the notebook.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from html import escape

BAR_PIXELS = 160  # of the longest bar


def make_html_table(
    headers: Sequence[str], rows: Sequence[Sequence[str]], left_aligned: Collection[str] = (), title: str = ""
) -> str:
    """Return a table of texts, which are escaped; columns are right-aligned except those in `left_aligned`."""
    styles = [f"text-align: {'left' if header in left_aligned else 'right'}" for header in headers]
    caption = f'<caption style="caption-side: top; text-align: left">{escape(title)}</caption>' if title else ""
    head = _make_row("th", headers, styles)
    body = "".join(_make_row("td", row, styles) for row in rows)
    return f"<table>{caption}<thead>{head}</thead><tbody>{body}</tbody></table>"


def _make_row(tag: str, cells: Sequence[str], styles: Sequence[str]) -> str:
    content = "".join(
        f'<{tag} style="{style}">{escape(cell)}</{tag}>' for cell, style in zip(cells, styles, strict=True)
    )
    return f"<tr>{content}</tr>"


def make_html_properties(title: str, values: Mapping[str, str]) -> str:
    """Return a table of names and values with a title."""
    rows = [(name, value) for name, value in values.items() if value]
    return make_html_table(("", title), rows, {"", title})


def make_html_bars(values: Mapping[str, float], labels: Mapping[str, str], colors: Mapping[str, str]) -> str:
    """Return horizontal bars with names on the left and labels on the right; values are at least 0."""
    longest = max(values.values(), default=0) or 1
    lines = [
        f'<tr><td style="text-align: left">{escape(name)}</td><td style="text-align: left">'
        f'<span style="display: inline-block; height: 0.8em; width: {BAR_PIXELS * value / longest:.0f}px; '
        f'background: {colors[name]}"></span> {escape(labels[name])}</td></tr>'
        for name, value in values.items()
    ]
    return f"<table>{''.join(lines)}</table>"


def make_html_details(summary: str, text: str) -> str:
    """Return a text in a fixed-width font that a click on its summary shows."""
    return f"<details><summary>{escape(summary)}</summary><pre>{escape(text)}</pre></details>"
