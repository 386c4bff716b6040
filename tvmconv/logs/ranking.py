"""The best record of logs: one rule for every command that names the result of a search.

The rule, for a workload on a device:

1. A config that gave a wrong answer in any record on that device is out.
2. Configs that were timed again at the end of a search come first, each by its latest final timing that succeeded.
3. The other configs follow, each by the median of its trials (of an even number, the slower of the two in the middle).

Final timings and trials are never ranked by one number: trials are timed for milliseconds, beside compilers, and the
fastest of hundreds was also lucky. `iterate_fastest_first` is the rule; everything else in this file is built on it.
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
from tvmconv.logs.index import LogIndex, index_log, index_records
from tvmconv.logs.lines import InvalidLines
from tvmconv.logs.record import Record
from tvmconv.logs.record_key import RecordKey
from tvmconv.workloads import Conv, Workload
from tvmconv.workloads.suites import SuiteVariant
from tvmconv.workloads.text import quote

LogPaths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
KeyedIndexes = Sequence[tuple[RecordKey, LogIndex]]


def iterate_fastest_first(indexes: KeyedIndexes) -> Iterator[Record]:
    """Yield one record for each valid config, the best first, by the rule above.

    Args:
        indexes: records of one workload, which may be of several schedules and devices.
    """
    wrong_identities = {identity for _, log_index in indexes for identity in log_index.find_wrong_identities()}
    final_records = {
        identity: record
        for identity, record in _latest_final_records(indexes).items()
        if identity not in wrong_identities
    }
    yield from sorted(final_records.values(), key=lambda record: record.cost)
    for record in _iterate_median_trials(indexes):
        if record.identity not in wrong_identities and record.identity not in final_records:
            yield record


def find_best_of_records(records: Iterable[Record]) -> Record | None:
    """Return the best of records that are in memory, all of one workload; None if none is valid."""
    return next(iterate_fastest_first([*index_records(records).items()]), None)


def find_unconfirmed_trial(indexes: KeyedIndexes) -> Record | None:
    """Return the fastest trial if it is faster than all final timings, and its config has none; else None.

    Its time may be due to luck, so that it is no result: a search that goes on with the log times it again.
    """
    first_record = next(iterate_fastest_first(indexes), None)
    if first_record is None or not first_record.final:
        return None
    trial = next((record for record in iterate_fastest_first(indexes) if not record.final), None)
    return trial if trial is not None and trial.cost < first_record.cost else None


def _latest_final_records(indexes: KeyedIndexes) -> dict[tuple[str, str, str, str], Record]:
    """Return the latest final timing of each config that has one."""
    final_records = [record for _, log_index in indexes for record in log_index.iterate_final_records()]
    return {record.identity: record for record in sorted(final_records, key=lambda record: record.timestamp)}


def _iterate_median_trials(indexes: KeyedIndexes) -> Iterator[Record]:
    """Yield the median trial of each config, the fastest first; each is parsed when it is asked for."""
    columns = [(index_number, *log_index.get_trial_columns()) for index_number, (_, log_index) in enumerate(indexes)]
    if not columns:
        return
    index_numbers = np.concatenate([np.full(len(costs), index_number) for index_number, costs, _, _ in columns])
    costs, configs, positions = (
        np.concatenate([column[column_number] for column in columns]) for column_number in (1, 2, 3)
    )
    group_numbers = {
        key[:3]: index_number for index_number, (key, _) in reversed([*enumerate(indexes)])
    }  # whatever the target
    groups = np.array([group_numbers[key[:3]] for key, _ in indexes])[index_numbers]
    order = np.lexsort((costs, configs, groups))
    order = order[np.isfinite(costs[order])]
    group_changes = (np.diff(configs[order]) != 0) | (np.diff(groups[order]) != 0)
    starts = np.flatnonzero(np.concatenate([[True], group_changes])) if len(order) else np.empty(0, int)
    ends = np.append(starts[1:], len(order))
    medians = starts + (ends - starts) // 2
    for column_number in np.lexsort((order[medians], costs[order[medians]])) if len(order) else ():
        start, median, end = starts[column_number], medians[column_number], ends[column_number]
        for trial_number in (*order[median:end], *order[start:median][::-1]):  # a line may turn out to be no record
            record = indexes[index_numbers[trial_number]][1].parse_record(int(positions[trial_number]))
            if record is not None:
                yield record
                break


def list_log_files(paths: LogPaths) -> list[Path]:
    """The logs that were named: files as they are, and of folders every `*.jsonl` below them, in alphabetical order.

    Raises:
        Error: a file is not there, a folder has no logs, or an argument is no path.
    """
    files: list[Path] = []
    try:
        given_paths = [Path(paths)] if isinstance(paths, (str, os.PathLike)) else [Path(path) for path in paths]
    except TypeError as error:
        raise Error(f"expected the path of a log or a folder of logs, or several, not {quote(paths)}") from error
    for path in given_paths:
        folder_logs = sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]
        if not folder_logs:
            raise Error(f"no logs in folder {path}: expected files *.jsonl")
        files += folder_logs
    return files


def find_best_record(
    paths: LogPaths, workload: Workload, schedule: str | Collection[str] | None = None, device: str | None = None
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
    schedule_names = [schedule] if isinstance(schedule, str) else schedule
    indexes = [
        (key, log_index)
        for key, log_index in _index_logs(paths, workload)
        if key.workload == workload
        and (schedule_names is None or key.schedule in schedule_names)
        and device in (None, key.device)
    ]
    return next(iterate_fastest_first(indexes), None)


def index_logs_by_workload(
    invalid_lines_by_log: Mapping[Path, InvalidLines], workload: Workload | None = None, device_name: str | None = None
) -> dict[tuple[Workload, str], list[tuple[RecordKey, LogIndex]]]:
    """Index the records of each workload on each device, in the order in which these turn up.

    Args:
        invalid_lines_by_log: the files; lines that are seen to be no records are added to the file's bad lines.
        workload: only this one.
        device_name: only the device of that name.

    Raises:
        Error: a log cannot be read.
    """
    indexes: dict[tuple[Workload, str], list[tuple[RecordKey, LogIndex]]] = {}
    for path, invalid_lines in invalid_lines_by_log.items():
        for key, log_index in index_log(path, invalid_lines).items():
            if workload in (None, key.workload) and device_name in (None, key.device):
                indexes.setdefault((key.workload, key.device), []).append((key, log_index))
    return indexes


def find_best_per_workload(
    invalid_lines_by_log: Mapping[Path, InvalidLines],
    workload: Workload | None = None,
    device_name: str | None = None,
    max_configs: int = 1,
) -> list[Record]:
    """Return the best valid records of each workload on each device, in the order in which these turn up.

    Args:
        invalid_lines_by_log: the files; lines that are seen to be no records are added to the file's bad lines.
        workload: only this one.
        device_name: only the device of that name.
        max_configs: number of configs of each at most, the best first.

    Raises:
        Error: a log cannot be read.
    """
    groups = index_logs_by_workload(invalid_lines_by_log, workload, device_name).values()
    return [record for group in groups for record in islice(iterate_fastest_first(group), max_configs)]


class DeviceMatch(IntEnum):
    """What a record's device has in common with another one; the smaller, the nearer."""

    DEVICE = 0  # it is the same, by its name
    ARCH = 1  # the architecture
    KIND = 2  # CUDA, or OpenCL


class RecordIndex:
    """What logs have of each workload, read once, for who asks for many.

    Args:
        paths: a log, a folder of logs, or several of them.
        workload: the workload that will be asked for, with or without its epilogue; others are there or not.

    Raises:
        Error: a log cannot be read.
    """

    def __init__(self, paths: LogPaths, workload: Workload | None = None) -> None:
        self._indexes_by_workload: dict[Workload, list[tuple[RecordKey, LogIndex]]] = {}
        for key, log_index in _index_logs(paths, workload):
            self._indexes_by_workload.setdefault(key.workload, []).append((key, log_index))

    def iterate_by_device_match(
        self, workload: Workload, device: Device, schedule: str | None = None
    ) -> Iterator[tuple[DeviceMatch, Record]]:
        """The valid records of a workload, those of the nearest device first and of these the best first.

        Args:
            workload: only its records count.
            device: where the kernel is to run; records of another kind of device do not count.
            schedule: only records of the schedule of that name.
        """
        matches: list[tuple[tuple[DeviceMatch, float], tuple[RecordKey, LogIndex]]] = []
        for key, log_index in self._indexes_by_workload.get(workload, ()):
            match_distance = _match_device(key, device)
            if schedule in (None, key.schedule) and match_distance is not None:
                matches.append((match_distance, (key, log_index)))
        matches.sort(key=lambda item: item[0])
        for (device_match, _), group in groupby(matches, key=lambda item: item[0]):
            for record in iterate_fastest_first([item for _, item in group]):
                yield device_match, record

    def iterate_applicable_records(self, workload: Workload, device: Device) -> Iterator[tuple[DeviceMatch, Record]]:
        """As `iterate_by_device_match`, and behind those of a convolution with an epilogue those of the same without
        it.

        A schedule has the same knobs with any epilogue, and what is fast without one mostly is fast with it.
        """
        yield from self.iterate_by_device_match(workload, device)
        if isinstance(workload, Conv) and workload.epilogue:
            yield from self.iterate_by_device_match(SuiteVariant(epilogue=()).apply_to(workload), device)


def iterate_by_device_match(
    paths: LogPaths, workload: Workload, device: Device, schedule: str | None = None
) -> Iterator[tuple[DeviceMatch, Record]]:
    """As `RecordIndex.iterate_by_device_match`, of these logs.

    Raises:
        Error: a log cannot be read.
    """
    yield from RecordIndex(paths, workload).iterate_by_device_match(workload, device, schedule)


def iterate_applicable_records(
    paths: LogPaths, workload: Workload, device: Device
) -> Iterator[tuple[DeviceMatch, Record]]:
    """As `RecordIndex.iterate_applicable_records`, of these logs.

    Raises:
        Error: a log cannot be read.
    """
    yield from RecordIndex(paths, workload).iterate_applicable_records(workload, device)


def _index_logs(paths: LogPaths, workload: Workload | None) -> KeyedIndexes:
    return [item for path in list_log_files(paths) for item in index_log(path, InvalidLines(), workload).items()]


def _match_device(key: RecordKey, device: Device) -> tuple[DeviceMatch, float] | None:
    """How far a subject's device is from another: by what they share, then by compute capability; None if too far."""
    if key.device == device.name:
        return DeviceMatch.DEVICE, 0
    if key.target.split(maxsplit=1)[:1] != [device.kind]:
        return None
    record_arch, device_arch = (
        re.search(r"sm_([0-9]{2,3})(?![0-9])", text or "") for text in (key.target, device.arch)
    )
    if record_arch is None or device_arch is None:
        return DeviceMatch.KIND, math.inf
    arch_difference = abs(int(record_arch[1]) - int(device_arch[1]))
    return DeviceMatch.KIND if arch_difference else DeviceMatch.ARCH, arch_difference
