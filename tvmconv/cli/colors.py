"""Colors on a terminal. `NO_COLOR` (https://no-color.org) turns them off; files and pipes get none."""

from __future__ import annotations

import os
import sys
from typing import TextIO

BOLD, RED, GREEN, YELLOW = "1", "1;31", "32", "33"  # ECMA-48: Select Graphic Rendition


def has_color(stream: TextIO | None) -> bool:
    """Return whether texts for a stream are colored: it is a terminal, and neither NO_COLOR nor TERM=dumb is set."""
    is_terminal = stream is not None and stream.isatty()
    return is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def paint(text: str, style: str, stream: TextIO | None = None) -> str:
    """Return a text in a style, such as `BOLD`, for a stream (default: stdout); unchanged where there are no colors."""
    return f"\x1b[{style}m{text}\x1b[0m" if has_color(stream or sys.stdout) else text
