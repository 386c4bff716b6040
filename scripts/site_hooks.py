"""Hooks of MkDocs: pages that are generated, and links from docs/ to files of the project.

* `index.md`, `changelog.md` and `contributing.md` are README.md, CHANGELOG.md and CONTRIBUTING.md.
* `reference/cli.md` has the help text of each command, `reference/schedules.md` each schedule with its knobs.
* A link from a page to a file outside docs/ leads to a page with the file's text, or to a copy of the picture.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
LANGUAGES = {".py": "python", ".md": "markdown", ".json": "json", ".jsonl": "json", ".toml": "toml"}
PICTURES = (".png", ".svg", ".html")
INDEX = "INDEX.md"  # of all measurements: the site has those that its own pages link to
MAX_SOURCE_BYTES = 200_000  # a longer file, such as a log, is named without a link
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE_MARK = re.compile(r"^(```\w+) \w+$", re.MULTILINE)  # the mark behind the language is for the tests

OPERATORS = ("conv2d", "filter1d", "filter2d")  # whose schedules are titled by their names alone
# A workload for each operator whose schedules are listed.
EXAMPLES = (
    "conv2d:1x64x56x56,64x64x3x3,s1,p1",
    "conv2d:1x64x56x56,64x64x3x3,s1,p1,f16,nhwc",
    "conv2d:1x3x224x224,64x3x7x7,s2,p3,f16,nhwc",
    "conv2d:1x96x56x56,96x1x7x7,s1,p3,g96",
    "conv2d:1x96x56x56,96x1x7x7,s1,p3,g96,f16,nhwc",
    "conv2d:1x128x56x56,128x4x3x3,s1,p1,g32,f16,nhwc",
    "conv2d:1x128x56x56,128x4x3x3,s1,p1,g32,f16",
    "conv2d:32x64x56x56,64x64x3x3,s1,p1,i8,nhwc",
    "conv2d:32x64x56x56,64x64x3x3,s1,p1,e4m3,nhwc",
    "conv2d:32x96x112x112,2x96x1x1,s1,p0,f16,nhwc",
    "conv2d:1x96x480x832,3x96x3x3,s1,p1,f16,nhwc",
    "conv2d:1x512x64x64,512x512x3x3,s1,p1,up2,f16,nhwc",
    "conv2d_dgrad:2x64x56x56,64x64x3x3,s1,p1,f16,nhwc",
    "conv2d_wgrad:2x64x56x56,64x64x3x3,s1,p1,f16,nhwc",
    "conv2d_wgrad:2x64x56x56,64x64x3x3,s1,p1",
    "conv2d_wgrad:32x960x7x7,960x1x5x5,s1,p2,g960,f16,nhwc",
    "filter1d:16777216,k5",
    "filter2d:4096x4096x3,5x5",
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages, and every file that a page links to."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    files.append(File.generated(config, "reference/cli.md", content=_describe_commands()))
    files.append(File.generated(config, "reference/schedules.md", content=_describe_schedules()))
    for path in _reachable_files(files):
        uri = _site_uri(path)
        if files.get_file_from_path(uri):
            continue
        if path.suffix in PICTURES:
            files.append(File.generated(config, uri, abs_src_path=str(path)))
        else:
            language = LANGUAGES.get(path.suffix, "text")
            text = path.read_text(encoding="utf-8")
            content = text if path.suffix == ".md" else f"# {path.relative_to(ROOT)}\n\n````{language}\n{text}\n````\n"
            files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links to files of the project, and remove the marks of code blocks that tests read."""
    source = _source_of(page.file)
    if page.file.src_uri.startswith("source/"):  # the search finds what is written for readers
        page.meta["search"] = {"exclude": True}
    markdown = FENCE_MARK.sub(r"\1", markdown)
    return LINK.sub(lambda match: _rewrite(match, source, page.file.src_uri, files), markdown) if source else markdown


def _pages(files: Files) -> Iterator[Path]:
    for file in files.documentation_pages():
        if source := _source_of(file):
            yield source


def _reachable_files(files: Files) -> list[Path]:
    """The files outside docs/ that links lead to, from pages of the site or from one another."""
    reached: set[Path] = set()
    pages = list(_pages(files))
    while pages:
        linked = {path for page in pages for path in _linked_files(page)} - reached
        reached |= linked
        pages = [path for path in linked if path.suffix == ".md"]
    return sorted(reached)


def _source_of(file: File) -> Path | None:
    """Return the file of the project that a page is made of; None for pages that have none."""
    for source, uri in PAGES.items():
        if file.src_uri == uri:
            return ROOT / source
    if file.src_uri.startswith("source/"):
        path = ROOT / file.src_uri.removeprefix("source/")
        return path if path.suffix == ".md" else None
    return Path(file.abs_src_path) if file.abs_src_path else None


def _linked_files(page: Path) -> Iterator[Path]:
    """The files outside docs/ that a page links to, and that a site can show."""
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        path = _target(link, page)
        if path and not path.is_relative_to(ROOT / "docs") and _site_uri(path) and path.is_file():
            yield path


def _target(link: str, page: Path) -> Path | None:
    name = link.partition("#")[0]
    if not name or re.match(r"\w+:", name):
        return None
    path = Path(os.path.normpath(page.parent / name))
    return path / "README.md" if path.is_dir() and (path / "README.md").exists() else path


def _site_uri(path: Path) -> str:
    """Return a file's place in the site; empty if the site does not have it."""
    relative = path.relative_to(ROOT)
    if str(relative) in PAGES:
        return PAGES[str(relative)]
    if relative.parts[0] == "docs":
        return posixpath.join(*relative.parts[1:])
    if path.suffix not in (*PICTURES, *LANGUAGES) or not path.is_file() or path.name == INDEX:
        return ""
    if path.suffix not in PICTURES and path.stat().st_size > MAX_SOURCE_BYTES:
        return ""
    suffix = "" if path.suffix in (*PICTURES, ".md") else ".md"
    return f"source/{relative.as_posix()}{suffix}"


def _rewrite(match: re.Match[str], source: Path, page_uri: str, files: Files) -> str:
    link = match[1]
    path = _target(link, source)
    if path is None:
        return match[0]
    uri = _site_uri(path)
    anchor = link.partition("#")[2]
    if not uri or files.get_file_from_path(uri) is None:
        return "](#)" if not uri else match[0]
    relative = posixpath.relpath(uri, posixpath.dirname(page_uri) or ".")
    return f"]({relative}{'#' + anchor if anchor else ''})"


def _describe_commands() -> str:
    """Return the page of the command line: the help text of each command."""
    from tvmconv import cli

    parser, commands = cli.make_parser(cli.COMMANDS)
    os.environ["COLUMNS"] = "100"
    parts = ["# Command line", f"```text\n{parser.format_help()}```"]
    for name in cli.COMMANDS:
        parts.append(f"## tvmconv {name}\n\n```text\n{commands[name].format_help()}```")
    return "\n\n".join(parts) + "\n"


def _describe_schedules() -> str:
    """Return the page of the schedules: what each does, and its knobs for an example."""
    import tvmconv as tc
    from tvmconv.tvm_import import import_tvm

    import_tvm()
    parts = ["# Schedules and knobs", "The defaults and values are those of the example in each section."]
    described = set()
    for text in EXAMPLES:
        workload = tc.parse(text)
        for schedule in tc.schedules(workload):
            title = schedule.name if workload.operator in OPERATORS else f"{schedule.name} of {workload.operator}"
            if title in described:
                continue
            described.add(title)
            parts += [f"## {title}", schedule.summary, *_describe_knobs(schedule, workload)]
    return "\n\n".join(parts) + "\n"


def _describe_knobs(schedule: Any, workload: Any) -> Iterator[str]:
    from tvmconv.cli.schedules import describe_schedule
    from tvmconv.space import format_value

    description = json.loads(describe_schedule(workload, schedule, as_json=True))
    yield f"`{workload.text}`: {description['configs']:,} configs"
    if knobs := description["knobs"]:
        rows = [
            f"| `{knob['knob']}` | {knob['meaning']} | `{format_value(knob['default'])}` | {_describe_values(knob)} |"
            for knob in knobs
        ]
        yield "\n".join(["| knob | meaning | default | values |", "| :-- | :-- | :-- | :-- |", *rows])


def _describe_values(knob: Mapping[str, Any]) -> str:
    if "values" in knob:
        return ", ".join(f"`{value}`" for value in knob["values"])
    return f"{knob['parts']} factors of {knob['extent']}, outermost first ({knob['options']:,})"
