"""Which schedule and config to build where no log says: what the model predicts, for devices that it knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, cast

from tvmconv import registry
from tvmconv.cost_model.model import cost_model_for
from tvmconv.cost_model.predict import Prediction, predict, prefer_default_if_close
from tvmconv.workloads import Conv, Workload

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tvmconv.devices import Device
    from tvmconv.space.search_space import Space

MAX_CONFIGS_PER_SCHEDULE = 4  # configs of each schedule that may be built, should the first of them not compile


def recommend_configs(
    workload: Workload,
    device: Device,
    max_configs: int = MAX_CONFIGS_PER_SCHEDULE,
    spaces: Mapping[str, Space] | None = None,
) -> list[Prediction]:
    """The configs that promise most for a workload on a device, the best first; none where nothing is known.

    Without `spaces` the model chooses the schedule, too: not where it knows nothing of the one that is tried first, and
    that one's default comes before all that promise hardly more.

    Args:
        workload: the workload.
        device: where.
        max_configs: how many of each schedule at most.
        spaces: of the schedules that count, by name; by default of all that run there.
    """
    cost_model = cost_model_for(device.arch)
    if not cost_model or not isinstance(workload, Conv):
        return []
    if spaces is not None:
        return predict(workload, spaces, cost_model, max_configs)
    first_schedule, *other_schedules = registry.schedules_to_tune(workload, device.kind, device.arch)
    if first_schedule.name not in cost_model.schedule_models:
        return []
    schedules = [first_schedule, *other_schedules, *registry.low_priority_schedules(workload, device.kind, device.arch)]
    spaces = {
        schedule.name: schedule.space(workload, device.limits)
        for schedule in schedules
        if schedule.name in cost_model.schedule_models
    }
    return prefer_default_if_close(
        predict(workload, spaces, cost_model, max_configs),
        workload,
        first_schedule.name,
        spaces[first_schedule.name],
        cost_model,
    )


def make_prior(
    workload: Workload, schedule_name: str, space: Space, device: Device
) -> Callable[[NDArray[np.int32]], NDArray[np.float32]] | None:
    """How slow the model thinks configs (n, knobs) of a schedule to be: (n,), base-2 logarithms; None for no idea.

    Args:
        workload: the workload.
        schedule_name: its name.
        space: of the schedule.
        device: where.
    """
    cost_model = cost_model_for(device.arch)
    schedule_model = (
        cost_model.find_schedule_model(workload, schedule_name, space)
        if cost_model and isinstance(workload, Conv)
        else None
    )
    if not cost_model or not schedule_model:
        return None
    device_spec, convolution, predictor = cost_model.device_spec, cast("Conv", workload), schedule_model
    return lambda points: predictor.log2_slowdown(convolution, space, points, device_spec).mean(axis=0)
