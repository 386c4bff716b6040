"""Configs that promise most for a workload that nobody measured.

Candidates are what was fast on the workloads most like this one, configs that serve many, and the schedule's default;
the model says which of them is the fastest here. It is not asked what else there might be: of 41 layers of a network
that it had not seen, what it took to be best among all that lies around these candidates was 7 % slower on 20, as the
largest of many guesses is mostly a mistake. It is asked carefully, too: where its members disagree it knows little.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tvmconv.cost_model.model import CostModel, ScheduleModel
from tvmconv.cost_model.similarity import workload_distance
from tvmconv.space import Config
from tvmconv.space.search_space import Space, remove_duplicate_points
from tvmconv.workloads import Conv

NUM_NEAREST_EXAMPLES = 16  # examples that are candidates: up to two of a workload, so of about eight
MAX_NEIGHBORS = 4  # legal neighbours in place of a candidate that is not legal here
MIN_SPEEDUP_OVER_DEFAULT = 1.07  # how many times as fast as a default a config has to promise to be
UCB_FACTOR = 0.5  # standard deviations of the members that are added to what they expect


@dataclass(frozen=True)
class Prediction:
    """A config, and how fast it is thought to be.

    Attributes:
        schedule: whose config.
        config: a value for each knob.
        seconds: a launch, as the model expects it.
        log2_std: standard deviation of its members, in powers of two.
    """

    schedule: str
    config: Config
    seconds: float
    log2_std: float

    @property
    def upper_bound_seconds(self) -> float:
        """What they are compared by."""
        return self.seconds * 2.0 ** (UCB_FACTOR * self.log2_std)


def predict(
    workload: Conv, spaces: Mapping[str, Space], cost_model: CostModel, max_configs: int = 1
) -> list[Prediction]:
    """The configs that promise most, of all schedules that the model knows, the best first.

    Args:
        workload: the workload.
        spaces: of its schedules, by name.
        cost_model: what was learnt.
        max_configs: how many at most, of each schedule.
    """
    predictions = []
    for name, space in spaces.items():
        schedule_model = cost_model.find_schedule_model(workload, name, space)
        if schedule_model:
            predictions += _predict_schedule(workload, space, cost_model, schedule_model, max_configs)
    return sorted(predictions, key=lambda prediction: prediction.upper_bound_seconds)


def _predict_schedule(
    workload: Conv, space: Space, cost_model: CostModel, schedule_model: ScheduleModel, max_configs: int
) -> list[Prediction]:
    """The most promising configs of one schedule."""
    points = candidate_points(workload, space, cost_model, schedule_model)
    predictions = _predict_points(workload, space, cost_model, schedule_model, points) if len(points) else []
    return sorted(predictions, key=lambda prediction: prediction.upper_bound_seconds)[:max_configs]


def _predict_points(
    workload: Conv, space: Space, cost_model: CostModel, schedule_model: ScheduleModel, points: np.ndarray
) -> list[Prediction]:
    """What the model expects of points (n, knobs)."""
    log2_slowdowns = schedule_model.log2_slowdown(workload, space, points, cost_model.device_spec)
    seconds = cost_model.device_spec.roofline_seconds(workload) * 2.0 ** log2_slowdowns.mean(axis=0)
    estimates = zip(points, seconds, log2_slowdowns.std(axis=0), strict=True)
    return [
        Prediction(schedule_model.schedule, space.config_from_point(point), float(expected_seconds), float(log2_std))
        for point, expected_seconds, log2_std in estimates
    ]


def prefer_default_if_close(
    predictions: list[Prediction], workload: Conv, schedule: str, space: Space, cost_model: CostModel
) -> list[Prediction]:
    """Predictions, before them the default of the schedule that is tried first, where the best promises little more.

    Such a default is the best of many configs by the schedule's own estimate. Where there is none, and the default is
    one that a search leaves out, the predictions stay as they are.

    Args:
        predictions: the best first.
        workload: the workload.
        schedule: the one that is tried first.
        space: of that schedule.
        cost_model: what was learnt.
    """
    schedule_model, point = (
        cost_model.find_schedule_model(workload, schedule, space),
        space.point_from_config(space.default),
    )
    if not predictions or not schedule_model or not space.is_legal(point[None])[0]:
        return predictions
    (default,) = _predict_points(workload, space, cost_model, schedule_model, point[None])
    if predictions[0].seconds * MIN_SPEEDUP_OVER_DEFAULT <= default.seconds:
        return predictions
    other_predictions = (
        prediction
        for prediction in predictions
        if (prediction.schedule, prediction.config) != (default.schedule, default.config)
    )
    return [default, *other_predictions]


def candidate_points(workload: Conv, space: Space, cost_model: CostModel, schedule_model: ScheduleModel) -> np.ndarray:
    """Legal points to begin with: (n, knobs)."""
    example_workloads = (cost_model.parse_workload(example.workload) for example in schedule_model.examples)
    distances = [
        workload_distance(workload, example_workload, any_spatial_ndim=True) for example_workload in example_workloads
    ]
    nearest_configs = [
        schedule_model.examples[example_index].config
        for example_index in np.argsort(distances, kind="stable")[:NUM_NEAREST_EXAMPLES]
        if np.isfinite(distances[example_index])
    ]
    configs = [space.default, *nearest_configs, *schedule_model.portfolio]
    points = remove_duplicate_points(np.stack([space.project(config) for config in configs]))
    is_legal = space.is_legal(points)
    neighbors = [space.list_neighbors(point)[:MAX_NEIGHBORS] for point in points[~is_legal]]
    return remove_duplicate_points(np.concatenate([points[is_legal], *neighbors]))
