"""The text of a command line, as results and pages state it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import PurePath


def format_command(words: Iterable[str]) -> str:
    """Return a command line that holds no folders of this machine: of an absolute path, the last part remains.

    >>> format_command(["tvmconv", "bench", "layouts", "-o", "/mnt/disk/results", "--log=/mnt/my.jsonl"])
    'tvmconv bench layouts -o results --log=my.jsonl'
    """
    return shlex.join(map(_shorten, words))


def _shorten(word: str) -> str:
    option, separator, value = word.rpartition("=") if word.startswith("-") else ("", "", word)
    path = PurePath(value)
    return f"{option}{separator}{path.name}" if path.is_absolute() and path.name else word
