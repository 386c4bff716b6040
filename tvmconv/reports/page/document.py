"""The HTML document: head, style, script, navigation and sections in one text that loads nothing."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

from tvmconv.reports.page.markup import Markup, join_markup, make_element


@dataclass(frozen=True)
class Section:
    """A section of the page, to which the navigation links.

    Attributes:
        name: HTML id of the section, such as "results".
        title: Heading of the section.
        body: Content of the section.
    """

    name: str
    title: str
    body: Markup


def render_document(title: str, lead: Markup, sections: Sequence[Section]) -> str:
    """Render the whole page.

    The page's policy allows only its own style and script, which it names by their hashes ("Content Security Policy
    Level 3", W3C).

    Args:
        title: Title of the page.
        lead: Content above the sections.
        sections: Sections in their order.
    """
    style, script = (Markup(_read_resource(name)) for name in ("page.css", "page.js"))
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
        make_element("nav", make_element("ul", join_markup(links)), aria_label="Sections"),
        make_element("main", join_markup(map(_render_section, sections)), id="content", tabindex="-1"),
        make_element("p", class_="status", role="status", aria_live="polite"),
        make_element("script", script),
    )
    return f"<!DOCTYPE html>\n{make_element('html', head, body, lang='en')}\n"


def _render_section(section: Section) -> Markup:
    heading = make_element("h2", section.title, id=f"{section.name}-title")
    return make_element("section", heading, section.body, id=section.name, aria_labelledby=f"{section.name}-title")


def _read_resource(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash_content(content: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"
