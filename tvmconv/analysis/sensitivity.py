"""One-at-a-time sensitivity of a kernel to its knobs: kernels that differ from it by a nearby value of one knob."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tvmconv.errors import CompileError, DeviceError
from tvmconv.kernel import Kernel, build_for_device
from tvmconv.space import Value
from tvmconv.space.mutation import compute_option_distances
from tvmconv.space.search_space import Space

# The neighbors are the next smaller and larger value of a number, or the splits that differ by moving one factor.
MAX_NEIGHBORS_PER_KNOB = 2


@dataclass(frozen=True)
class KnobNeighbor:
    """Kernel that differs from another one in the value of one knob."""

    knob: str
    value: Value
    kernel: Kernel  # the kernel, lowered but not yet compiled to machine code


def iterate_knob_neighbors(kernel: Kernel) -> Iterator[KnobNeighbor]:
    """Yield the kernels that differ in one knob, at most `MAX_NEIGHBORS_PER_KNOB` for each knob.

    A config that exceeds the device's limits per block, or that fails to lower, is left out.
    """
    space = kernel.schedule.space(kernel.workload, kernel.device.limits)
    point = space.point_from_config(kernel.config)
    for knob_index, (name, knob) in enumerate(space.knobs.items()):
        distances = compute_option_distances(knob, int(point[knob_index]))
        for option in _select_nearest_options(space, point, knob_index, distances):
            neighbor_point = point.copy()
            neighbor_point[knob_index] = option
            config = space.config_from_point(neighbor_point)
            try:
                neighbor_kernel = build_for_device(kernel.workload, kernel.schedule, kernel.device, config)
            except (CompileError, DeviceError):
                continue
            yield KnobNeighbor(name, config[name], neighbor_kernel)


def _select_nearest_options(space: Space, point: np.ndarray, knob_index: int, distances: np.ndarray) -> list[int]:
    """Return the legal options of a knob that are nearest to the point's option."""
    options = [option for option in np.argsort(distances, kind="stable").tolist() if option != point[knob_index]]
    points = np.repeat(point[None, :], len(options), axis=0)
    points[:, knob_index] = options
    legal_options = [option for option, is_legal in zip(options, space.is_legal(points), strict=True) if is_legal]
    return legal_options[:MAX_NEIGHBORS_PER_KNOB]
