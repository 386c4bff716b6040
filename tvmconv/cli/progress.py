"""A line on the terminal that tells what is going on, and is gone at the end."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tvmconv.errors import escape_unprintable
from tvmconv.experiments.run import ProgressCallback

_ERASE_LINE = "\r\x1b[K"  # ECMA-48: erase from the cursor to the end of the line


@contextmanager
def progress_line(prefix: str = "") -> Iterator[ProgressCallback]:
    """Give a function that shows a step in place of the one before; it is silent where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield lambda message: None
        return

    def show(message: str) -> None:
        width = shutil.get_terminal_size().columns - 1
        sys.stderr.write(_ERASE_LINE + escape_unprintable(f"{prefix}{message}")[:width])
        sys.stderr.flush()

    try:
        yield show
    finally:
        sys.stderr.write(_ERASE_LINE)
        sys.stderr.flush()
