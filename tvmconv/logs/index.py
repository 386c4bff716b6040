"""Where the records of a log are, by subject and in the order of their costs: what `best` and `build` choose from."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from tvmconv.errors import RecordError
from tvmconv.logs.lines import BadLines, read_line, read_lines
from tvmconv.logs.record import ErrorKind, Record
from tvmconv.logs.scan import Glancer, is_of_another, medians
from tvmconv.logs.subject import Subject
from tvmconv.workloads import Workload

_BATCH = 4096  # costs that are parsed together
_FINAL = b'"final": true'  # as `Record.line` spells it; within a text the quotes would be escaped


class Ranking:
    """The trials of one subject in one file that were timed, the fastest first; 16 bytes of memory a record."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._costs = array("d")
        self._offsets = array("q")
        self._wrong: list[int] = []
        self._finals: list[int] = []
        self._texts: list[bytes] = []

    def add(self, error: ErrorKind, costs: bytes, offset: int, *, final: bool = False) -> None:
        """Add the record whose line begins at `offset`."""
        if not error and final:
            self._finals.append(offset)
        elif not error:
            self._offsets.append(offset)
            self._texts.append(costs)
            if len(self._texts) == _BATCH:
                self._parse_costs()
        elif error is ErrorKind.WRONG_ANSWER:
            self._wrong.append(offset)

    def _parse_costs(self) -> None:
        if self._texts:
            self._costs.frombytes(medians(self._texts).tobytes())
            self._texts.clear()

    def __iter__(self) -> Iterator[Record]:
        """The records, each parsed when it is asked for."""
        self._parse_costs()
        costs = np.frombuffer(self._costs) if self._costs else np.empty(0)
        for i in np.argsort(costs, kind="stable"):
            record = self._parse(self._offsets[i])
            if record is not None:
                yield record

    def finals(self) -> Iterator[Record]:
        """The last timings of searches that did not fail, in the order of the file."""
        for offset in self._finals:
            record = self._parse(offset)
            if record is not None and record.ok:
                yield record

    def wrong(self) -> set[tuple[str, str, str, str]]:
        """The identities of configs that gave a wrong answer."""
        return {record.identity for offset in self._wrong if (record := self._parse(offset))}

    def _parse(self, offset: int) -> Record | None:
        try:
            return Record.parse(read_line(self._path, offset))
        except RecordError:  # a line that looked like a record
            return None


def index(path: Path, bad: BadLines, of: Workload | None = None) -> dict[Subject, Ranking]:
    """The records of a log by subject.

    Args:
        path: the file.
        bad: lines that are seen to be no records are added here.
        of: lines that are seen to be of other workloads than this, its epilogue aside, are left out.

    Raises:
        Error: the file cannot be read.
    """
    found: dict[Subject, Ranking] = {}

    def ranking_of(subject: Subject) -> Ranking:
        return found.setdefault(subject, Ranking(path))

    glancer = Glancer(ranking_of)
    for line in read_lines(path):
        if of and is_of_another(line.text, of):
            continue
        try:
            glance = glancer.look(line.text)
            if glance is not None:
                ranking, error, costs = glance
                ranking.add(error, costs, line.offset, final=_FINAL in line.text)
            elif not line.blank:
                record = Record.parse(line.text)
                costs = repr(record.cost).encode()
                ranking_of(record.subject).add(record.error, costs, line.offset, final=record.final)
        except RecordError as refused:
            bad.add(line.number, refused)
    return found


def fastest_first(rankings: Sequence[Ranking]) -> Iterator[Record]:
    """The valid records of several rankings, the fastest first.

    Not valid is a record whose config gave a wrong answer in another record on that device, in whichever ranking.

    Trials are timed for a few milliseconds, and some of the fastest once more at the end of a search, for longer and
    side by side. Only like is compared with like: where the fastest trial was among these, or none is as fast as them,
    their last timings come first, in their order, and then all trials in theirs.
    """
    wrong = {identity for ranking in rankings for identity in ranking.wrong()}
    merged = heapq.merge(*rankings, key=lambda record: record.cost)
    trials = (record for record in merged if record.identity not in wrong)
    timed_again = [record for ranking in rankings for record in ranking.finals() if record.identity not in wrong]
    latest = {record.identity: record for record in sorted(timed_again, key=lambda record: record.timestamp)}
    finals = sorted(latest.values(), key=lambda record: record.cost)
    first = next(trials, None)
    if finals and (first is None or first.identity in latest or first.cost >= finals[0].cost):
        yield from finals
    if first is not None:
        yield first
    yield from trials
