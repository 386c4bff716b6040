"""Positions and costs of the records of a log, by subject: the data that the best record is chosen from."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tvmconv.errors import RecordError
from tvmconv.knobs import Config
from tvmconv.logs import autotvm
from tvmconv.logs.lines import BadLines, read_line, read_lines
from tvmconv.logs.record import ErrorKind, Record
from tvmconv.logs.scan import Glancer, is_of_another, medians
from tvmconv.logs.subject import Subject
from tvmconv.workloads import Workload

_BATCH = 4096  # costs that are parsed together
FINAL = b'"final": true'  # as `Record.line` spells it; within a text the quotes would be escaped


class Index:
    """Trials, final timings and wrong answers of one subject in one log; 24 bytes of memory a trial.

    Args:
        parse: returns the record at a position, or None if the line there is no record after all.
    """

    def __init__(self, parse: Callable[[int], Record | None]) -> None:
        self._parse = parse
        self._costs = array("d")
        self._configs = array("q")
        self._positions = array("q")
        self._wrong: list[int] = []
        self._finals: list[int] = []
        self._texts: list[bytes] = []

    def add(self, error: ErrorKind, costs: bytes, config: bytes, position: int, *, final: bool = False) -> None:
        """Add the record at `position`; `costs` is the text of its times, and `config` that of its config."""
        if error is ErrorKind.WRONG_ANSWER:
            self._wrong.append(position)
        elif not error and final:
            self._finals.append(position)
        elif not error:
            self._positions.append(position)
            self._configs.append(hash(config))
            self._texts.append(costs)
            if len(self._texts) == _BATCH:
                self._parse_costs()

    def add_record(self, record: Record, position: int) -> None:
        """Add a record that was parsed."""
        config = spell_config(record.config)
        self.add(record.error, repr(record.cost).encode(), config, position, final=record.final)

    def _parse_costs(self) -> None:
        if self._texts:
            self._costs.frombytes(medians(self._texts).tobytes())
            self._texts.clear()

    def trials(self) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
        """Return the costs of the trials that succeeded, hashes of their configs, and their positions."""
        self._parse_costs()
        return np.array(self._costs), np.array(self._configs, np.int64), np.array(self._positions, np.int64)

    def record(self, position: int) -> Record | None:
        """Return the record at a position; None if the line there is no record after all."""
        return self._parse(position)

    def finals(self) -> Iterator[Record]:
        """Yield the final timings that succeeded, in the order of the log."""
        return (record for position in self._finals if (record := self._parse(position)) and record.ok)

    def wrong(self) -> set[tuple[str, str, str, str]]:
        """Return the identities of configs that gave a wrong answer."""
        return {record.identity for position in self._wrong if (record := self._parse(position))}


def spell_config(config: Config) -> bytes:
    """Return a config as `Record.line` spells it."""
    return b'"entity": ' + json.dumps(autotvm.encode_config(config)).encode()


def index(path: Path, bad: BadLines, of: Workload | None = None) -> dict[Subject, Index]:
    """Read where the records of a log are, by subject.

    Args:
        path: the file.
        bad: lines that are seen to be no records are added here.
        of: lines that are seen to be of other workloads than this, its epilogue aside, are left out.

    Raises:
        Error: the file cannot be read.
    """
    found: dict[Subject, Index] = {}

    def parse(offset: int) -> Record | None:
        try:
            return Record.parse(read_line(path, offset))
        except RecordError:  # a line that looked like a record
            return None

    def index_of(subject: Subject) -> Index:
        return found.setdefault(subject, Index(parse))

    glancer = Glancer(index_of)
    for line in read_lines(path):
        if of and is_of_another(line.text, of):
            continue
        try:
            glance = glancer.look(line.text)
            if glance is not None:
                final = FINAL in line.text
                glance.made.add(glance.error, glance.costs, glance.config, line.offset, final=final)
            elif not line.blank:
                record = Record.parse(line.text)
                index_of(record.subject).add_record(record, line.offset)
        except RecordError as refused:
            bad.add(line.number, refused)
    return found


def index_records(records: Iterable[Record]) -> dict[Subject, Index]:
    """Index records that are in memory."""
    kept: list[Record] = []
    found: dict[Subject, Index] = {}
    for record in records:
        found.setdefault(record.subject, Index(kept.__getitem__)).add_record(record, len(kept))
        kept.append(record)
    return found
