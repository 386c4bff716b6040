"""What a knob governs: a kernel beside those that differ from it by one step of one knob."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tvmconv.errors import CompileError, DeviceError
from tvmconv.kernel import Kernel, build_on
from tvmconv.knobs import Value
from tvmconv.knobs.moves import distances
from tvmconv.knobs.space import Space

EACH = 2  # steps of a knob: of a number the next smaller and the next larger, of a split those that move a factor


@dataclass(frozen=True)
class Step:
    """A kernel with another value of a knob.

    Attributes:
        knob: its name.
        value: that it has here.
        kernel: built, but for its machine code.
    """

    knob: str
    value: Value
    kernel: Kernel


def steps(kernel: Kernel) -> Iterator[Step]:
    """The kernels that differ in one knob, by its nearest legal values; `EACH` of a knob at most.

    What exceeds a block of the device, or does not lower, is left out.
    """
    space = kernel.schedule.space(kernel.workload, kernel.device.limits)
    point = space.point(kernel.config)
    for place, (name, knob) in enumerate(space.knobs.items()):
        for option in _nearest(space, point, place, distances(knob, int(point[place]))):
            changed = point.copy()
            changed[place] = option
            config = space.config(changed)
            try:
                made = build_on(kernel.workload, kernel.schedule, kernel.device, config)
            except (CompileError, DeviceError):
                continue
            yield Step(name, config[name], made)


def _nearest(space: Space, point: np.ndarray, place: int, far: np.ndarray) -> list[int]:
    """The legal options of a knob that are nearest to the one that a point has."""
    others = [option for option in np.argsort(far, kind="stable").tolist() if option != point[place]]
    points = np.repeat(point[None, :], len(others), axis=0)
    points[:, place] = others
    return [option for option, legal in zip(others, space.legal(points), strict=True) if legal][:EACH]
