"""Recommendation of a schedule and a config without logs, by the cost model of the device's architecture."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tvmconv import registry
from tvmconv.cost_model.equivalent import SCHEDULES_IN_BYTES, make_16_bit_equivalent
from tvmconv.cost_model.model import cost_model_for
from tvmconv.cost_model.predict import (
    MIN_SPEEDUP_OVER_DEFAULT,
    Prediction,
    predict,
    predict_log2_slowdowns,
    prefer_default_if_close,
)
from tvmconv.workloads import Workload
from tvmconv.workloads.conv_operator import ConvOperator

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tvmconv.devices import Device
    from tvmconv.registry import Schedule
    from tvmconv.space.search_space import Space

MAX_CONFIGS_PER_SCHEDULE = 4  # number of configs of each schedule, in case that the first ones do not compile


def recommend_configs(
    workload: Workload,
    device: Device,
    max_configs: int = MAX_CONFIGS_PER_SCHEDULE,
    spaces: Mapping[str, Space] | None = None,
) -> list[Prediction]:
    """Return the predictions of the best configs for a workload on a device, the best first. Without `spaces`, the cost
    model also chooses the schedule, but only if it covers the first schedule to tune. The default config of this
    schedule comes first, unless the best prediction is clearly faster. There are none if the cost model does not cover
    the device or the workload. Of operands of 8 bits, it predicts the equivalent convolution of 16 bits.
    """
    cost_model = cost_model_for(device.arch)
    if not cost_model or not isinstance(workload, ConvOperator):
        return []
    if equivalent := make_16_bit_equivalent(workload):
        return _recommend_by_equivalent(workload, equivalent, device, max_configs, spaces)
    if spaces is not None:
        return predict(workload, spaces, cost_model, max_configs)
    first_schedule, *other_schedules = registry.schedules_to_tune(workload, device.kind, device.arch)
    first_model = cost_model.schedule_models.get(first_schedule.name)
    if first_model is None or first_model.view(workload) is None:
        return []
    schedules = [first_schedule, *other_schedules, *registry.low_priority_schedules(workload, device.kind, device.arch)]
    spaces = {
        schedule.name: schedule.space(workload, device.limits)
        for schedule in schedules
        if schedule.name in cost_model.schedule_models
    }
    predictions = prefer_default_if_close(
        predict(workload, spaces, cost_model, max_configs),
        workload,
        first_schedule.name,
        spaces[first_schedule.name],
        cost_model,
    )
    others = [schedule for schedule in other_schedules if schedule.name not in cost_model.schedule_models]
    return _add_estimates(predictions, workload, others, device)


def _recommend_by_equivalent(
    workload: Workload, equivalent: Workload, device: Device, max_configs: int, spaces: Mapping[str, Space] | None
) -> list[Prediction]:
    """Return the predictions for a 16-bit convolution whose configs are legal for its equivalent in 8 bits."""
    names = [schedule.name for schedule in registry.schedules_to_tune(workload, device.kind, device.arch)]
    predictions = list[Prediction]()
    for name in SCHEDULES_IN_BYTES:
        if name not in (names if spaces is None else spaces):
            continue
        space = spaces[name] if spaces else registry.find_schedule(workload, name).space(workload, device.limits)
        equivalent_space = registry.find_schedule(equivalent, name).space(equivalent, device.limits)
        for each in recommend_configs(equivalent, device, 2 * max_configs, {name: equivalent_space}):
            point = space.project(each.config)
            config = space.config_from_point(point)
            is_new = all((name, config) != (other.schedule, other.config) for other in predictions)
            if is_new and space.is_legal(point[None])[0]:
                predictions.append(replace(each, config=config))
    return predictions[:max_configs]


def _add_estimates(
    predictions: list[Prediction], workload: Workload, schedules: Sequence[Schedule], device: Device
) -> list[Prediction]:
    """Add the default configs of schedules that the cost model does not cover, by their estimates in seconds: before
    the predictions if an estimate is clearly shorter than the first of them, and otherwise behind them.
    """
    estimates = []
    for schedule in schedules:
        space = schedule.space(workload, device.limits)
        usage = space.compute_usage(space.point_from_config(space.default)[None])
        if usage and usage.estimate is not None and usage.estimate_seconds_per_unit:
            seconds = float(usage.estimate[0]) * usage.estimate_seconds_per_unit
            estimates.append(Prediction(schedule.name, space.default, seconds, 0.0))
    limit = predictions[0].seconds / MIN_SPEEDUP_OVER_DEFAULT if predictions else math.inf
    shorter = sorted((each for each in estimates if each.seconds < limit), key=lambda each: each.seconds)
    return [*shorter, *predictions, *(each for each in estimates if each not in shorter)]


def make_prior(
    workload: Workload, schedule_name: str, space: Space, device: Device
) -> Callable[[NDArray[np.int32]], NDArray[np.float32]] | None:
    """Return a function that predicts the costs of configs of a schedule, as a prior for the tuner. It maps points (n,
    knobs) to the base-2 logarithms of predicted slowdowns, float32 (n,). It is None if the cost model does not cover
    the schedule.
    """
    cost_model = cost_model_for(device.arch)
    if not cost_model or not isinstance(workload, ConvOperator):
        return None
    schedule_model = cost_model.find_schedule_model(workload, schedule_name, space)
    if not schedule_model:
        return None
    convolution = workload

    def predict_mean(points: NDArray[np.int32]) -> NDArray[np.float32]:
        slowdowns = predict_log2_slowdowns(convolution, space, cost_model, schedule_model, points)
        return slowdowns.mean(axis=0).astype("float32")

    return predict_mean
