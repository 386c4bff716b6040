"""A fast scan of the lines of a log, which searches a million lines in seconds.

A line that AutoTVM or tvmconv wrote consists of head, config, result and rest. The head holds the record's key, and a
search repeats the same head in all its lines, so each distinct head is parsed only once. A regular expression finds the
times in the result. Lines with other spacing or another order of keys are parsed by `Record.parse`.
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
from tvmconv.logs.record import MAX_ELAPSED_SECONDS, MAX_SECONDS, MIN_SECONDS, ErrorKind, Record, RecordKey
from tvmconv.workloads import Workload
from tvmconv.workloads.conv_operator import ConvOperator

_CONFIG = b', "config": '
_NUMBER = rb"[0-9.eE+-]+"
_RESULT = re.compile(rb'\}, "result": \[\[([0-9.eE+, -]+)\], ([0-8]), ' + _NUMBER + rb", (" + _NUMBER + rb")\], ")
_ENTITY = b'"entity"'
_ELAPSED = re.compile(rb'"elapsed": (' + _NUMBER + rb")")
_FINAL = b'"final": true'  # the text of `Record.line`; JSON escapes the quotes inside other strings
_REPEATED_KEY = re.compile(rb'"(?:input|workload|schedule|device|config|result)"')  # the last one of equal keys counts
_INPUT_SHAPE = re.compile(rb'\{"workload": "(\w+):([1-9]\d*(?:x[1-9]\d*)*),')
_ERRORS = {b"%d" % kind: kind for kind in ErrorKind}
_MAX_HEADS = 1 << 16

T = TypeVar("T")


@dataclass(slots=True)
class ScannedLine(Generic[T]):
    """The contents of a line that are known without parsing all of it."""

    header: T  # object that `HeaderScanner` made from the line's key
    error: ErrorKind  # kind of error of the measurement
    costs: bytes  # text of the times, for `parse_medians`
    config: bytes  # text of the config. In lines of tvmconv, equal configs have equal texts
    timestamp: bytes  # text of the time of the measurement
    line: bytes

    @classmethod
    def from_record(cls, record: Record, header: T) -> ScannedLine[T]:
        """Return the scanned line of a parsed record."""
        config = _ENTITY + b": " + json.dumps(autotvm.encode_config(record.config)).encode()
        timestamp = repr(record.timestamp).encode()
        return cls(header, record.error, repr(record.cost).encode(), config, timestamp, record.line().encode())

    @property
    def is_final(self) -> bool:
        """Whether the record is a final timing, and not a trial."""
        return _FINAL in self.line

    def parse_times(self) -> tuple[float | None, float]:
        """Return `elapsed` and `timestamp` of the record; raise RecordError if they are out of their ranges."""
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
    """A scanner of lines that parses each distinct head once.

    `make_header`: function that is called with the key of each distinct head. Its result is the `header` of all scanned
        lines with this head.
    """

    def __init__(self, make_header: Callable[[RecordKey], T]) -> None:
        self._make_header = make_header
        # header and name of the schedule, by the bytes up to the end of `_CONFIG`
        self._headers: dict[bytes, tuple[T, str] | RecordError] = {}
        self._last_head = _CONFIG  # head of the previous line, which the next line probably repeats

    def scan_line(self, line: bytes) -> ScannedLine[T] | None:
        """Scan a line. Its config and other parts are not checked, so `Record.parse` may still reject it."""
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
            raise entry.with_traceback(None)  # the traceback would grow with each raise
        header, schedule = entry
        costs, error_no, timestamp = match.groups()
        config = compat.rename_config_text(schedule, line[line.find(_ENTITY, len(head)) : end])
        return ScannedLine(header, _ERRORS[error_no], costs, config, timestamp, line)

    def _read_head(self, head: bytes) -> tuple[T, str] | RecordError:
        if len(self._headers) >= _MAX_HEADS:  # bounds the memory for files that are not logs
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
    """Yield the lines of a log that are records, each with its scanned contents.

    `workload`: workload to search for. Lines that evidently are of another workload, apart from its epilogue, are left
        out. By default, all lines are returned.
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
    """Return whether a line of tvmconv evidently starts with another workload, which is faster than parsing it. Only
    the operator is compared and, for a convolution, the shape of the input, whose text is unique.
    """
    match = _INPUT_SHAPE.match(line)
    if match is None:
        return False
    operator, _, sizes = workload.text.encode().partition(b":")
    return match[1] != operator or (isinstance(workload, ConvOperator) and match[2] != sizes.partition(b",")[0])


def parse_medians(costs: Sequence[bytes]) -> NDArray[np.float64]:
    """Return the medians of lists of numbers.

    `costs`: texts of n lists, with commas between the numbers.
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
    """Return the numbers of a text; an empty array if one of them is malformed."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)  # NumPy's sign of a malformed number
        try:
            return np.fromstring(text, sep=",")
        except (DeprecationWarning, ValueError):
            return np.empty(0)
