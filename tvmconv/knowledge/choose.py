"""Which schedule and config to build where no log says: what the model predicts, for devices that it knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, cast

from tvmconv import library
from tvmconv.knowledge.model import known_for
from tvmconv.knowledge.predict import Prediction, default_unless_slower, predict
from tvmconv.workloads import Conv, Workload

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tvmconv.devices import Device
    from tvmconv.knobs.space import Space

ATTEMPTS = 4  # configs of each schedule that may be built, should the first of them not compile


def promising(
    w: Workload,
    device: Device,
    count: int = ATTEMPTS,
    spaces: Mapping[str, Space] | None = None,
) -> list[Prediction]:
    """The configs that promise most for a workload on a device, the best first; none where nothing is known.

    Without `spaces` the model chooses the schedule, too: not where it knows nothing of the one that is tried first, and
    that one's default comes before all that promise hardly more.

    Args:
        w: the workload.
        device: where.
        count: how many of each schedule at most.
        spaces: of the schedules that count, by name; by default of all that run there.
    """
    known = known_for(device.arch)
    if not known or not isinstance(w, Conv):
        return []
    if spaces is not None:
        return predict(w, spaces, known, count)
    first, *others = library.to_tune(w, device.kind, device.arch)
    if first.name not in known.experts:
        return []
    there = [first, *others, *library.in_reserve(w, device.kind, device.arch)]
    spaces = {s.name: s.space(w, device.limits) for s in there if s.name in known.experts}
    return default_unless_slower(predict(w, spaces, known, count), w, first.name, spaces[first.name], known)


def guess_of(
    w: Workload, schedule: str, space: Space, device: Device
) -> Callable[[NDArray[np.int32]], NDArray[np.float32]] | None:
    """How slow the model thinks configs (n, knobs) of a schedule to be: (n,), base-2 logarithms; None for no idea.

    Args:
        w: the workload.
        schedule: its name.
        space: of the schedule.
        device: where.
    """
    known = known_for(device.arch)
    expert = known.expert(w, schedule, space) if known and isinstance(w, Conv) else None
    if not known or not expert:
        return None
    machine, convolution, teller = known.machine, cast("Conv", w), expert
    return lambda points: teller.slowness(convolution, space, points, machine).mean(axis=0)
