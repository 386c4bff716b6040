"""Files that anyone may have written: opened without waiting for a writer, and read up to a limit.

All errors are of the operating system's kind, `OSError` with the file's name, so that they are told in one line like
"No such file or directory".
"""

from __future__ import annotations

import errno
import io
import os
import stat
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path

MAX_BYTES = 1 << 28  # of a file that is read into memory whole, after decompression
MAX_UNPACKED_BYTES = 1 << 32  # of a compressed file that is read line by line
GZIP_MAGIC = b"\x1f\x8b"
_CHUNK_BYTES = 1 << 20
_KINDS: Mapping[int, str] = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class DamagedFileError(OSError):
    """A compressed file that cannot be unpacked."""


def open_regular(path: str | os.PathLike[str]) -> io.BufferedReader:
    """Open a regular file, or `/dev/null`, which is empty, for reading bytes.

    Raises:
        OSError: it cannot be opened, or is a folder, a pipe, a device or a socket. To open a pipe would wait until
            somebody writes to it, and a device may have no end.
    """
    _check_regular(path, os.stat(path))
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check_regular(path, os.fstat(descriptor))  # a pipe may have taken its place
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
        raise OSError(errno.EINVAL, f"expected a regular file, and it is {kind}", os.fspath(path))


def read_bytes(path: str | os.PathLike[str], max_bytes: int = MAX_BYTES, *, unpack: bool = False) -> bytes:
    """The bytes of a regular file.

    Args:
        path: of the file.
        max_bytes: the largest file, and the largest that a compressed one may become.
        unpack: decompress what gzip has compressed.

    Raises:
        OSError: the file cannot be read, is no regular file, is larger, or its compressed data are damaged.
    """
    with open_regular(path) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise _make_too_large_error(path, max_bytes)
    return _decompress(path, data, max_bytes) if unpack and data.startswith(GZIP_MAGIC) else data


def _decompress(path: str | os.PathLike[str], data: bytes, max_bytes: int) -> bytes:
    """What gzip has compressed, of one member or several; `data` is not empty."""
    chunks, total_bytes = [], 0
    try:
        while data:
            inflate = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
            while not inflate.eof:
                chunk = inflate.decompress(data, min(_CHUNK_BYTES, max_bytes + 1 - total_bytes))
                data = inflate.unconsumed_tail or inflate.unused_data
                chunks.append(chunk)
                total_bytes += len(chunk)
                if total_bytes > max_bytes:
                    raise _make_too_large_error(path, max_bytes)
                if not chunk and not data and not inflate.eof:
                    raise zlib.error("it is cut off")
            data = data.lstrip(b"\0")  # padding, which gzip allows behind a member
    except zlib.error as error:
        raise DamagedFileError(errno.EINVAL, f"its gzip data are damaged: {error}", os.fspath(path)) from error
    return b"".join(chunks)


def _make_too_large_error(path: str | os.PathLike[str], max_bytes: int) -> OSError:
    return OSError(errno.EFBIG, f"expected at most {_format_size(max_bytes)}", os.fspath(path))


def check_archive(archive: zipfile.ZipFile, max_bytes: int = MAX_BYTES) -> None:
    """Raise `OSError` if the members of an archive are larger than a limit, by its directory; nothing is unpacked.

    No more than the directory says of a member is ever unpacked of it.
    """
    total_bytes = sum(member.file_size for member in archive.infolist())
    if total_bytes > max_bytes:
        raise OSError(
            errno.EFBIG, f"it unpacks to {_format_size(total_bytes)}, expected at most {_format_size(max_bytes)}"
        )


def _format_size(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):,.0f} MiB" if num_bytes >= 1 << 20 else f"{num_bytes:,} bytes"


class LimitedGzipFile(io.RawIOBase):
    """A file that gzip has compressed, for reading; an `OSError` once it has become larger than a limit.

    Args:
        path: of the file, which has to be a regular one.
        max_bytes: the limit.
    """

    def __init__(self, path: Path, max_bytes: int = MAX_UNPACKED_BYTES) -> None:
        import gzip

        self._path, self._max_bytes, self._num_read_bytes = path, max_bytes, 0
        self._raw = open_regular(path)
        self._file = gzip.GzipFile(fileobj=self._raw)

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a place in the unpacked data."""
        return self._file.seek(offset, whence)

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Unpack the next bytes."""
        data = self._file.read(len(buffer))
        self._num_read_bytes += len(data)
        if self._num_read_bytes > self._max_bytes:
            raise _make_too_large_error(self._path, self._max_bytes)
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Close the file."""
        if not self.closed:
            self._file.close()
            self._raw.close()
        super().close()
