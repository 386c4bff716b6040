"""What logs know of workloads like one that is searched: the fastest configs of the nearest ones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from tvmconv.cost_model.similarity import workload_distance
from tvmconv.logs.index import LogIndex, index_log
from tvmconv.logs.lines import InvalidLines
from tvmconv.logs.ranking import iterate_fastest_first
from tvmconv.logs.record_key import RecordKey
from tvmconv.space import Config
from tvmconv.workloads import Conv, Workload


def find_nearest_workload_configs(
    logs: Iterable[Path], workload: Workload, schedules: Sequence[str], device_kind: str, max_workloads: int
) -> list[tuple[str, Config]]:
    """The fastest config of each of the nearest workloads in logs, by schedule, the nearest first.

    Args:
        logs: the files; what is no record is passed over.
        workload: what is searched; its own records do not count.
        schedules: names of those whose configs are wanted.
        device_kind: of the device; records of other kinds do not count.
        max_workloads: of workloads, for each schedule.

    Raises:
        Error: a log cannot be read.
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
        distances = [
            (workload_distance(workload, other_workload), other_workload)
            for (schedule, other_workload) in indexes
            if schedule == name
        ]
        nearest_workloads = sorted(
            (distance_to_other, str(other_workload), other_workload)
            for distance_to_other, other_workload in distances
            if math.isfinite(distance_to_other) and other_workload != workload
        )
        for workload_rank, (_, _, other_workload) in enumerate(nearest_workloads[:max_workloads]):
            record = next(iterate_fastest_first(indexes[name, other_workload]), None)
            if record is not None:
                ranked_configs.append((workload_rank, name, record.config))
    return [(name, config) for _, name, config in sorted(ranked_configs, key=lambda log_index: log_index[0])]
