"""Positions and costs of the records of a log, by subject: the data that the best record is chosen from."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvmconv.errors import RecordError
from tvmconv.logs.header_scan import ScannedLine, parse_medians, scan_log
from tvmconv.logs.lines import InvalidLines, read_line
from tvmconv.logs.record import ErrorKind, Record
from tvmconv.logs.record_key import RecordKey
from tvmconv.workloads import Workload

_BATCH = 4096  # costs that are parsed together


class LogIndex:
    """Trials, final timings and wrong answers of one subject in one log; 24 bytes of memory a trial.

    Args:
        parse: returns the record at a position, or None if the line there is no record after all.
    """

    def __init__(self, parse: Callable[[int], Record | None]) -> None:
        self._parse = parse
        self._costs = array("d")
        self._configs = array("q")
        self._positions = array("q")
        self._wrong_positions: list[int] = []
        self._final_positions: list[int] = []
        self._pending_cost_texts: list[bytes] = []

    def add_scanned(self, scanned: ScannedLine[Any], position: int) -> None:
        """Add the record at `position`."""
        if scanned.error is ErrorKind.WRONG_ANSWER:
            self._wrong_positions.append(position)
        elif not scanned.error and scanned.is_final:
            self._final_positions.append(position)
        elif not scanned.error:
            self._positions.append(position)
            self._configs.append(hash(scanned.config))
            self._pending_cost_texts.append(scanned.costs)
            if len(self._pending_cost_texts) == _BATCH:
                self._parse_costs()

    def _parse_costs(self) -> None:
        if self._pending_cost_texts:
            self._costs.frombytes(parse_medians(self._pending_cost_texts).tobytes())
            self._pending_cost_texts.clear()

    def get_trial_columns(self) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
        """Return the costs of the trials that succeeded, hashes of their configs, and their positions."""
        self._parse_costs()
        return np.array(self._costs), np.array(self._configs, np.int64), np.array(self._positions, np.int64)

    def parse_record(self, position: int) -> Record | None:
        """Return the record at a position; None if the line there is no record after all."""
        return self._parse(position)

    def iterate_final_records(self) -> Iterator[Record]:
        """Yield the final timings that succeeded, in the order of the log."""
        return (record for position in self._final_positions if (record := self._parse(position)) and record.ok)

    def find_wrong_identities(self) -> set[tuple[str, str, str, str]]:
        """Return the identities of configs that gave a wrong answer."""
        return {record.identity for position in self._wrong_positions if (record := self._parse(position))}


class LogIndexer:
    """Makes an index for each subject of a log.

    Args:
        path: the log.

    Attributes:
        indexes: the indexes that were made.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.indexes: dict[RecordKey, LogIndex] = {}

    def index_of_key(self, key: RecordKey) -> LogIndex:
        """Return the index of a subject."""
        return self.indexes.setdefault(key, LogIndex(self._parse))

    def _parse(self, offset: int) -> Record | None:
        try:
            return Record.parse(read_line(self._path, offset))
        except RecordError:  # a line that looked like a record
            return None


def index_log(path: Path, invalid_lines: InvalidLines, workload: Workload | None = None) -> dict[RecordKey, LogIndex]:
    """Read where the records of a log are, by subject; arguments and errors are those of `scan_log`."""
    indexer = LogIndexer(path)
    for line, scanned in scan_log(path, invalid_lines, indexer.index_of_key, workload):
        scanned.header.add_scanned(scanned, line.offset)
    return indexer.indexes


def index_records(records: Iterable[Record]) -> dict[RecordKey, LogIndex]:
    """Index records that are in memory."""
    record_list = list(records)
    indexes: dict[RecordKey, LogIndex] = {}
    for position, record in enumerate(record_list):
        log_index = indexes.setdefault(record.key, LogIndex(record_list.__getitem__))
        log_index.add_scanned(ScannedLine.from_record(record, log_index), position)
    return indexes
