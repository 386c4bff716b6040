"""The best record of logs, by one rule that all commands use.

The rule for a workload on a device:

1. A config with a wrong answer in any record on that device is excluded.
2. Configs with a final timing come first, each by its latest valid final timing.
3. The other configs follow, each by the median of its trials (the slower of the two middle ones of an even number).

Final timings and trials are not compared with each other. Trials are timed for milliseconds while compilers run, so the
fastest of hundreds of trials is partly due to noise. `iterate_fastest_first` implements the rule for all other
functions of this file.
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
from tvmconv.logs.index import LogIndex, index_log, index_records, index_unchanged_log
from tvmconv.logs.lines import InvalidLines
from tvmconv.logs.record import Record, RecordKey
from tvmconv.workloads import Workload
from tvmconv.workloads.conv_operator import ConvOperator
from tvmconv.workloads.suites import SuiteVariant
from tvmconv.workloads.text import quote

LogPaths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
KeyedIndexes = Sequence[tuple[RecordKey, LogIndex]]


def iterate_fastest_first(indexes: KeyedIndexes) -> Iterator[Record]:
    """Yield one record for each valid config, the best first, by the rule above.

    `indexes`: indexes of one workload, possibly of several schedules and devices.
    """
    wrong_identities = {identity for _, log_index in indexes for identity in log_index.find_wrong_identities()}
    final_records = _latest_final_records(indexes)
    valid_finals = [record for identity, record in final_records.items() if identity not in wrong_identities]
    yield from sorted(valid_finals, key=lambda record: record.cost)
    excluded_identities = wrong_identities | final_records.keys()
    for record in _iterate_median_trials(indexes):
        if record.identity not in excluded_identities:
            yield record


def find_best_of_records(records: Iterable[Record]) -> Record | None:
    """Return the best of records that are in memory, all of one workload; None if none is valid."""
    return next(iterate_fastest_first([*index_records(records).items()]), None)


def find_unconfirmed_trial(indexes: KeyedIndexes) -> Record | None:
    """Return the fastest trial if it is faster than all final timings and its config has none; else None. Its time may
    be due to noise, so it is not a result. A search that resumes from the log times it again.
    """
    first_record = next(iterate_fastest_first(indexes), None)
    if first_record is None or not first_record.final:
        return None
    trial = next((record for record in iterate_fastest_first(indexes) if not record.final), None)
    return trial if trial is not None and trial.cost < first_record.cost else None


def _latest_final_records(indexes: KeyedIndexes) -> dict[tuple[str, str, str, str], Record]:
    """Return the latest final timing of each config, by identity."""
    final_records = [record for _, log_index in indexes for record in log_index.iterate_final_records()]
    return {record.identity: record for record in sorted(final_records, key=lambda record: record.timestamp)}


def _iterate_median_trials(indexes: KeyedIndexes) -> Iterator[Record]:
    """Yield the median trial of each config, the fastest first; each record is parsed only when it is needed."""
    columns = [(index_number, *log_index.get_trial_columns()) for index_number, (_, log_index) in enumerate(indexes)]
    if not columns:
        return
    index_numbers = np.concatenate([np.full(len(costs), index_number) for index_number, costs, _, _ in columns])
    costs, configs, positions = (np.concatenate([column[number] for column in columns]) for number in (1, 2, 3))
    # Indexes that differ in the target only belong to one group, whose number is that of its first index.
    group_numbers = {key[:3]: index_number for index_number, (key, _) in reversed([*enumerate(indexes)])}
    groups = np.array([group_numbers[key[:3]] for key, _ in indexes])[index_numbers]
    order = np.lexsort((costs, configs, groups))
    order = order[np.isfinite(costs[order])]
    group_changes = (np.diff(configs[order]) != 0) | (np.diff(groups[order]) != 0)
    starts = np.flatnonzero(np.concatenate([[True], group_changes])) if len(order) else np.empty(0, int)
    ends = np.append(starts[1:], len(order))
    medians = starts + (ends - starts) // 2
    for column_number in np.lexsort((order[medians], costs[order[medians]])) if len(order) else ():
        start, median, end = starts[column_number], medians[column_number], ends[column_number]
        for trial_number in (*order[median:end], *order[start:median][::-1]):  # some lines may not parse
            record = indexes[int(index_numbers[trial_number])][1].parse_record(int(positions[trial_number]))
            if record is not None:
                yield record
                break


def list_log_files(paths: LogPaths) -> list[Path]:
    """Return the named log files, and for each folder all `*.jsonl` files below it, in alphabetical order.

    `paths`: path of a log or of a folder of logs, or several of them.
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
    """Return the best valid record of a workload in logs; None if there is none.

    `paths`: path of a log or of a folder of logs, or several of them.
    `schedule`: name of a schedule, or names, whose records count (default: all).
    `device`: name of the device whose records count, such as "NVIDIA H200" (default: all).
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
    """Index the records of each workload on each device, in the order of their first records.

    `invalid_lines_by_log`: logs, each with the object that collects its invalid lines.
    `workload`: workload to index (default: all).
    `device_name`: name of the device to index (default: all).
    """
    indexes: dict[tuple[Workload, str], list[tuple[RecordKey, LogIndex]]] = {}
    for path, invalid_lines in invalid_lines_by_log.items():
        for key, log_index in index_log(path, invalid_lines).items():
            if workload in (None, key.workload) and device_name in (None, key.device):
                indexes.setdefault((key.workload, key.device), []).append((key, log_index))
    return indexes


def find_best_per_workload(
    invalid_lines_by_log: Mapping[Path, InvalidLines], device_name: str | None = None, max_configs: int = 1
) -> list[Record]:
    """Return the best valid records of each workload on each device, in the order of their first records.

    `invalid_lines_by_log`: logs, each with the object that collects its invalid lines.
    `device_name`: name of the device whose records count (default: all).
    `max_configs`: maximum number of configs of each workload and device, the best first.
    """
    groups = index_logs_by_workload(invalid_lines_by_log, device_name=device_name).values()
    return [record for group in groups for record in islice(iterate_fastest_first(group), max_configs)]


class DeviceMatch(IntEnum):
    """The similarity of a record's device to another device; a smaller value is more similar."""

    DEVICE = 0  # same name
    ARCH = 1  # same architecture
    KIND = 2  # both CUDA, or both OpenCL


class RecordIndex:
    """An index of the records of logs, which is read once for many look-ups.

    `paths`: path of a log or of a folder of logs, or several of them.
    `workload`: workload that will be looked up, with or without its epilogue. Records of other workloads may then be
        missing. By default, all workloads are indexed.
    """

    def __init__(self, paths: LogPaths, workload: Workload | None = None) -> None:
        self._indexes_by_workload: dict[Workload, list[tuple[RecordKey, LogIndex]]] = {}
        for key, log_index in _index_logs(paths, workload):
            self._indexes_by_workload.setdefault(key.workload, []).append((key, log_index))

    def iterate_by_device_match(
        self, workload: Workload, device: Device, schedule: str | None = None
    ) -> Iterator[tuple[DeviceMatch, Record]]:
        """Yield the valid records of a workload, by the similarity of their device and then the best first.

        `device`: device that the kernel will run on. Records of another kind of device are left out.
        `schedule`: name of the schedule whose records are returned (default: all).
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

    def iterate_on_device(self, workload: Workload, device: Device) -> Iterator[Record]:
        """Yield the valid records of a workload on a device of the same name, the best first."""
        for device_match, record in self.iterate_by_device_match(workload, device):
            if device_match is not DeviceMatch.DEVICE:
                return
            yield record

    def iterate_applicable_records(self, workload: Workload, device: Device) -> Iterator[tuple[DeviceMatch, Record]]:
        """Yield the records of `iterate_by_device_match`, then those of the same convolution without its epilogue. A
        schedule has the same knobs with any epilogue, and a config that is fast without an epilogue is usually fast
        with it.
        """
        yield from self.iterate_by_device_match(workload, device)
        if isinstance(workload, ConvOperator) and workload.epilogue:
            yield from self.iterate_by_device_match(SuiteVariant(epilogue=()).apply_to(workload), device)


def _index_logs(paths: LogPaths, workload: Workload | None) -> KeyedIndexes:
    def index(path: Path) -> Mapping[RecordKey, LogIndex]:
        return index_unchanged_log(path) if workload is None else index_log(path, InvalidLines(), workload)

    return [item for path in list_log_files(paths) for item in index(path).items()]


def _match_device(key: RecordKey, device: Device) -> tuple[DeviceMatch, float] | None:
    """Return how similar a record's device is to another, and the difference in compute capability. It is None if the
    devices are of different kinds.
    """
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
