"""Safe reading of untrusted files: opening never blocks, and the size is limited.

All errors are `OSError` with the file name, so that callers report them like "No such file or directory".
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

MAX_BYTES = 1 << 28  # default limit for a file that is read into memory, after decompression
MAX_UNPACKED_BYTES = 1 << 32  # default limit for a compressed file that is read line by line
GZIP_MAGIC = b"\x1f\x8b"
_CHUNK_BYTES = 1 << 20
_KINDS: Mapping[int, str] = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class DamagedFileError(OSError):
    """The data of a compressed file are damaged."""


def open_regular(path: str | os.PathLike[str]) -> io.BufferedReader:
    """Open a regular file or `/dev/null` for reading bytes.

    Pipes and devices are rejected: opening a pipe waits for a writer, and a device may have no end.
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
    """Return the decompressed content of non-empty gzip data with one or several members."""
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
                    raise zlib.error("the stream is truncated")
            data = data.lstrip(b"\0")  # gzip allows zero padding behind a member
    except zlib.error as error:
        raise DamagedFileError(errno.EINVAL, f"the gzip data are damaged: {error}", os.fspath(path)) from error
    return b"".join(chunks)


def _make_too_large_error(path: str | os.PathLike[str], max_bytes: int) -> OSError:
    return OSError(errno.EFBIG, f"expected at most {_format_size(max_bytes)}", os.fspath(path))


def check_archive(archive: zipfile.ZipFile, max_bytes: int = MAX_BYTES) -> None:
    """Raise OSError if the members of a ZIP archive exceed a total size according to its directory.

    `zipfile` never unpacks more of a member than the size in the directory.
    """
    total_bytes = sum(member.file_size for member in archive.infolist())
    if total_bytes > max_bytes:
        sizes = f"{_format_size(total_bytes)}, expected at most {_format_size(max_bytes)}"
        raise OSError(errno.EFBIG, f"the archive unpacks to {sizes}")


def _format_size(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):,.0f} MiB" if num_bytes >= 1 << 20 else f"{num_bytes:,} bytes"


class LimitedGzipFile(io.RawIOBase):
    """Decompressing reader of a gzip file, which raises OSError when the content exceeds a limit.

    `max_bytes`: maximum number of decompressed bytes.
    """

    def __init__(self, path: Path, max_bytes: int = MAX_UNPACKED_BYTES) -> None:
        import gzip

        self._path, self._max_bytes, self._num_read_bytes = path, max_bytes, 0
        self._raw = open_regular(path)
        self._file = gzip.GzipFile(fileobj=self._raw)

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to an offset in the decompressed data."""
        return self._file.seek(offset, whence)

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Decompress the next bytes into a buffer and return their number."""
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
