"""The lines of a file, in bounded memory whatever the file holds."""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

from tvmconv.errors import Error, RecordError
from tvmconv.files import open_regular

CHUNK_BYTES = 1 << 18
MAX_LINE_BYTES = 1 << 20  # a record has about a thousand
MAX_NAMED = 20  # bad lines, and reasons why lines are bad


class Line(NamedTuple):
    """A line of a file.

    Attributes:
        number: counted from 1.
        offset: of its first byte.
        text: its bytes without the newline; of a line longer than `MAX_LINE_BYTES`, that many from its beginning.
        end: where the next line begins; None when no newline ends this one, which then is the last.
    """

    number: int
    offset: int
    text: bytes
    end: int | None

    @property
    def blank(self) -> bool:
        """Whether it is empty or a comment (`#`), which AutoTVM's readers pass over too."""
        return not self.text or self.text.startswith(b"#") or self.text.isspace()


def read_lines(
    path: Path,
    *,
    offset: int = 0,
    number: int = 1,
    opener: Callable[[Path], io.RawIOBase | io.BufferedIOBase] = open_regular,
) -> Iterator[Line]:
    """The lines of a file.

    Args:
        path: the file.
        offset: where to begin, at the start of a line.
        number: which line that is.
        opener: opens the file for reading bytes, such as `LimitedGzip`, which may raise errors of its own.

    Raises:
        Error: the file cannot be read.
    """
    with in_one_line(path, "read"), opener(path) as file:
        file.seek(offset)
        rest = b""
        dropped = 0  # bytes of the current line that are too many to keep
        while chunk := file.read(CHUNK_BYTES):
            *ended, rest = (rest + chunk).split(b"\n")
            for text in ended:
                end = offset + len(text) + dropped + 1
                yield Line(number, offset, text, end)
                number, offset, dropped = number + 1, end, 0
            if len(rest) > MAX_LINE_BYTES:
                dropped += len(rest) - MAX_LINE_BYTES
                rest = rest[:MAX_LINE_BYTES]
        if rest:
            yield Line(number, offset, rest, end=None)


def read_line(path: Path, offset: int) -> bytes:
    """The line that begins there, without the newline; raises `Error`."""
    with in_one_line(path, "read"), open_regular(path) as file:
        file.seek(offset)
        return file.readline(MAX_LINE_BYTES).rstrip(b"\n")


@contextlib.contextmanager
def in_one_line(path: str | os.PathLike[str], what: str) -> Iterator[None]:
    """Turn an error of the operating system into an `Error` of one line: "cannot WHAT PATH: why"."""
    try:
        yield
    except OSError as error:
        raise Error(f"cannot {what} {os.fspath(path)}: {error.strerror or error}") from error


def open_beside(path: Path) -> tuple[BinaryIO, Path]:
    """Create a file of a new name beside `path`, hidden, to be written and then moved there; raises OSError.

    The file takes the permissions of the one at `path`, if there is one. No file or link that is there is followed.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    while True:
        hidden = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            file = os.open(hidden, flags, 0o666)
        except FileExistsError:
            continue
        if path.exists():
            os.fchmod(file, stat.S_IMODE(path.stat().st_mode))
        return os.fdopen(file, "wb"), hidden


def sync_folder(path: Path) -> None:
    """Put the name of a file that is new on disk: syncing the file does not; raises OSError."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@dataclass
class BadKind:
    """The bad lines with one reason.

    Attributes:
        count: how many.
        number: of the first of them.
        error: what is wrong with that one.
    """

    count: int
    number: int
    error: RecordError


@dataclass
class BadLines:
    """The lines of a file that are no records; of a file of garbage, only so many are remembered.

    Attributes:
        count: how many.
        numbers: of the first `MAX_NAMED`.
        kinds: by the reason that the errors share; the first `MAX_NAMED` reasons.
    """

    count: int = 0
    numbers: list[int] = field(default_factory=list)
    kinds: dict[str, BadKind] = field(default_factory=dict)

    def add(self, number: int, error: RecordError) -> None:
        """Count a line."""
        self.count += 1
        if len(self.numbers) < MAX_NAMED:
            self.numbers.append(number)
        if error.reason in self.kinds:
            self.kinds[error.reason].count += 1
        elif len(self.kinds) < MAX_NAMED:
            self.kinds[error.reason] = BadKind(1, number, error.with_traceback(None))

    def __str__(self) -> str:
        """Such as `2 bad lines (7, 9), line 7: the line is not JSON: …`."""
        if not self.count:
            return "no bad lines"
        numbers = ", ".join(map(str, self.numbers)) + ", …" * (self.count > len(self.numbers))
        first = next(iter(self.kinds.values()))
        return f"{self.count} bad line{'s' * (self.count > 1)} ({numbers}), line {first.number}: {first.error}"
