"""A line of progress on the terminal, which is erased at the end."""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tvmconv.errors import escape_unprintable
from tvmconv.experiments.run import ProgressCallback

_ERASE_LINE = "\r\x1b[K"  # ECMA-48: erase from the cursor to the end of the line


@contextmanager
def progress_line(prefix: str = "", seconds_per_line: float = math.inf) -> Iterator[ProgressCallback]:
    """Yield a function that shows a message in place of the previous one. Without a terminal, it prints a line at most
    every `seconds_per_line`; none by default.
    """
    next_time = 0.0 if seconds_per_line < math.inf else math.inf

    def print_line(message: str) -> None:
        nonlocal next_time
        if time.monotonic() >= next_time:
            next_time = time.monotonic() + seconds_per_line
            print(prefix + message, file=sys.stderr, flush=True)

    if not sys.stderr.isatty():
        yield print_line
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
