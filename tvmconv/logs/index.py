"""The index of a log: positions and costs of its records by key, from which the best record is chosen."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvmconv.errors import RecordError
from tvmconv.logs.header_scan import ScannedLine, parse_medians, scan_log
from tvmconv.logs.lines import InvalidLines, read_line, translate_os_errors
from tvmconv.logs.record import ErrorKind, Record, RecordKey
from tvmconv.workloads import Workload

_BATCH = 4096  # number of costs that are parsed at once


class LogIndex:
    """The trials, final timings and wrong answers of one key in one log, with 24 bytes of memory per trial.

    `parse`: function that returns the record at a position, or None if that line is not a record.
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
        """Add a scanned line, which is at `position`."""
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
        """Return the costs of the successful trials, hashes of their configs, and their positions."""
        self._parse_costs()
        return np.array(self._costs), np.array(self._configs, np.int64), np.array(self._positions, np.int64)

    def parse_record(self, position: int) -> Record | None:
        """Return the record at a position; None if that line is not a record."""
        return self._parse(position)

    def iterate_final_records(self) -> Iterator[Record]:
        """Return an iterator over the successful final timings, in the order of the log."""
        return (record for position in self._final_positions if (record := self._parse(position)) and record.ok)

    def find_wrong_identities(self) -> set[tuple[str, str, str, str]]:
        """Return the identities of configs with a wrong answer."""
        return {record.identity for position in self._wrong_positions if (record := self._parse(position))}


class LogIndexer:
    """The indexes of one log, one for each key."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.indexes: dict[RecordKey, LogIndex] = {}

    def index_of_key(self, key: RecordKey) -> LogIndex:
        """Return the index of a key, which is created if necessary."""
        return self.indexes.setdefault(key, LogIndex(self._parse))

    def _parse(self, offset: int) -> Record | None:
        try:
            return Record.parse(read_line(self._path, offset))
        except RecordError:  # the scan does not check all of a line
            return None


def index_log(path: Path, invalid_lines: InvalidLines, workload: Workload | None = None) -> dict[RecordKey, LogIndex]:
    """Index the records of a log by key; see `scan_log` for the arguments and errors."""
    indexer = LogIndexer(path)
    for line, scanned in scan_log(path, invalid_lines, indexer.index_of_key, workload):
        scanned.header.add_scanned(scanned, line.offset)
    return indexer.indexes


def index_unchanged_log(path: Path) -> Mapping[RecordKey, LogIndex]:
    """Return the index of a whole log as `index_log` does; that of the last call if the log has not changed since."""
    with translate_os_errors(path, "read"):
        status = path.stat()
    version = status.st_size, status.st_mtime_ns
    known_version, indexes = _indexes_by_path.get(path, (None, {}))
    if version != known_version:
        indexes = index_log(path, InvalidLines())
        _indexes_by_path[path] = version, indexes
    return indexes


_indexes_by_path: dict[Path, tuple[tuple[int, int], Mapping[RecordKey, LogIndex]]] = {}


def index_records(records: Iterable[Record]) -> dict[RecordKey, LogIndex]:
    """Index records in memory by key."""
    record_list = list(records)
    indexes: dict[RecordKey, LogIndex] = {}
    for position, record in enumerate(record_list):
        log_index = indexes.setdefault(record.key, LogIndex(record_list.__getitem__))
        log_index.add_scanned(ScannedLine.from_record(record, log_index), position)
    return indexes
