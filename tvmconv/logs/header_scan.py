"""What a line of a log says at a glance, so that a log of a million lines is searched in seconds.

Lines as AutoTVM and this project spell them fall into head, config, result and rest. A search writes the same head,
which tells the subject, over and over, so that each is parsed once; the times are cut out of the result by a regular
expression. Lines in any other spelling (other spaces, another order of keys) are left to `Record.parse`.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from tvmconv import compat
from tvmconv.errors import RecordError
from tvmconv.logs import autotvm, json_checks
from tvmconv.logs.lines import InvalidLines, LogLine, read_lines
from tvmconv.logs.record import MAX_ELAPSED_SECONDS, MAX_SECONDS, MIN_SECONDS, ErrorKind, Record
from tvmconv.logs.record_key import RecordKey
from tvmconv.workloads import Conv, Workload

_CONFIG = b', "config": '
_NUMBER = rb"[0-9.eE+-]+"
_RESULT = re.compile(rb'\}, "result": \[\[([0-9.eE+, -]+)\], ([0-8]), ' + _NUMBER + rb", (" + _NUMBER + rb")\], ")
_ENTITY = b'"entity"'
_ELAPSED = re.compile(rb'"elapsed": (' + _NUMBER + rb")")
_FINAL = b'"final": true'  # as `Record.line` spells it; within a text the quotes would be escaped
_REPEATED_KEY = re.compile(rb'"(?:input|workload|schedule|device|config|result)"')  # JSON's last key of a name counts
_INPUT_SHAPE = re.compile(rb'\{"workload": "(\w+):([1-9]\d*(?:x[1-9]\d*)*),')
_ERRORS = {b"%d" % kind: kind for kind in ErrorKind}
_MAX_HEADS = 1 << 16

T = TypeVar("T")


@dataclass(slots=True)
class ScannedLine(Generic[T]):
    """Contents of a line that are known without parsing all of it.

    Attributes:
        header: what `HeaderScanner` made of the line's subject.
        error: how the measurement ended.
        costs: text of the times, as `parse_medians` takes it.
        config: text of the config: lines as this project writes them have equal texts for equal configs.
        timestamp: text of the time at which the measurement was taken.
        line: the line itself.
    """

    header: T
    error: ErrorKind
    costs: bytes
    config: bytes
    timestamp: bytes
    line: bytes

    @classmethod
    def from_record(cls, record: Record, header: T) -> ScannedLine[T]:
        """Return the glance at a record that was parsed."""
        config = _ENTITY + b": " + json.dumps(autotvm.encode_config(record.config)).encode()
        timestamp = repr(record.timestamp).encode()
        return cls(header, record.error, repr(record.cost).encode(), config, timestamp, record.line().encode())

    @property
    def is_final(self) -> bool:
        """Whether it is a final timing, and no trial."""
        return _FINAL in self.line

    def parse_times(self) -> tuple[float | None, float]:
        """Return `elapsed` and `timestamp` of the record; raises RecordError where they are not what it may have."""
        match = _ELAPSED.search(self.line)
        try:
            elapsed, timestamp = float(match[1]) if match else None, float(self.timestamp)
        except ValueError:
            elapsed, timestamp = math.nan, math.nan
        if math.isfinite(timestamp) and (elapsed is None or 0 <= elapsed <= MAX_ELAPSED_SECONDS):
            return elapsed, timestamp
        record = Record.parse(self.line)
        return record.elapsed, record.timestamp


class HeaderScanner(Generic[T]):
    """Looks at lines, and parses each distinct head once.

    Args:
        make_header: called with the subject of each distinct head; its answer is part of every glance at such a line.
    """

    def __init__(self, make_header: Callable[[RecordKey], T]) -> None:
        self._make_header = make_header
        # by the bytes up to and with `_CONFIG`: the header with the name of the schedule
        self._headers: dict[bytes, tuple[T, str] | RecordError] = {}
        self._last_head = _CONFIG  # the head of the line before, which the next line probably has too

    def scan_line(self, line: bytes) -> ScannedLine[T] | None:
        """Return what the line says, unless something that is not checked, such as the config, makes it no record.

        Returns:
            The glance; None if the line has to be parsed in full.

        Raises:
            RecordError: the line is no record, as `Record.parse` says.
        """
        head = self._last_head
        if not line.startswith(head):
            head, config, _ = line.partition(_CONFIG)
            head += config
        end = line.find(b"}", len(head))
        match = _RESULT.match(line, end)
        if match is None or _REPEATED_KEY.search(line, match.end()):
            return None
        entry = self._headers.get(head)
        if entry is None:
            entry = self._read_head(head)
        self._last_head = head
        if isinstance(entry, RecordError):
            raise entry.with_traceback(None)  # which would grow with each raise
        header, schedule = entry
        costs, error_no, timestamp = match.groups()
        config = compat.rename_config_text(schedule, line[line.find(_ENTITY, len(head)) : end])
        return ScannedLine(header, _ERRORS[error_no], costs, config, timestamp, line)

    def _read_head(self, head: bytes) -> tuple[T, str] | RecordError:
        if len(self._headers) >= _MAX_HEADS:  # of garbage; the heads that matter will be back
            self._headers.clear()
        try:
            key = RecordKey.from_json(json_checks.parse_object(head.removesuffix(_CONFIG) + b"}"))
            entry: tuple[T, str] | RecordError = self._make_header(key), key.schedule
        except RecordError as error:
            entry = error
        self._headers[head] = entry
        return entry


def scan_log(
    path: Path, invalid_lines: InvalidLines, make_header: Callable[[RecordKey], T], workload: Workload | None = None
) -> Iterator[tuple[LogLine, ScannedLine[T]]]:
    """Yield the lines of a log that are records, each with a glance at it.

    Args:
        path: the file.
        invalid_lines: lines that are seen to be no records are added here.
        make_header: as for `HeaderScanner`.
        workload: lines that are seen to be of other workloads than this, its epilogue aside, are left out.

    Raises:
        Error: the file cannot be read.
    """
    scanner = HeaderScanner(make_header)
    for line in read_lines(path):
        if workload and has_other_workload(line.text, workload):
            continue
        try:
            scanned = scanner.scan_line(line.text)
            if scanned is None and not line.is_blank:
                record = Record.parse(line.text)
                scanned = ScannedLine.from_record(record, make_header(record.key))
        except RecordError as error:
            invalid_lines.add_line(line.number, error)
            continue
        if scanned is not None:
            yield line, scanned


def has_other_workload(line: bytes, workload: Workload) -> bool:
    """Whether a line as this project spells it begins with another workload: parsing each takes longer than to see it.

    It is told by the operator and, of a convolution, by its input's shape, which has one spelling without zeros before
    its numbers.
    """
    match = _INPUT_SHAPE.match(line)
    if match is None:
        return False
    operator, _, sizes = workload.text.encode().partition(b":")
    return match[1] != operator or (isinstance(workload, Conv) and match[2] != sizes.partition(b",")[0])


def parse_medians(costs: Sequence[bytes]) -> NDArray[np.float64]:
    """The medians of lists of numbers.

    Args:
        costs: n texts of numbers with commas between them.

    Returns:
        n medians, equal to `Record.cost`; infinite where a number is malformed, or no time that `Record.parse` takes.
    """
    counts = np.fromiter((text.count(b",") for text in costs), int, len(costs)) + 1
    times = _parse_numbers(b",".join(costs))
    if times.size != counts.sum():
        return np.array([math.inf]) if len(costs) == 1 else np.concatenate([parse_medians([text]) for text in costs])
    starts = np.cumsum(counts) - counts
    result = np.empty(len(costs))
    for count in np.unique(counts):
        text_numbers = np.flatnonzero(counts == count)
        sorted_times = np.sort(times[starts[text_numbers, np.newaxis] + np.arange(count)], axis=1)
        median = (sorted_times[:, (count - 1) // 2] + sorted_times[:, count // 2]) / 2
        result[text_numbers] = np.where(
            (sorted_times[:, 0] >= MIN_SECONDS) & (sorted_times[:, -1] <= MAX_SECONDS), median, math.inf
        )
    return result


def _parse_numbers(text: bytes) -> NDArray[np.float64]:
    """The numbers of a text; none if one of them is malformed."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)  # how NumPy tells of a malformed number
        try:
            return np.fromstring(text, sep=",")
        except (DeprecationWarning, ValueError):
            return np.empty(0)
