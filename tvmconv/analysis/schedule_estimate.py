"""Time of a kernel by its schedule's own estimate, a formula over the tile sizes that some schedules provide."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvmconv.errors import KnobError

if TYPE_CHECKING:
    from tvmconv.kernel import Kernel


def estimate_schedule_seconds(kernel: Kernel) -> float | None:
    """Return the estimated seconds of a kernel on the GPU that the formula was fitted to.

    Args:
        kernel: A built kernel.

    Returns:
        The seconds; None if the schedule has no estimate, or if it does not cover the kernel's config.
    """
    space = kernel.schedule.space(kernel.workload, kernel.device.limits)
    try:
        usage = space.compute_usage(space.point_from_config(kernel.config)[None])
    except KnobError:  # the config has a value outside the search space
        return None
    if usage is None or usage.estimate is None or usage.estimate_seconds_per_unit is None:
        return None
    return float(usage.estimate[0]) * usage.estimate_seconds_per_unit
