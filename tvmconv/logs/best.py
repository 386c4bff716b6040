"""The best record of logs: one rule for every command that names the result of a search.

The rule, for a workload on a device:

1. A config that gave a wrong answer in any record on that device is out.
2. Configs that were timed again at the end of a search come first, each by its latest final timing that succeeded.
3. The other configs follow, each by the median of its trials (of an even number, the slower of the two in the middle).

Final timings and trials are never ranked by one number: trials are timed for milliseconds, beside compilers, and the
fastest of hundreds was also lucky. `fastest_first` is the rule; everything else in this file is built on it.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from itertools import groupby, islice
from pathlib import Path

import numpy as np

from tvmconv.devices import Device
from tvmconv.errors import Error
from tvmconv.logs.index import Index, index, index_records
from tvmconv.logs.lines import BadLines
from tvmconv.logs.record import Record
from tvmconv.logs.subject import Subject
from tvmconv.workloads import Conv, Workload
from tvmconv.workloads.suites import Variant
from tvmconv.workloads.text import quote

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
Indexes = Sequence[tuple[Subject, Index]]


def fastest_first(found: Indexes) -> Iterator[Record]:
    """Yield one record for each valid config, the best first, by the rule above.

    Args:
        found: records of one workload, which may be of several schedules and devices.
    """
    wrong = {identity for _, each in found for identity in each.wrong()}
    finals = {identity: record for identity, record in _latest_finals(found).items() if identity not in wrong}
    yield from sorted(finals.values(), key=lambda record: record.cost)
    for record in _median_trials(found):
        if record.identity not in wrong and record.identity not in finals:
            yield record


def best_of_records(records: Iterable[Record]) -> Record | None:
    """Return the best of records that are in memory, all of one workload; None if none is valid."""
    return next(fastest_first([*index_records(records).items()]), None)


def unconfirmed(found: Indexes) -> Record | None:
    """Return the fastest trial if it is faster than all final timings, and its config has none; else None.

    Its time may be due to luck, so that it is no result: a search that goes on with the log times it again.
    """
    first = next(fastest_first(found), None)
    if first is None or not first.final:
        return None
    trial = next((record for record in fastest_first(found) if not record.final), None)
    return trial if trial is not None and trial.cost < first.cost else None


def _latest_finals(found: Indexes) -> dict[tuple[str, str, str, str], Record]:
    """Return the latest final timing of each config that has one."""
    finals = [record for _, each in found for record in each.finals()]
    return {record.identity: record for record in sorted(finals, key=lambda record: record.timestamp)}


def _median_trials(found: Indexes) -> Iterator[Record]:
    """Yield the median trial of each config, the fastest first; each is parsed when it is asked for."""
    columns = [(number, *each.trials()) for number, (_, each) in enumerate(found)]
    if not columns:
        return
    owners = np.concatenate([np.full(len(costs), number) for number, costs, _, _ in columns])
    costs, configs, positions = (np.concatenate([column[place] for column in columns]) for place in (1, 2, 3))
    alike = {subject[:3]: number for number, (subject, _) in reversed([*enumerate(found)])}  # whatever the target
    groups = np.array([alike[subject[:3]] for subject, _ in found])[owners]
    order = np.lexsort((costs, configs, groups))
    order = order[np.isfinite(costs[order])]
    changes = (np.diff(configs[order]) != 0) | (np.diff(groups[order]) != 0)
    starts = np.flatnonzero(np.concatenate([[True], changes])) if len(order) else np.empty(0, int)
    ends = np.append(starts[1:], len(order))
    middles = starts + (ends - starts) // 2
    for place in np.lexsort((order[middles], costs[order[middles]])) if len(order) else ():
        start, middle, end = starts[place], middles[place], ends[place]
        for row in (*order[middle:end], *order[start:middle][::-1]):  # a line may turn out to be no record
            record = found[owners[row]][1].record(int(positions[row]))
            if record is not None:
                yield record
                break


def log_files(paths: Paths) -> list[Path]:
    """The logs that were named: files as they are, and of folders every `*.jsonl` below them, in alphabetical order.

    Raises:
        Error: a file is not there, a folder has no logs, or an argument is no path.
    """
    files: list[Path] = []
    try:
        named = [Path(paths)] if isinstance(paths, (str, os.PathLike)) else [Path(path) for path in paths]
    except TypeError as error:
        raise Error(f"expected the path of a log or a folder of logs, or several, not {quote(paths)}") from error
    for path in named:
        found = sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]
        if not found:
            raise Error(f"no logs in folder {path}: expected files *.jsonl")
        files += found
    return files


def best(
    paths: Paths, workload: Workload, schedule: str | Collection[str] | None = None, device: str | None = None
) -> Record | None:
    """Return the best valid record of a workload in logs.

    Args:
        paths: a log, a folder of logs, or several of them.
        workload: only its records count.
        schedule: name of a schedule, or names of several: only their records count.
        device: only records of the device of that name, such as "NVIDIA H200".

    Raises:
        Error: a log cannot be read.
    """
    names = [schedule] if isinstance(schedule, str) else schedule
    found = [
        (subject, each)
        for subject, each in _indexes(paths, workload)
        if subject.workload == workload
        and (names is None or subject.schedule in names)
        and device in (None, subject.device)
    ]
    return next(fastest_first(found), None)


def index_each(
    logs: Mapping[Path, BadLines], workload: Workload | None = None, device: str | None = None
) -> dict[tuple[Workload, str], list[tuple[Subject, Index]]]:
    """Index the records of each workload on each device, in the order in which these turn up.

    Args:
        logs: the files; lines that are seen to be no records are added to the file's bad lines.
        workload: only this one.
        device: only the device of that name.

    Raises:
        Error: a log cannot be read.
    """
    found: dict[tuple[Workload, str], list[tuple[Subject, Index]]] = {}
    for path, bad in logs.items():
        for subject, each in index(path, bad).items():
            if workload in (None, subject.workload) and device in (None, subject.device):
                found.setdefault((subject.workload, subject.device), []).append((subject, each))
    return found


def best_of_each(
    logs: Mapping[Path, BadLines], workload: Workload | None = None, device: str | None = None, top: int = 1
) -> list[Record]:
    """Return the best valid records of each workload on each device, in the order in which these turn up.

    Args:
        logs: the files; lines that are seen to be no records are added to the file's bad lines.
        workload: only this one.
        device: only the device of that name.
        top: number of configs of each at most, the best first.

    Raises:
        Error: a log cannot be read.
    """
    groups = index_each(logs, workload, device).values()
    return [record for group in groups for record in islice(fastest_first(group), top)]


class Nearness(IntEnum):
    """What a record's device has in common with another one; the smaller, the nearer."""

    DEVICE = 0  # it is the same, by its name
    ARCH = 1  # the architecture
    KIND = 2  # CUDA, or OpenCL


class Rankings:
    """What logs have of each workload, read once, for who asks for many.

    Args:
        paths: a log, a folder of logs, or several of them.
        of: the workload that will be asked for, with or without its epilogue; others are there or not.

    Raises:
        Error: a log cannot be read.
    """

    def __init__(self, paths: Paths, of: Workload | None = None) -> None:
        self._found: dict[Workload, list[tuple[Subject, Index]]] = {}
        for subject, each in _indexes(paths, of):
            self._found.setdefault(subject.workload, []).append((subject, each))

    def nearest_first(
        self, workload: Workload, device: Device, schedule: str | None = None
    ) -> Iterator[tuple[Nearness, Record]]:
        """The valid records of a workload, those of the nearest device first and of these the best first.

        Args:
            workload: only its records count.
            device: where the kernel is to run; records of another kind of device do not count.
            schedule: only records of the schedule of that name.
        """
        near: list[tuple[tuple[Nearness, float], tuple[Subject, Index]]] = []
        for subject, each in self._found.get(workload, ()):
            distance = _distance(subject, device)
            if schedule in (None, subject.schedule) and distance is not None:
                near.append((distance, (subject, each)))
        near.sort(key=lambda item: item[0])
        for (nearness, _), group in groupby(near, key=lambda item: item[0]):
            for record in fastest_first([item for _, item in group]):
                yield nearness, record

    def serving(self, workload: Workload, device: Device) -> Iterator[tuple[Nearness, Record]]:
        """As `nearest_first`, and behind those of a convolution with an epilogue those of the same without it.

        A schedule has the same knobs with any epilogue, and what is fast without one mostly is fast with it.
        """
        yield from self.nearest_first(workload, device)
        if isinstance(workload, Conv) and workload.epilogue:
            yield from self.nearest_first(Variant(epilogue=()).of(workload), device)


def nearest_first(
    paths: Paths, workload: Workload, device: Device, schedule: str | None = None
) -> Iterator[tuple[Nearness, Record]]:
    """As `Rankings.nearest_first`, of these logs.

    Raises:
        Error: a log cannot be read.
    """
    yield from Rankings(paths, workload).nearest_first(workload, device, schedule)


def serving(paths: Paths, workload: Workload, device: Device) -> Iterator[tuple[Nearness, Record]]:
    """As `Rankings.serving`, of these logs.

    Raises:
        Error: a log cannot be read.
    """
    yield from Rankings(paths, workload).serving(workload, device)


def _indexes(paths: Paths, of: Workload | None) -> Indexes:
    return [item for path in log_files(paths) for item in index(path, BadLines(), of).items()]


def _distance(subject: Subject, device: Device) -> tuple[Nearness, float] | None:
    """How far a subject's device is from another: by what they share, then by compute capability; None if too far."""
    if subject.device == device.name:
        return Nearness.DEVICE, 0
    if subject.target.split(maxsplit=1)[:1] != [device.kind]:
        return None
    there, here = (re.search(r"sm_([0-9]{2,3})(?![0-9])", text or "") for text in (subject.target, device.arch))
    if there is None or here is None:
        return Nearness.KIND, math.inf
    gap = abs(int(there[1]) - int(here[1]))
    return Nearness.KIND if gap else Nearness.ARCH, gap
