"""Write tuning_logs/INDEX.md: each file with measurements, with its device, its date and the command that made it.

    python scripts/index_logs.py

The lines come from what the files say of themselves. Files without provenance, such as logs and lists of layers, are
listed with their number of records or layers.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path

from tvmconv.reports.tables import Table

FOLDER = Path(__file__).parents[1] / "tuning_logs"
INDEX = "INDEX.md"
HEADING = """# Index of measurements

`python scripts/index_logs.py` writes this page from what the files say of themselves. [README.md](README.md) explains
the kinds of files. Each file of results has a table `NAME.md`, and some have a chart `NAME.png`.
"""
MAX_COMMAND_CHARACTERS = 160


def list_rows(folder: Path) -> Iterator[tuple[str, ...]]:
    """Yield file, contents, date and command of each file directly in a folder."""
    for file in sorted(folder.iterdir()):
        stem = file.name.removesuffix(".gz").removesuffix(".json")
        if file.name.endswith((".json", ".json.gz")):
            content = file.read_bytes()
            data = json.loads(gzip.decompress(content) if file.suffix == ".gz" else content)
            if isinstance(data, list):
                yield f"[{file.name}]({_link(file)})", f"{len(data)} layers", "", ""
            else:
                layers = data.get("layers", data.get("timed", ()))
                provenance = data.get("provenance", "")
                provenance = provenance if isinstance(provenance, str) else ""
                date = re.search(r"\b20\d\d-\d\d-\d\d\b", provenance)
                command = re.search(r"`([^`]+)`", provenance)
                page = file.with_name(f"{stem}.md")
                yield (
                    f"[{stem}]({_link(page if page.exists() else file)})",
                    f"{len(layers)} results" if layers else "",
                    date[0] if date else "",
                    _shorten(command[1]) if command else "",
                )
        elif file.suffix == ".jsonl":
            with file.open(encoding="utf-8") as lines:
                yield f"[{file.name}]({_link(file)})", f"log, {sum(1 for _ in lines):,} records", "", ""


def _link(file: Path) -> str:
    return file.relative_to(FOLDER).as_posix()


def _shorten(command: str) -> str:
    command = command.replace("|", "\\|")
    text = command if len(command) <= MAX_COMMAND_CHARACTERS else f"{command[:MAX_COMMAND_CHARACTERS]}…"
    return f"`{text}`"


def make_index() -> str:
    """Return the page, with one section per folder."""
    headers = ("file", "contents", "date", "command")
    parts = [HEADING]
    for folder in [FOLDER, *sorted(path for path in FOLDER.rglob("*") if path.is_dir())]:
        if rows := list(list_rows(folder)):
            name = folder.relative_to(FOLDER.parent).as_posix()
            parts.append(f"## {name}\n\n{Table(headers, rows, frozenset(headers)).format_markdown()}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    (FOLDER / INDEX).write_text(make_index(), encoding="utf-8")
