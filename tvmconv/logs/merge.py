"""New logs from existing ones: merged logs, and imported logs of AutoTVM. A log is written completely or not at all."""

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

    `output_path`: log to write, which replaces an existing file. It must not be one of `logs`.
    `invalid_lines`: collects the lines that are not records, which are left out.
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
    """Convert logs of AutoTVM.

    `logs`: logs of AutoTVM, which may also have lines of tvmconv.
    `output_path`: log to write, which replaces an existing file if there is a record to import. It must not be one of
        `logs`.
    `invalid_lines`: collects the lines that are not records, or whose task has no schedule, which are left out.
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
    """Yield the records of the logs, each with its line."""
    for log in logs:
        for line in read_lines(log):
            if line.is_blank:
                continue
            try:
                yield Record.parse(line.text), line.text
            except RecordError as error:
                invalid_lines.add_line(line.number, error)


def check_output_path(output_path: Path, input_paths: Sequence[Path]) -> None:
    """Raise Error if the path of an output file is that of a folder, or of a file that is read."""
    if output_path.is_dir():
        raise Error(f"cannot write {output_path}: Is a directory")
    if any(output_path.exists() and path.exists() and output_path.samefile(path) for path in input_paths):
        raise Error(f"cannot write {output_path}, which is also read: choose another name")


@contextlib.contextmanager
def write_new_log(output_path: Path, input_paths: Sequence[Path]) -> Iterator[Callable[[bytes], object]]:
    """Yield a function that writes a line to a new log, which is moved to its path when all lines are on disk.

    `output_path`: path of the log, which replaces an existing file. If it is a link, its target is replaced.
    """
    if output_path.exists() and not output_path.is_file():  # the new log would replace a device or a pipe
        raise Error(f"cannot write {output_path}: expected a regular file")
    check_output_path(output_path, input_paths)
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
