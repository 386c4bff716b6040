"""Records of earlier searches: those that a search counts, and fast configs of similar workloads to begin with."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from tvmconv.cost_model.similarity import workload_distance
from tvmconv.logs.index import LogIndex, index_log
from tvmconv.logs.lines import InvalidLines
from tvmconv.logs.ranking import iterate_fastest_first
from tvmconv.logs.record import Record, RecordKey
from tvmconv.measure import faults
from tvmconv.space import Config
from tvmconv.workloads import Conv, Workload


def drop_environment_failures(records: Sequence[Record], naive_name: str | None) -> list[Record]:
    """Return the records without failures that the host or the device caused, so that their configs are tried again. A
    failure is left out if its message names the environment, or if it is part of a streak in which even the naive
    schedule failed, which is correct on every device. If the log has other records, a lone failure of the naive
    schedule does not prove that. The records are those of one workload on one device, in the order of the log.
    """
    kept_records: list[Record] = []
    for ok, group in itertools.groupby(records, key=lambda record: record.ok):
        streak = list(group)
        suspects = [] if ok else [record for record in streak if faults.is_doubtful(record.error, record.message)]
        has_naive_failure = any(record.schedule == naive_name for record in suspects)
        has_other_failure = any(record.schedule != naive_name for record in suspects)
        is_environment_fault = has_naive_failure and (has_other_failure or len(streak) == len(records))
        dropped = {id(each) for each in suspects if is_environment_fault or faults.is_environment_fault(each.message)}
        kept_records += [record for record in streak if id(record) not in dropped]
    return kept_records


def find_nearest_workload_configs(
    logs: Iterable[Path], workload: Workload, schedules: Sequence[str], device_kind: str, max_workloads: int
) -> list[tuple[str, Config]]:
    """Return the fastest config of each of the nearest workloads in logs, with its schedule, the nearest first. Records
    of other kinds of devices do not count. `max_workloads` is for each schedule.
    """
    if not isinstance(workload, Conv):
        return []
    indexes: dict[tuple[str, Workload], list[tuple[RecordKey, LogIndex]]] = {}
    for log in logs:
        for key, log_index in index_log(log, InvalidLines()).items():
            if key.schedule in schedules and key.target.split(maxsplit=1)[:1] == [device_kind]:
                indexes.setdefault((key.schedule, key.workload), []).append((key, log_index))
    ranked_configs: list[tuple[int, str, Config]] = []
    for name in schedules:
        distances = [(workload_distance(workload, w), str(w), w) for schedule, w in indexes if schedule == name]
        nearest = sorted(entry for entry in distances if math.isfinite(entry[0]) and entry[2] != workload)
        for order, (_, _, other_workload) in enumerate(nearest[:max_workloads]):
            record = next(iterate_fastest_first(indexes[name, other_workload]), None)
            if record is not None:
                ranked_configs.append((order, name, record.config))
    return [(name, config) for _, name, config in sorted(ranked_configs, key=lambda ranked: ranked[0])]
