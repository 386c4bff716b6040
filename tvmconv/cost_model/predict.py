"""Prediction of the fastest configs for a workload without measurements.

The candidates are configs that were fast on the most similar workloads, configs that are fast on many workloads, and
the schedule's default. The cost model ranks them by an upper confidence bound of their time, because members that
disagree have little data. It does not search beyond the candidates, as the best of many predictions is mostly an error:
on 20 of 41 layers of an unseen network, the best predicted neighbours of the candidates were 7 % slower.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tvmconv.cost_model.conversions import estimate_conversion_seconds
from tvmconv.cost_model.model import CostModel, ScheduleModel
from tvmconv.cost_model.similarity import workload_distance
from tvmconv.space import Config
from tvmconv.space.search_space import Space, remove_duplicate_points
from tvmconv.workloads.conv_operator import ConvOperator

NUM_NEAREST_EXAMPLES = 16  # number of examples that are candidates, up to two for each workload
MAX_NEIGHBORS = 4  # number of legal neighbours that replace an illegal candidate
MIN_SPEEDUP_OVER_DEFAULT = 1.07  # predicted speed-up over the default config below which the default is preferred
# Knobs that choose how channels-first pixels are loaded. The examples are channels last; each is a candidate with all
# options, whose costs `layout_seconds` has.
LAYOUT_KNOBS = "input_loader", "producer_warpgroups"
UCB_FACTOR = 0.5  # number of standard deviations of the members in the upper confidence bound


@dataclass(frozen=True)
class Prediction:
    """A config and its predicted time."""

    schedule: str
    config: Config  # value of each knob
    seconds: float  # predicted seconds per launch
    log2_std: float  # standard deviation of the members' predictions, of the base-2 logarithm of the time

    @property
    def upper_bound_seconds(self) -> float:
        """Upper confidence bound of the time in seconds, by which predictions are compared."""
        return self.seconds * 2.0 ** (UCB_FACTOR * self.log2_std)


def predict(
    workload: ConvOperator, spaces: Mapping[str, Space], cost_model: CostModel, max_configs: int = 1
) -> list[Prediction]:
    """Return the predictions of the best configs of all schedules that the cost model covers, the best first."""
    predictions = []
    for name, space in spaces.items():
        schedule_model = cost_model.find_schedule_model(workload, name, space)
        if schedule_model:
            points = candidate_points(workload, space, cost_model, schedule_model)
            candidates = _predict_points(workload, space, cost_model, schedule_model, points) if len(points) else []
            predictions += sorted(candidates, key=lambda candidate: candidate.upper_bound_seconds)[:max_configs]
    return sorted(predictions, key=lambda prediction: prediction.upper_bound_seconds)


def predict_log2_slowdowns(
    workload: ConvOperator, space: Space, cost_model: CostModel, schedule_model: ScheduleModel, points: np.ndarray
) -> np.ndarray:
    """Return base-2 logarithms of times relative to the roofline that each member predicts for points (n, knobs).

    The array is (members, n). Channels-first workloads are predicted as if they were channels last; what their layout
    costs is added.
    """
    viewed_workload, target = schedule_model.view(workload) or workload, cost_model.device_spec
    log2_slowdowns = schedule_model.log2_slowdown(viewed_workload, space, points, target)
    if viewed_workload is workload:
        return log2_slowdowns
    roofline, usage = target.roofline_seconds(workload), space.compute_usage(points)
    seconds = target.roofline_seconds(viewed_workload) * 2.0**log2_slowdowns
    if usage and usage.layout_seconds is not None:
        return np.log2(np.maximum(seconds + usage.layout_seconds, roofline) / roofline)
    return np.log2((seconds + estimate_conversion_seconds(workload, target)) / roofline)


def _predict_points(
    workload: ConvOperator, space: Space, cost_model: CostModel, schedule_model: ScheduleModel, points: np.ndarray
) -> list[Prediction]:
    """Return the predictions for points (n, knobs)."""
    log2_slowdowns = predict_log2_slowdowns(workload, space, cost_model, schedule_model, points)
    seconds = cost_model.device_spec.roofline_seconds(workload) * 2.0 ** log2_slowdowns.mean(axis=0)
    estimates = zip(points, seconds, log2_slowdowns.std(axis=0), strict=True)
    return [
        Prediction(schedule_model.schedule, space.config_from_point(point), float(expected_seconds), float(log2_std))
        for point, expected_seconds, log2_std in estimates
    ]


def prefer_default_if_close(
    predictions: list[Prediction], workload: ConvOperator, schedule: str, space: Space, cost_model: CostModel
) -> list[Prediction]:
    """Put the default config of the first schedule before the predictions, unless the best one is clearly faster. The
    default is the best of many configs by the schedule's own estimate. If it is not legal, the predictions do not
    change.
    """
    schedule_model = cost_model.find_schedule_model(workload, schedule, space)
    point = space.point_from_config(space.default)
    if not predictions or not schedule_model or not space.is_legal(point[None])[0]:
        return predictions
    (default,) = _predict_points(workload, space, cost_model, schedule_model, point[None])
    if predictions[0].seconds * MIN_SPEEDUP_OVER_DEFAULT <= default.seconds:
        return predictions
    default_key = default.schedule, default.config
    return [default, *(each for each in predictions if (each.schedule, each.config) != default_key)]


def candidate_points(
    workload: ConvOperator, space: Space, cost_model: CostModel, schedule_model: ScheduleModel
) -> np.ndarray:
    """Return the legal points (n, knobs) of the candidates."""
    examples, workload = schedule_model.examples, schedule_model.view(workload) or workload
    example_workloads = (cost_model.parse_workload(example.workload) for example in examples)
    distances = [workload_distance(workload, other, any_spatial_ndim=True) for other in example_workloads]
    nearest = np.argsort(distances, kind="stable")[:NUM_NEAREST_EXAMPLES]
    nearest_configs = [examples[index].config for index in nearest if np.isfinite(distances[index])]
    configs = [space.default, *nearest_configs, *schedule_model.portfolio]
    points = np.stack([space.project(config) for config in configs])
    points = _combine_with_options(space, points, LAYOUT_KNOBS)
    is_legal = space.is_legal(points)
    neighbors = [each[:MAX_NEIGHBORS] for each in space.list_neighbors_of_each(points[~is_legal])]
    return remove_duplicate_points(np.concatenate([points[is_legal], *neighbors]))


def _combine_with_options(space: Space, points: np.ndarray, knobs: Sequence[str]) -> np.ndarray:
    """Return distinct points (n, knobs) with all options of those of some knobs that the space has."""
    for index, name in enumerate(space.knobs):
        if name in knobs:
            variants = np.repeat(points[:, None], space.sizes[index], axis=1)
            variants[:, :, index] = np.arange(space.sizes[index])
            points = variants.reshape(-1, len(space.knobs))
    return remove_duplicate_points(points)
