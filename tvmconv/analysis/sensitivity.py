"""What a knob governs: a kernel beside those that differ from it by one step of one knob."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tvmconv.errors import CompileError, DeviceError
from tvmconv.kernel import Kernel, build_for_device
from tvmconv.space import Value
from tvmconv.space.mutation import compute_option_distances
from tvmconv.space.search_space import Space

MAX_NEIGHBORS_PER_KNOB = (
    2  # steps of a knob: of a number the next smaller and the next larger, of a split those that move a factor
)


@dataclass(frozen=True)
class KnobNeighbor:
    """A kernel with another value of a knob.

    Attributes:
        knob: its name.
        value: that it has here.
        kernel: built, but for its machine code.
    """

    knob: str
    value: Value
    kernel: Kernel


def iterate_knob_neighbors(kernel: Kernel) -> Iterator[KnobNeighbor]:
    """The kernels that differ in one knob, by its nearest legal values; `MAX_NEIGHBORS_PER_KNOB` of a knob at most.

    What exceeds a block of the device, or does not lower, is left out.
    """
    space = kernel.schedule.space(kernel.workload, kernel.device.limits)
    point = space.point_from_config(kernel.config)
    for knob_index, (name, knob) in enumerate(space.knobs.items()):
        for option in _select_nearest_options(
            space, point, knob_index, compute_option_distances(knob, int(point[knob_index]))
        ):
            neighbor_point = point.copy()
            neighbor_point[knob_index] = option
            config = space.config_from_point(neighbor_point)
            try:
                neighbor_kernel = build_for_device(kernel.workload, kernel.schedule, kernel.device, config)
            except (CompileError, DeviceError):
                continue
            yield KnobNeighbor(name, config[name], neighbor_kernel)


def _select_nearest_options(
    space: Space, point: np.ndarray, knob_index: int, option_distances: np.ndarray
) -> list[int]:
    """The legal options of a knob that are nearest to the one that a point has."""
    other_options = [
        option for option in np.argsort(option_distances, kind="stable").tolist() if option != point[knob_index]
    ]
    points = np.repeat(point[None, :], len(other_options), axis=0)
    points[:, knob_index] = other_options
    return [option for option, is_legal in zip(other_options, space.is_legal(points), strict=True) if is_legal][
        :MAX_NEIGHBORS_PER_KNOB
    ]
