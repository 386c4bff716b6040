"""What the files of the project import, define and name; each file is parsed once for all tests of a process."""

import ast
import functools
from pathlib import Path
from typing import NamedTuple


class SourceNames(NamedTuple):
    """What a file says of names."""

    imports: list[ast.Import | ast.ImportFrom]  # of the whole file, also inside functions
    classes: list[ast.ClassDef]
    identifiers: list[tuple[int, str]]  # line and name; the parts of a dotted name are apart


@functools.cache
def read_names(file: Path) -> SourceNames:
    """Parse a file."""
    return parse_names(file.read_text(encoding="utf-8"))


def parse_names(text: str) -> SourceNames:
    """Parse the text of a file."""
    names = SourceNames([], [], [])
    line = 0
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant):
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            names.imports.append(node)
        elif isinstance(node, ast.ClassDef):
            names.classes.append(node)
        line = getattr(node, "lineno", line)
        for value in vars(node).values():  # identifiers are the texts of a node, and the items of its lists of texts
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, str):
                    names.identifiers.extend((line, part) for part in item.split("."))
    return names
