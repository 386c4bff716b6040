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

from tvmconv.errors import RecordError
from tvmconv.logs import autotvm, fields
from tvmconv.logs.lines import BadLines, Line, read_lines
from tvmconv.logs.record import LEAST_SECONDS, MAX_ELAPSED_SECONDS, MOST_SECONDS, ErrorKind, Record
from tvmconv.logs.subject import Subject
from tvmconv.workloads import Conv, Workload

_CONFIG = b', "config": '
_NUMBER = rb"[0-9.eE+-]+"
_RESULT = re.compile(rb'\}, "result": \[\[([0-9.eE+, -]+)\], ([0-8]), ' + _NUMBER + rb", (" + _NUMBER + rb")\], ")
_ENTITY = b'"entity"'
_ELAPSED = re.compile(rb'"elapsed": (' + _NUMBER + rb")")
_FINAL = b'"final": true'  # as `Record.line` spells it; within a text the quotes would be escaped
_REPEATED = re.compile(rb'"(?:input|workload|schedule|device|config|result)"')  # JSON's last key of a name counts
_INPUT = re.compile(rb'\{"workload": "(\w+):([1-9]\d*(?:x[1-9]\d*)*),')
_ERRORS = {b"%d" % kind: kind for kind in ErrorKind}
_MAX_HEADS = 1 << 16

T = TypeVar("T")


@dataclass(slots=True)
class Glance(Generic[T]):
    """Contents of a line that are known without parsing all of it.

    Attributes:
        made: what `Glancer` made of the line's subject.
        error: how the measurement ended.
        costs: text of the times, as `medians` takes it.
        config: text of the config: lines as this project writes them have equal texts for equal configs.
        timestamp: text of the time at which the measurement was taken.
        line: the line itself.
    """

    made: T
    error: ErrorKind
    costs: bytes
    config: bytes
    timestamp: bytes
    line: bytes

    @classmethod
    def of(cls, record: Record, made: T) -> Glance[T]:
        """Return the glance at a record that was parsed."""
        config = _ENTITY + b": " + json.dumps(autotvm.encode_config(record.config)).encode()
        timestamp = repr(record.timestamp).encode()
        return cls(made, record.error, repr(record.cost).encode(), config, timestamp, record.line().encode())

    @property
    def final(self) -> bool:
        """Whether it is a final timing, and no trial."""
        return _FINAL in self.line

    def when(self) -> tuple[float | None, float]:
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


class Glancer(Generic[T]):
    """Looks at lines, and parses each distinct head once.

    Args:
        make: called with the subject of each distinct head; its answer is part of every glance at such a line.
    """

    def __init__(self, make: Callable[[Subject], T]) -> None:
        self._make = make
        self._heads: dict[bytes, T | RecordError] = {}  # by the bytes up to and with `_CONFIG`
        self._last = _CONFIG  # the head of the line before, which the next line probably has too

    def look(self, line: bytes) -> Glance[T] | None:
        """Return what the line says, unless something that is not checked, such as the config, makes it no record.

        Returns:
            The glance; None if the line has to be parsed in full.

        Raises:
            RecordError: the line is no record, as `Record.parse` says.
        """
        head = self._last
        if not line.startswith(head):
            head, config, _ = line.partition(_CONFIG)
            head += config
        end = line.find(b"}", len(head))
        match = _RESULT.match(line, end)
        if match is None or _REPEATED.search(line, match.end()):
            return None
        made = self._heads.get(head)
        if made is None:
            made = self._read(head)
        self._last = head
        if isinstance(made, RecordError):
            raise made.with_traceback(None)  # which would grow with each raise
        costs, error_no, timestamp = match.groups()
        return Glance(made, _ERRORS[error_no], costs, line[line.find(_ENTITY, len(head)) : end], timestamp, line)

    def _read(self, head: bytes) -> T | RecordError:
        if len(self._heads) >= _MAX_HEADS:  # of garbage; the heads that matter will be back
            self._heads.clear()
        try:
            made: T | RecordError = self._make(Subject.from_json(fields.read_object(head.removesuffix(_CONFIG) + b"}")))
        except RecordError as error:
            made = error
        self._heads[head] = made
        return made


def scan(
    path: Path, bad: BadLines, make: Callable[[Subject], T], of: Workload | None = None
) -> Iterator[tuple[Line, Glance[T]]]:
    """Yield the lines of a log that are records, each with a glance at it.

    Args:
        path: the file.
        bad: lines that are seen to be no records are added here.
        make: as for `Glancer`.
        of: lines that are seen to be of other workloads than this, its epilogue aside, are left out.

    Raises:
        Error: the file cannot be read.
    """
    glancer = Glancer(make)
    for line in read_lines(path):
        if of and is_of_another(line.text, of):
            continue
        try:
            glance = glancer.look(line.text)
            if glance is None and not line.blank:
                record = Record.parse(line.text)
                glance = Glance.of(record, make(record.subject))
        except RecordError as refused:
            bad.add(line.number, refused)
            continue
        if glance is not None:
            yield line, glance


def is_of_another(line: bytes, workload: Workload) -> bool:
    """Whether a line as this project spells it begins with another workload: parsing each takes longer than to see it.

    It is told by the operator and, of a convolution, by its input's shape, which has one spelling without zeros before
    its numbers.
    """
    match = _INPUT.match(line)
    if match is None:
        return False
    operator, _, sizes = workload.text.encode().partition(b":")
    return match[1] != operator or (isinstance(workload, Conv) and match[2] != sizes.partition(b",")[0])


def medians(costs: Sequence[bytes]) -> NDArray[np.float64]:
    """The medians of lists of numbers.

    Args:
        costs: n texts of numbers with commas between them.

    Returns:
        n medians, equal to `Record.cost`; infinite where a number is malformed, or no time that `Record.parse` takes.
    """
    counts = np.fromiter((text.count(b",") for text in costs), int, len(costs)) + 1
    times = _numbers(b",".join(costs))
    if times.size != counts.sum():
        return np.array([math.inf]) if len(costs) == 1 else np.concatenate([medians([text]) for text in costs])
    starts = np.cumsum(counts) - counts
    result = np.empty(len(costs))
    for count in np.unique(counts):
        rows = np.flatnonzero(counts == count)
        table = np.sort(times[starts[rows, np.newaxis] + np.arange(count)], axis=1)
        median = (table[:, (count - 1) // 2] + table[:, count // 2]) / 2
        result[rows] = np.where((table[:, 0] >= LEAST_SECONDS) & (table[:, -1] <= MOST_SECONDS), median, math.inf)
    return result


def _numbers(text: bytes) -> NDArray[np.float64]:
    """The numbers of a text; none if one of them is malformed."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)  # how NumPy tells of a malformed number
        try:
            return np.fromstring(text, sep=",")
        except (DeprecationWarning, ValueError):
            return np.empty(0)
