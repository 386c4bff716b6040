"""The best records of logs: for a workload, and for a device that perhaps none of them was measured on."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from itertools import groupby, islice
from pathlib import Path

from tvmconv.devices import Device
from tvmconv.errors import Error
from tvmconv.logs.index import Ranking, fastest_first, index
from tvmconv.logs.lines import BadLines
from tvmconv.logs.record import Record
from tvmconv.logs.subject import Subject
from tvmconv.workloads import Conv, Workload
from tvmconv.workloads.suites import Variant
from tvmconv.workloads.text import quote

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


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


def best(paths: Paths, workload: Workload, schedule: str | None = None, device: str | None = None) -> Record | None:
    """The fastest valid record of a workload in logs.

    Args:
        paths: a log, a folder of logs, or several of them.
        workload: only its records count.
        schedule: only records of the schedule of that name.
        device: only records of the device of that name, such as "NVIDIA H200".

    Raises:
        Error: a log cannot be read.
    """
    rankings = [
        ranking
        for subject, ranking in _rankings(paths, workload)
        if subject.workload == workload and schedule in (None, subject.schedule) and device in (None, subject.device)
    ]
    return next(fastest_first(rankings), None)


def best_of_each(
    logs: Mapping[Path, BadLines], workload: Workload | None = None, device: str | None = None, top: int = 1
) -> list[Record]:
    """The fastest valid records of each workload on each device, in the order in which these turn up.

    Args:
        logs: the files; lines that are seen to be no records are added to the file's bad lines.
        workload: only this one.
        device: only the device of that name.
        top: how many of each at most, the fastest first; of a config that was measured several times, only the fastest.

    Raises:
        Error: a log cannot be read.
    """
    found: dict[tuple[Workload, str], list[Ranking]] = {}
    for path, bad in logs.items():
        for subject, ranking in index(path, bad).items():
            if workload in (None, subject.workload) and device in (None, subject.device):
                found.setdefault((subject.workload, subject.device), []).append(ranking)
    return [record for rankings in found.values() for record in islice(_once_each(fastest_first(rankings)), top)]


def _once_each(records: Iterable[Record]) -> Iterator[Record]:
    """The first record of each config."""
    met: set[tuple[str, str, str, str]] = set()
    for record in records:
        if record.identity not in met:
            met.add(record.identity)
            yield record


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
        self._found: dict[Workload, list[tuple[Subject, Ranking]]] = {}
        for subject, ranking in _rankings(paths, of):
            self._found.setdefault(subject.workload, []).append((subject, ranking))

    def nearest_first(
        self, workload: Workload, device: Device, schedule: str | None = None
    ) -> Iterator[tuple[Nearness, Record]]:
        """The valid records of a workload, those of the nearest device first and of these the fastest first.

        Args:
            workload: only its records count.
            device: where the kernel is to run; records of another kind of device do not count.
            schedule: only records of the schedule of that name.
        """
        near: list[tuple[tuple[Nearness, float], Ranking]] = []
        for subject, ranking in self._found.get(workload, ()):
            distance = _distance(subject, device)
            if schedule in (None, subject.schedule) and distance is not None:
                near.append((distance, ranking))
        near.sort(key=lambda item: item[0])
        for (nearness, _), group in groupby(near, key=lambda item: item[0]):
            for record in fastest_first([ranking for _, ranking in group]):
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


def _rankings(paths: Paths, of: Workload | None) -> Sequence[tuple[Subject, Ranking]]:
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
