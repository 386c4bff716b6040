"""Safe reading of untrusted files: opening never blocks, and the size is limited.

All errors are `OSError` with the file name, so that callers report them like "No such file or directory".
"""

from __future__ import annotations

import errno
import gzip
import io
import os
import stat
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lzma import LZMAFile

MAX_BYTES = 1 << 28  # default limit for a file that is read into memory, after decompression
MAX_UNPACKED_BYTES = 1 << 32  # default limit for a compressed file that is read line by line
GZIP_MAGIC = b"\x1f\x8b"
PACKED_SUFFIXES = ".gz", ".xz"  # suffixes of the files that `LimitedPackedFile` reads
_KINDS: Mapping[int, str] = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class DamagedFileError(OSError):
    """The data of a compressed file are damaged."""


def open_regular(path: str | os.PathLike[str]) -> io.BufferedReader:
    """Open a regular file or `/dev/null` for reading bytes. Pipes and devices are rejected: opening a pipe waits for a
    writer, and a device may have no end.
    """
    _check_regular(path, os.stat(path))
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check_regular(path, os.fstat(descriptor))  # a pipe may have replaced the file in the meantime
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _check_regular(path: str | os.PathLike[str], status: os.stat_result) -> None:
    mode = status.st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(mode) and not os.path.samestat(status, os.stat(os.devnull)):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise OSError(errno.EINVAL, f"expected a regular file, not {kind}", os.fspath(path))


def read_bytes(path: str | os.PathLike[str], max_bytes: int = MAX_BYTES, *, unpack: bool = False) -> bytes:
    """Return the content of a regular file.

    `max_bytes`: maximum size of the file, and of its decompressed content.
    `unpack`: decompress the content if it begins with gzip's magic number.
    """
    with open_regular(path) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise _make_too_large_error(path, max_bytes)
    return _decompress(path, data, max_bytes) if unpack and data.startswith(GZIP_MAGIC) else data


def _decompress(path: str | os.PathLike[str], data: bytes, max_bytes: int) -> bytes:
    """Return the decompressed content of gzip data with one or several members."""
    try:
        content = gzip.GzipFile(fileobj=io.BytesIO(data)).read(max_bytes + 1)
    except (EOFError, OSError, zlib.error) as error:
        raise DamagedFileError(errno.EINVAL, f"the gzip data are damaged: {error}", os.fspath(path)) from error
    if len(content) > max_bytes:
        raise _make_too_large_error(path, max_bytes)
    return content


def _make_too_large_error(path: str | os.PathLike[str], max_bytes: int) -> OSError:
    return OSError(errno.EFBIG, f"expected at most {_format_size(max_bytes)}", os.fspath(path))


def check_archive(archive: zipfile.ZipFile, max_bytes: int = MAX_BYTES) -> None:
    """Raise OSError if the members of a ZIP archive exceed a total size according to its directory. `zipfile` never
    unpacks more of a member than the size in the directory.
    """
    total_bytes = sum(member.file_size for member in archive.infolist())
    if total_bytes > max_bytes:
        sizes = f"{_format_size(total_bytes)}, expected at most {_format_size(max_bytes)}"
        raise OSError(errno.EFBIG, f"the archive unpacks to {sizes}")


def _format_size(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):,.0f} MiB" if num_bytes >= 1 << 20 else f"{num_bytes:,} bytes"


class LimitedPackedFile(io.BufferedIOBase):
    """Decompressing reader of a regular file, of xz data if its name ends with `.xz`, or else of gzip data. It raises
    OSError when the data are damaged, or the content exceeds `max_bytes`.
    """

    def __init__(self, path: Path, max_bytes: int = MAX_UNPACKED_BYTES) -> None:
        self._path, self._max_bytes, self._raw = path, max_bytes, open_regular(path)
        self._file: gzip.GzipFile | LZMAFile
        self._damage: tuple[type[Exception], ...] = (EOFError, zlib.error)
        if path.suffix == ".xz":
            import lzma  # some builds of Python lack it

            self._file = lzma.LZMAFile(self._raw)  # noqa: SIM115 -- `close` closes it
            self._damage = EOFError, lzma.LZMAError
        else:
            self._file = gzip.GzipFile(fileobj=self._raw)

    def read(self, size: int | None = -1) -> bytes:
        """Return the next decompressed bytes."""
        try:
            data = self._file.read(self._max_bytes + 1 if size is None or size < 0 else size)
        except self._damage as error:
            raise DamagedFileError(errno.EINVAL, f"the data are damaged: {error}", os.fspath(self._path)) from error
        if self._file.tell() > self._max_bytes:
            raise _make_too_large_error(self._path, self._max_bytes)
        return data

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to an offset of the decompressed content, and return it."""
        return self._file.seek(offset, whence)

    def close(self) -> None:
        """Close the file."""
        super().close()
        self._file.close()
        self._raw.close()
