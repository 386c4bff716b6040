"""The file: head, style, script, navigation and sections, in one text that asks for nothing from anywhere."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

from tvmconv.reports.page.markup import Markup, element, joined


@dataclass(frozen=True)
class Section:
    """A part of the page that the navigation leads to.

    Attributes:
        name: its id, such as "results".
        title: its heading.
        body: what is under it.
    """

    name: str
    title: str
    body: Markup


def document(title: str, lead: Markup, sections: Sequence[Section]) -> str:
    """The whole page.

    Nothing may be loaded, run or styled but the style and the script in the page, which its policy names by their
    hashes ("Content Security Policy Level 3", W3C).

    Args:
        title: of the page.
        lead: what is above the sections.
        sections: in their order.
    """
    style, script = (Markup(_file(name)) for name in ("page.css", "page.js"))
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", name="referrer", content="no-referrer"),
        element("title", title),
        element("style", style),
    )
    links = (element("li", element("a", section.title, href=f"#{section.name}")) for section in sections)
    body = element(
        "body",
        element("a", "To the content", class_="skip", href="#content"),
        element("header", element("h1", title), lead),
        element("nav", element("ul", joined(links)), aria_label="Sections"),
        element("main", joined(map(_section, sections)), id="content", tabindex="-1"),
        element("p", class_="status", role="status", aria_live="polite"),
        element("script", script),
    )
    return f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n"


def _section(section: Section) -> Markup:
    heading = element("h2", section.title, id=f"{section.name}-title")
    return element("section", heading, section.body, id=section.name, aria_labelledby=f"{section.name}-title")


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"
