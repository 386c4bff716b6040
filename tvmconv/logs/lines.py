"""Lines of a file, read in bounded memory for any contents."""

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
MAX_LINE_BYTES = 1 << 20  # a record has about a thousand bytes
MAX_REPORTED = 20  # number of invalid lines, and of reasons, that are kept


class LogLine(NamedTuple):
    """A line of a file."""

    number: int  # number of the line, from 1
    offset: int  # offset of its first byte
    text: bytes  # bytes without the newline, cut off after `MAX_LINE_BYTES`
    next_offset: int | None  # offset of the next line; None for a last line that does not end with a newline

    @property
    def is_blank(self) -> bool:
        """Whether the line is empty or a comment (`#`), which AutoTVM's readers skip as well."""
        return not self.text or self.text.startswith(b"#") or self.text.isspace()


def read_lines(
    path: Path,
    *,
    offset: int = 0,
    number: int = 1,
    opener: Callable[[Path], io.RawIOBase | io.BufferedIOBase] = open_regular,
) -> Iterator[LogLine]:
    """Yield the lines of a file.

    `opener`: function that opens the file for reading bytes. Errors of its own pass through.
    """
    with translate_os_errors(path, "read"), opener(path) as file:
        file.seek(offset)
        unfinished = b""
        num_dropped_bytes = 0  # bytes of the current line beyond `MAX_LINE_BYTES`
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
    """Return the line at an offset, without the newline; raise Error if the file cannot be read."""
    with translate_os_errors(path, "read"), open_regular(path) as file:
        file.seek(offset)
        return file.readline(MAX_LINE_BYTES).rstrip(b"\n")


@contextlib.contextmanager
def translate_os_errors(path: str | os.PathLike[str], action: str) -> Iterator[None]:
    """Translate an OSError of the block into an `Error`: "cannot ACTION PATH: REASON"."""
    try:
        yield
    except OSError as error:
        raise Error(f"cannot {action} {os.fspath(path)}: {error.strerror or error}") from error


def create_temporary_sibling(path: Path) -> tuple[BinaryIO, Path]:
    """Create a hidden file in the folder of `path`, which will be moved to `path` when it is complete. It gets the
    permissions of an existing file at `path`. It is always a new file, and no link is followed.
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
    """Make the name of a new file durable, as `fsync` of the file itself does not; raise OSError if it fails."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@dataclass
class InvalidLineKind:
    """Invalid lines with the same reason."""

    count: int
    number: int  # number of the first line
    error: RecordError  # error of the first line


@dataclass
class InvalidLines:
    """The lines of a file that are not records, in bounded memory."""

    count: int = 0
    numbers: list[int] = field(default_factory=list)  # numbers of the first `MAX_REPORTED` lines
    # Lines by the reason of their error, for the first `MAX_REPORTED` reasons.
    kinds: dict[str, InvalidLineKind] = field(default_factory=dict)

    def add_line(self, number: int, error: RecordError) -> None:
        """Count an invalid line."""
        self.count += 1
        if len(self.numbers) < MAX_REPORTED:
            self.numbers.append(number)
        if error.reason in self.kinds:
            self.kinds[error.reason].count += 1
        elif len(self.kinds) < MAX_REPORTED:
            self.kinds[error.reason] = InvalidLineKind(1, number, error.with_traceback(None))

    def __str__(self) -> str:
        """Return a text such as `2 bad lines (7, 9), line 7: the line is not JSON: …`."""
        if not self.count:
            return "no bad lines"
        numbers = ", ".join(map(str, self.numbers)) + ", …" * (self.count > len(self.numbers))
        first_kind = next(iter(self.kinds.values()))
        return (
            f"{self.count} bad line{'s' * (self.count > 1)} ({numbers}), line {first_kind.number}: {first_kind.error}"
        )
