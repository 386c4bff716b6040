"""A log: an append-only file with one record per line, which several processes may read and write concurrently."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from tvmconv.errors import RecordError
from tvmconv.logs.header_scan import HeaderScanner
from tvmconv.logs.lines import InvalidLines, LogLine, read_lines, sync_folder, translate_os_errors
from tvmconv.logs.record import Record
from tvmconv.workloads import Workload


class Log:
    """A log on disk.

    Args:
        path: File of the log. The first `append` creates it if it does not exist.

    Attributes:
        path: File of the log.
        invalid_lines: Lines that `new_records` has read and that are not records.

    Examples:
        >>> import tempfile
        >>> import tvmconv as tc
        >>> log = tc.Log(tempfile.mkdtemp() + "/tuning.jsonl")
        >>> w = tc.parse("conv2d:1x8x8x8,8x8x3x3,s1,p1")
        >>> log.append(tc.Record(w, "tiling", {"tile_rc": (-1, 4)}, "NVIDIA H200", "cuda -arch=sm_90", times=(2e-6,)))
        >>> [record.schedule for record in log.new_records()]
        ['tiling']
        >>> list(log.new_records(w))
        []
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.invalid_lines = InvalidLines()
        self._scanner = HeaderScanner(lambda key: key.workload)
        self._offset, self._number = 0, 1  # position of the next line that `new_records` reads
        self._file_identity: tuple[int, int] | None = None  # device and inode of the file that was read

    def append(self, record: Record) -> None:
        """Append a record, and return when it is stored durably on disk.

        If another process ended while it wrote a line, the incomplete line is closed with a newline first. An append
        that fails leaves the log unchanged.

        Args:
            record: Record to append.

        Raises:
            Error: The file cannot be written, for example because it is read-only or the disk is full.
        """
        with translate_os_errors(self.path, "write"), _locked(self.path) as descriptor:
            size = os.fstat(descriptor).st_size
            has_torn_line = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
            data = memoryview(b"\n" * has_torn_line + record.line().encode() + b"\n")
            try:
                while data:
                    data = data[os.write(descriptor, data) :]
                os.fsync(descriptor)
                if size == 0:
                    sync_folder(self.path)
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(descriptor, size)
                raise

    def new_records(self, workload: Workload | None = None) -> Iterator[Record]:
        """Yield the records that any process has appended since the last call, or all records at the first call.

        An incomplete last line is left for the next call. A file that does not exist is an empty log. If the file was
        replaced or truncated, all its records are new.

        Args:
            workload: Workload whose records are returned; lines of other workloads are not checked in full. By default,
                all records are returned.

        Yields:
            The new records, in the order of the file. Lines that are not records are collected in `invalid_lines`.

        Raises:
            Error: The file cannot be read.
        """
        with translate_os_errors(self.path, "read"):
            try:
                file = self.path.open("rb", buffering=0)
            except FileNotFoundError:
                return
        status = os.fstat(file.fileno())
        if self._file_identity != (status.st_dev, status.st_ino) or status.st_size < self._offset:
            self._offset, self._number = 0, 1
        self._file_identity = status.st_dev, status.st_ino
        for line in read_lines(self.path, offset=self._offset, number=self._number, opener=lambda path: file):
            invalid_lines = InvalidLines() if line.next_offset is None else self.invalid_lines
            record = _read_record(line, invalid_lines, self._scanner, workload)
            if line.next_offset is not None:
                self._offset, self._number = line.next_offset, line.number + 1
            elif record is not None:  # the line is complete except for its newline, which the next append writes
                self._offset += len(line.text)
            if record is not None:
                yield record


def read_records(
    path: str | os.PathLike[str], invalid_lines: InvalidLines, workload: Workload | None = None
) -> Iterator[Record]:
    """Yield the records of a log.

    `invalid_lines`: collects the lines that are not records, which are skipped.
    `workload`: workload whose records are returned. By default, all records are returned.
    """
    scanner = HeaderScanner(lambda key: key.workload)
    for line in read_lines(Path(path)):
        record = _read_record(line, invalid_lines, scanner, workload)
        if record is not None:
            yield record


def _read_record(
    line: LogLine, invalid_lines: InvalidLines, scanner: HeaderScanner[Workload], workload: Workload | None
) -> Record | None:
    """Return the record of a line; None if the line is not a record, or is one of another workload."""
    if line.is_blank:
        return None
    try:
        scanned = scanner.scan_line(line.text) if workload is not None else None
        if scanned is not None and scanned.header != workload:
            return None
        record = Record.parse(line.text)
    except RecordError as error:
        invalid_lines.add_line(line.number, error)
        return None
    return record if workload in (None, record.workload) else None


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[int]:
    """Open the file, create it if necessary, and lock it against other appends. If the file is replaced while this
    process waits for the lock, the new file is opened, because an append to the old one would be lost.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_same_file(path, descriptor):
                yield descriptor
                return
        finally:
            os.close(descriptor)  # releases the lock as well


def _is_same_file(path: Path, descriptor: int) -> bool:
    """Return whether an open file is the one at the path."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
