"""New logs from others: several merged into one, old AutoTVM logs imported. A log is written whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tvmconv.errors import Error, RecordError
from tvmconv.logs.lines import BadLines, in_one_line, open_beside, read_lines, sync_folder
from tvmconv.logs.record import Record


def merge(logs: Sequence[Path], out: Path, bad: BadLines) -> tuple[int, int]:
    """Write the records of several logs to one, in the order of the logs, each measurement once.

    Two lines are the same measurement if workload, schedule, device, config, times, error and timestamp agree.

    Args:
        logs: what to merge.
        out: the log to write, none of those that are merged; one that is there already is replaced.
        bad: lines that are no records are left out and added here.

    Returns:
        How many records were written, and how many were left out as they had been met before.

    Raises:
        Error: a log cannot be read or written, or `out` is one of them.
    """
    seen: set[bytes] = set()
    met = 0
    with new_log(out, logs) as write:
        for record, line in _records(logs, bad):
            met += 1
            measurement = repr((record.identity, record.times, record.error, record.timestamp))
            digest = hashlib.blake2b(measurement.encode(), digest_size=16).digest()
            if digest not in seen:
                seen.add(digest)
                write(line)
    return len(seen), met - len(seen)


def import_logs(logs: Sequence[Path], out: Path, bad: BadLines) -> int:
    """Rewrite logs of AutoTVM as ours.

    Args:
        logs: AutoTVM's; lines of ours among them stay as they are.
        out: the log to write, none of `logs`; one that is there already is replaced, unless there is nothing to import.
        bad: lines that are no records, or of a task without a schedule, are left out and added here.

    Returns:
        How many records were written.

    Raises:
        Error: a log cannot be read or written, `out` is one of them, or no line is a record.
    """
    count = 0
    with new_log(out, logs) as write:
        for record, _ in _records(logs, bad):
            write(record.line().encode())
            count += 1
        if not count:
            raise Error(f"nothing to import in {', '.join(map(str, logs))}: {bad}")
    return count


def _records(logs: Sequence[Path], bad: BadLines) -> Iterator[tuple[Record, bytes]]:
    """The records of the logs, each with its line."""
    for log in logs:
        for line in read_lines(log):
            if line.blank:
                continue
            try:
                yield Record.parse(line.text), line.text
            except RecordError as error:
                bad.add(line.number, error)


@contextlib.contextmanager
def new_log(out: Path, inputs: Sequence[Path]) -> Iterator[Callable[[bytes], object]]:
    """Give a function that writes a line to a log, which takes its place when all lines are on disk, else never.

    Args:
        out: the log; one that is there already is replaced, through a link that leads to it.
        inputs: what the lines are read from.

    Raises:
        Error: the log cannot be written, is no regular file, or is one of the inputs.
    """
    if out.exists() and not out.is_file():  # a device or a pipe would be replaced, too
        raise Error(f"cannot write {out}: expected a regular file")
    if any(out.exists() and log.exists() and out.samefile(log) for log in inputs):
        raise Error(f"cannot write {out}, which is also read: choose another name")
    place = Path(os.path.realpath(out))
    with contextlib.ExitStack() as stack:
        with in_one_line(out, "write"):
            file, hidden = open_beside(place)
        stack.enter_context(file)
        stack.callback(hidden.unlink, missing_ok=True)

        def write(line: bytes) -> None:
            with in_one_line(out, "write"):
                file.write(line + b"\n")

        yield write
        with in_one_line(out, "write"):
            file.flush()
            os.fsync(file.fileno())
            hidden.replace(place)
            sync_folder(place)
