"""A log: an append-only file of records, one a line, which any number of processes may write to and read at once."""

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
    """A log on disk; it need not be there before the first record is appended.

    Attributes:
        path: the file.
        invalid_lines: the lines that `new_records` has met and that are no records.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.invalid_lines = InvalidLines()
        self._scanner = HeaderScanner(lambda key: key.workload)
        self._offset, self._number = 0, 1  # of the line that `new_records` goes on with
        self._file_identity: tuple[int, int] | None = None  # device and inode of the file that it has read from

    def append(self, record: Record) -> None:
        """Put a record on disk: once this returns it is there, whatever happens to the process or the machine.

        What another process left half written when it died is closed with a newline, so that it costs one line. An
        append that fails leaves the log as it was.

        Raises:
            Error: the file cannot be written: it is read-only, the disk is full.
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
        """The records that came in since the last call, or all there are at the first, whoever appended them.

        A last line that is not whole is still being written, or was torn, and waits for the next call. No file is an
        empty log. Where another file has taken the path, or the file is shorter than it was, all of it is new.

        Args:
            workload: only records of this one; the lines of others are passed over without being checked in full.

        Raises:
            Error: the file cannot be read.
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
            elif record is not None:  # whole but for its newline, which the next append supplies
                self._offset += len(line.text)
            if record is not None:
                yield record


def read_records(
    path: str | os.PathLike[str], invalid_lines: InvalidLines, workload: Workload | None = None
) -> Iterator[Record]:
    """The records of a log.

    Args:
        path: the file.
        invalid_lines: the lines that are no records are skipped and added here.
        workload: only records of this one, as in `Log.new_records`.

    Raises:
        Error: the file cannot be read.
    """
    scanner = HeaderScanner(lambda key: key.workload)
    for line in read_lines(Path(path)):
        record = _read_record(line, invalid_lines, scanner, workload)
        if record is not None:
            yield record


def _read_record(
    line: LogLine, invalid_lines: InvalidLines, scanner: HeaderScanner[Workload], workload: Workload | None
) -> Record | None:
    """The record of a line, if it is one of the workload."""
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
    """Open the file, made if it is not there, and lock it against other appends.

    Another file may take the path while this process waits for the lock: then that one is opened instead, as what is
    appended to the old one would be lost.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_same_file(path, descriptor):
                yield descriptor
                return
        finally:
            os.close(descriptor)  # which unlocks


def _is_same_file(path: Path, descriptor: int) -> bool:
    """Whether an open file is the one at the path."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
