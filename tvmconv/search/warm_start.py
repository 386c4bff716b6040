"""Warm start of a search with the fastest configs that logs have of the nearest workloads."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from tvmconv.cost_model.similarity import workload_distance
from tvmconv.logs.index import LogIndex, index_log
from tvmconv.logs.lines import InvalidLines
from tvmconv.logs.ranking import iterate_fastest_first
from tvmconv.logs.record import RecordKey
from tvmconv.space import Config
from tvmconv.workloads import Conv, Workload


def find_nearest_workload_configs(
    logs: Iterable[Path], workload: Workload, schedules: Sequence[str], device_kind: str, max_workloads: int
) -> list[tuple[str, Config]]:
    """Return the fastest config of each of the nearest workloads in logs, with its schedule, the nearest first.

    Args:
        logs: Log files; lines that are not records are skipped.
        workload: Workload that is searched. Its own records do not count.
        schedules: Names of the schedules.
        device_kind: Kind of the device. Records of other kinds do not count.
        max_workloads: Maximum number of workloads for each schedule.

    Raises:
        Error: A log cannot be read.
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
