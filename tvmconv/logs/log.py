"""A log: an append-only file of records, one a line, which any number of processes may write to and read at once."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from tvmconv.errors import RecordError
from tvmconv.logs.lines import BadLines, Line, in_one_line, read_lines, sync_folder
from tvmconv.logs.record import Record
from tvmconv.logs.scan import Glancer
from tvmconv.workloads import Workload


class Log:
    """A log on disk; it need not be there before the first record is appended.

    Attributes:
        path: the file.
        bad: the lines that `new_records` has met and that are no records.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.bad = BadLines()
        self._glancer = Glancer(lambda subject: subject.workload)
        self._offset, self._number = 0, 1  # of the line that `new_records` goes on with
        self._read_file: tuple[int, int] | None = None  # device and inode of the file that it has read from

    def append(self, record: Record) -> None:
        """Put a record on disk: once this returns it is there, whatever happens to the process or the machine.

        What another process left half written when it died is closed with a newline, so that it costs one line. An
        append that fails leaves the log as it was.

        Raises:
            Error: the file cannot be written: it is read-only, the disk is full.
        """
        with in_one_line(self.path, "write"), _locked(self.path) as file:
            size = os.fstat(file).st_size
            torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"
            data = memoryview(b"\n" * torn + record.line().encode() + b"\n")
            try:
                while data:
                    data = data[os.write(file, data) :]
                os.fsync(file)
                if size == 0:
                    sync_folder(self.path)
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(file, size)
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
        with in_one_line(self.path, "read"):
            try:
                file = self.path.open("rb", buffering=0)
            except FileNotFoundError:
                return
        status = os.fstat(file.fileno())
        if self._read_file != (status.st_dev, status.st_ino) or status.st_size < self._offset:
            self._offset, self._number = 0, 1
        self._read_file = status.st_dev, status.st_ino
        for line in read_lines(self.path, offset=self._offset, number=self._number, opener=lambda path: file):
            bad = BadLines() if line.end is None else self.bad
            record = _read(line, bad, self._glancer, workload)
            if line.end is not None:
                self._offset, self._number = line.end, line.number + 1
            elif record is not None:  # whole but for its newline, which the next append supplies
                self._offset += len(line.text)
            if record is not None:
                yield record


def read(path: str | os.PathLike[str], bad: BadLines, workload: Workload | None = None) -> Iterator[Record]:
    """The records of a log.

    Args:
        path: the file.
        bad: the lines that are no records are skipped and added here.
        workload: only records of this one, as in `Log.new_records`.

    Raises:
        Error: the file cannot be read.
    """
    glancer = Glancer(lambda subject: subject.workload)
    for line in read_lines(Path(path)):
        record = _read(line, bad, glancer, workload)
        if record is not None:
            yield record


def _read(line: Line, bad: BadLines, glancer: Glancer[Workload], workload: Workload | None) -> Record | None:
    """The record of a line, if it is one of the workload."""
    if line.blank:
        return None
    try:
        glance = glancer.look(line.text) if workload is not None else None
        if glance is not None and glance.made != workload:
            return None
        record = Record.parse(line.text)
    except RecordError as error:
        bad.add(line.number, error)
        return None
    return record if workload in (None, record.workload) else None


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[int]:
    """Open the file, made if it is not there, and lock it against other appends.

    Another file may take the path while this process waits for the lock: then that one is opened instead, as what is
    appended to the old one would be lost.
    """
    while True:
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            if _is_at(path, file):
                yield file
                return
        finally:
            os.close(file)  # which unlocks


def _is_at(path: Path, file: int) -> bool:
    """Whether an open file is the one at the path."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False
