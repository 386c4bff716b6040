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
MAX_REPORTED = 20  # bad lines, and reasons why lines are bad


class LogLine(NamedTuple):
    """A line of a file.

    Attributes:
        number: counted from 1.
        offset: of its first byte.
        text: its bytes without the newline; of a line longer than `MAX_LINE_BYTES`, that many from its beginning.
        next_offset: where the next line begins; None when no newline ends this one, which then is the last.
    """

    number: int
    offset: int
    text: bytes
    next_offset: int | None

    @property
    def is_blank(self) -> bool:
        """Whether it is empty or a comment (`#`), which AutoTVM's readers pass over too."""
        return not self.text or self.text.startswith(b"#") or self.text.isspace()


def read_lines(
    path: Path,
    *,
    offset: int = 0,
    number: int = 1,
    opener: Callable[[Path], io.RawIOBase | io.BufferedIOBase] = open_regular,
) -> Iterator[LogLine]:
    """The lines of a file.

    Args:
        path: the file.
        offset: where to begin, at the start of a line.
        number: which line that is.
        opener: opens the file for reading bytes, such as `LimitedGzipFile`, which may raise errors of its own.

    Raises:
        Error: the file cannot be read.
    """
    with translate_os_errors(path, "read"), opener(path) as file:
        file.seek(offset)
        unfinished = b""
        num_dropped_bytes = 0  # bytes of the current line that are too many to keep
        while chunk := file.read(CHUNK_BYTES):
            *finished_lines, unfinished = (unfinished + chunk).split(b"\n")
            for text in finished_lines:
                next_offset = offset + len(text) + num_dropped_bytes + 1
                yield LogLine(number, offset, text, next_offset)
                number, offset, num_dropped_bytes = number + 1, next_offset, 0
            if len(unfinished) > MAX_LINE_BYTES:
                num_dropped_bytes += len(unfinished) - MAX_LINE_BYTES
                unfinished = unfinished[:MAX_LINE_BYTES]
        if unfinished:
            yield LogLine(number, offset, unfinished, next_offset=None)


def read_line(path: Path, offset: int) -> bytes:
    """The line that begins there, without the newline; raises `Error`."""
    with translate_os_errors(path, "read"), open_regular(path) as file:
        file.seek(offset)
        return file.readline(MAX_LINE_BYTES).rstrip(b"\n")


@contextlib.contextmanager
def translate_os_errors(path: str | os.PathLike[str], action: str) -> Iterator[None]:
    """Turn an error of the operating system into an `Error` of one line: "cannot WHAT PATH: why"."""
    try:
        yield
    except OSError as error:
        raise Error(f"cannot {action} {os.fspath(path)}: {error.strerror or error}") from error


def create_temporary_sibling(path: Path) -> tuple[BinaryIO, Path]:
    """Create a file of a new name beside `path`, hidden, to be written and then moved there; raises OSError.

    The file takes the permissions of the one at `path`, if there is one. No file or link that is there is followed.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    while True:
        temporary_path = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            file = os.open(temporary_path, flags, 0o666)
        except FileExistsError:
            continue
        if path.exists():
            os.fchmod(file, stat.S_IMODE(path.stat().st_mode))
        return os.fdopen(file, "wb"), temporary_path


def sync_folder(path: Path) -> None:
    """Put the name of a file that is new on disk: syncing the file does not; raises OSError."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@dataclass
class InvalidLineKind:
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
class InvalidLines:
    """The lines of a file that are no records; of a file of garbage, only so many are remembered.

    Attributes:
        count: how many.
        numbers: of the first `MAX_REPORTED`.
        kinds: by the reason that the errors share; the first `MAX_REPORTED` reasons.
    """

    count: int = 0
    numbers: list[int] = field(default_factory=list)
    kinds: dict[str, InvalidLineKind] = field(default_factory=dict)

    def add_line(self, number: int, error: RecordError) -> None:
        """Count a line."""
        self.count += 1
        if len(self.numbers) < MAX_REPORTED:
            self.numbers.append(number)
        if error.reason in self.kinds:
            self.kinds[error.reason].count += 1
        elif len(self.kinds) < MAX_REPORTED:
            self.kinds[error.reason] = InvalidLineKind(1, number, error.with_traceback(None))

    def __str__(self) -> str:
        """Such as `2 bad lines (7, 9), line 7: the line is not JSON_NAME: …`."""
        if not self.count:
            return "no bad lines"
        numbers = ", ".join(map(str, self.numbers)) + ", …" * (self.count > len(self.numbers))
        first_kind = next(iter(self.kinds.values()))
        return (
            f"{self.count} bad line{'s' * (self.count > 1)} ({numbers}), line {first_kind.number}: {first_kind.error}"
        )
