"""A line of progress on the terminal, which is erased at the end."""

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
    """Yield a function that shows a message in place of the previous one; it does nothing without a terminal."""
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
