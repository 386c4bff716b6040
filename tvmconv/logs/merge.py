"""New logs from others: several merged into one, old AutoTVM logs imported. A log is written whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tvmconv.errors import Error, RecordError
from tvmconv.logs.lines import InvalidLines, create_temporary_sibling, read_lines, sync_folder, translate_os_errors
from tvmconv.logs.record import Record


def merge_logs(logs: Sequence[Path], output_path: Path, invalid_lines: InvalidLines) -> tuple[int, int]:
    """Write the records of several logs to one, in the order of the logs, each measurement once.

    Two lines are the same measurement if workload, schedule, device, config, times, error and timestamp agree.

    Args:
        logs: what to merge.
        output_path: the log to write, none of those that are merged; one that is there already is replaced.
        invalid_lines: lines that are no records are left out and added here.

    Returns:
        How many records were written, and how many were left out as they had been met before.

    Raises:
        Error: a log cannot be read or written, or `output_path` is one of them.
    """
    digests: set[bytes] = set()
    num_read = 0
    with write_new_log(output_path, logs) as write_line:
        for record, line in _iterate_records(logs, invalid_lines):
            num_read += 1
            measurement = repr((record.identity, record.times, record.error, record.timestamp))
            digest = hashlib.blake2b(measurement.encode(), digest_size=16).digest()
            if digest not in digests:
                digests.add(digest)
                write_line(line)
    return len(digests), num_read - len(digests)


def import_logs(logs: Sequence[Path], output_path: Path, invalid_lines: InvalidLines) -> int:
    """Rewrite logs of AutoTVM as ours.

    Args:
        logs: AutoTVM's; lines of ours among them stay as they are.
        output_path: the log to write, none of `logs`; one that is there already is replaced, unless there is nothing to
            import.
        invalid_lines: lines that are no records, or of a task without a schedule, are left out and added here.

    Returns:
        How many records were written.

    Raises:
        Error: a log cannot be read or written, `output_path` is one of them, or no line is a record.
    """
    num_written = 0
    with write_new_log(output_path, logs) as write_line:
        for record, _ in _iterate_records(logs, invalid_lines):
            write_line(record.line().encode())
            num_written += 1
        if not num_written:
            raise Error(f"nothing to import in {', '.join(map(str, logs))}: {invalid_lines}")
    return num_written


def _iterate_records(logs: Sequence[Path], invalid_lines: InvalidLines) -> Iterator[tuple[Record, bytes]]:
    """The records of the logs, each with its line."""
    for log in logs:
        for line in read_lines(log):
            if line.is_blank:
                continue
            try:
                yield Record.parse(line.text), line.text
            except RecordError as error:
                invalid_lines.add_line(line.number, error)


@contextlib.contextmanager
def write_new_log(output_path: Path, input_paths: Sequence[Path]) -> Iterator[Callable[[bytes], object]]:
    """Give a function that writes a line to a log, which takes its place when all lines are on disk, else never.

    Args:
        output_path: the log; one that is there already is replaced, through a link that leads to it.
        input_paths: what the lines are read from.

    Raises:
        Error: the log cannot be written, is no regular file, or is one of the inputs.
    """
    if output_path.exists() and not output_path.is_file():  # a device or a pipe would be replaced, too
        raise Error(f"cannot write {output_path}: expected a regular file")
    if any(output_path.exists() and log.exists() and output_path.samefile(log) for log in input_paths):
        raise Error(f"cannot write {output_path}, which is also read: choose another name")
    target_path = Path(os.path.realpath(output_path))
    with contextlib.ExitStack() as stack:
        with translate_os_errors(output_path, "write"):
            file, temporary_path = create_temporary_sibling(target_path)
        stack.enter_context(file)
        stack.callback(temporary_path.unlink, missing_ok=True)

        def write_line(line: bytes) -> None:
            with translate_os_errors(output_path, "write"):
                file.write(line + b"\n")

        yield write_line
        with translate_os_errors(output_path, "write"):
            file.flush()
            os.fsync(file.fileno())
            temporary_path.replace(target_path)
            sync_folder(target_path)
