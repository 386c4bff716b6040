"""What logs know of workloads like one that is searched: the fastest configs of the nearest ones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from tvmconv.knobs import Config
from tvmconv.knowledge.likeness import distance
from tvmconv.logs.best import fastest_first
from tvmconv.logs.index import Index, index
from tvmconv.logs.lines import BadLines
from tvmconv.logs.subject import Subject
from tvmconv.workloads import Conv, Workload


def nearest(
    logs: Iterable[Path], workload: Workload, schedules: Sequence[str], kind: str, count: int
) -> list[tuple[str, Config]]:
    """The fastest config of each of the nearest workloads in logs, by schedule, the nearest first.

    Args:
        logs: the files; what is no record is passed over.
        workload: what is searched; its own records do not count.
        schedules: names of those whose configs are wanted.
        kind: of the device; records of other kinds do not count.
        count: of workloads, for each schedule.

    Raises:
        Error: a log cannot be read.
    """
    if not isinstance(workload, Conv):
        return []
    found: dict[tuple[str, Workload], list[tuple[Subject, Index]]] = {}
    for log in logs:
        for subject, each in index(log, BadLines()).items():
            if subject.schedule in schedules and subject.target.split(maxsplit=1)[:1] == [kind]:
                found.setdefault((subject.schedule, subject.workload), []).append((subject, each))
    near: list[tuple[int, str, Config]] = []
    for name in schedules:
        others = [(distance(workload, other), other) for (schedule, other) in found if schedule == name]
        ordered = sorted((d, str(other), other) for d, other in others if math.isfinite(d) and other != workload)
        for place, (_, _, other) in enumerate(ordered[:count]):
            record = next(fastest_first(found[name, other]), None)
            if record is not None:
                near.append((place, name, record.config))
    return [(name, config) for _, name, config in sorted(near, key=lambda each: each[0])]
