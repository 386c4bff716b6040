"""Positions and costs of the records of a log, by subject: the data that the best record is chosen from."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvmconv.errors import RecordError
from tvmconv.logs.lines import BadLines, read_line
from tvmconv.logs.record import ErrorKind, Record
from tvmconv.logs.scan import Glance, medians, scan
from tvmconv.logs.subject import Subject
from tvmconv.workloads import Workload

_BATCH = 4096  # costs that are parsed together


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

    def add(self, glance: Glance[Any], position: int) -> None:
        """Add the record at `position`."""
        if glance.error is ErrorKind.WRONG_ANSWER:
            self._wrong.append(position)
        elif not glance.error and glance.final:
            self._finals.append(position)
        elif not glance.error:
            self._positions.append(position)
            self._configs.append(hash(glance.config))
            self._texts.append(glance.costs)
            if len(self._texts) == _BATCH:
                self._parse_costs()

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


class Indexer:
    """Makes an index for each subject of a log.

    Args:
        path: the log.

    Attributes:
        found: the indexes that were made.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.found: dict[Subject, Index] = {}

    def index(self, subject: Subject) -> Index:
        """Return the index of a subject."""
        return self.found.setdefault(subject, Index(self._parse))

    def _parse(self, offset: int) -> Record | None:
        try:
            return Record.parse(read_line(self._path, offset))
        except RecordError:  # a line that looked like a record
            return None


def index(path: Path, bad: BadLines, of: Workload | None = None) -> dict[Subject, Index]:
    """Read where the records of a log are, by subject; arguments and errors are those of `scan`."""
    indexer = Indexer(path)
    for line, glance in scan(path, bad, indexer.index, of):
        glance.made.add(glance, line.offset)
    return indexer.found


def index_records(records: Iterable[Record]) -> dict[Subject, Index]:
    """Index records that are in memory."""
    kept = list(records)
    found: dict[Subject, Index] = {}
    for number, record in enumerate(kept):
        made = found.setdefault(record.subject, Index(kept.__getitem__))
        made.add(Glance.of(record, made), number)
    return found
