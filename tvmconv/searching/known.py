"""What logs know of workloads like one that is searched: the fastest configs of the nearest ones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from tvmconv.knobs import Config
from tvmconv.logs.index import Ranking, fastest_first, index
from tvmconv.logs.lines import BadLines
from tvmconv.workloads import Conv, Workload
from tvmconv.workloads.layout import CHANNELS_LAST

HALVES = ("float16", "bfloat16")


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
    found: dict[tuple[str, Workload], list[Ranking]] = {}
    for log in logs:
        for subject, ranking in index(log, BadLines()).items():
            if subject.schedule in schedules and subject.target.split(maxsplit=1)[:1] == [kind]:
                found.setdefault((subject.schedule, subject.workload), []).append(ranking)
    near: list[tuple[int, str, Config]] = []
    for name in schedules:
        others = [(distance(workload, other), other) for (schedule, other) in found if schedule == name]
        ordered = sorted((d, str(other), other) for d, other in others if math.isfinite(d) and other != workload)
        for place, (_, _, other) in enumerate(ordered[:count]):
            record = next(fastest_first(found[name, other]), None)
            if record is not None:
                near.append((place, name, record.config))
    return [(name, config) for _, name, config in sorted(near, key=lambda each: each[0])]


def distance(w: Workload, other: Workload) -> float:
    """How unlike two convolutions are: by how many powers of two their products differ; infinite for other kinds."""
    if not isinstance(w, Conv) or not isinstance(other, Conv) or w.operator != other.operator:
        return math.inf
    same_type = w.dtype == other.dtype or {w.dtype, other.dtype} <= set(HALVES)
    if not same_type or (w.layout == CHANNELS_LAST) != (other.layout == CHANNELS_LAST):
        return math.inf
    if (w.groups > 1) != (other.groups > 1):
        return math.inf
    return sum(weight * abs(math.log2(a / b)) for (weight, a), (_, b) in zip(_sizes(w), _sizes(other), strict=True))


def _sizes(w: Conv) -> list[tuple[float, float]]:
    """What makes convolutions alike, each with its weight."""
    return [
        (1.0, w.N * math.prod(w.out)),
        (0.5, w.out[-1]),
        (1.0, w.O / w.groups),
        (1.0, w.C / w.groups),
        (0.5, w.groups),
        (2.0, math.prod(w.kernel)),
        (1.0, math.prod(w.stride)),
        (0.5, math.prod(w.dilation)),
        (0.25, w.N),
    ]
