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

from tvmconv.knobs import Config
from tvmconv.knobs.space import Space, distinct
from tvmconv.knowledge.likeness import distance
from tvmconv.knowledge.model import Expert, Knowledge
from tvmconv.workloads import Conv

NEAREST = 16  # examples that are candidates: up to two of a workload, so of about eight
BESIDE = 4  # legal neighbours in place of a candidate that is not legal here
LEAD = 1.07  # how many times as fast as a default a config has to promise to be
CAUTION = 0.5  # standard deviations of the members that are added to what they expect


@dataclass(frozen=True)
class Prediction:
    """A config, and how fast it is thought to be.

    Attributes:
        schedule: whose config.
        config: a value for each knob.
        seconds: a launch, as the model expects it.
        doubt: standard deviation of its members, in powers of two.
    """

    schedule: str
    config: Config
    seconds: float
    doubt: float

    @property
    def careful_seconds(self) -> float:
        """What they are compared by."""
        return self.seconds * 2.0 ** (CAUTION * self.doubt)


def predict(w: Conv, spaces: Mapping[str, Space], knowledge: Knowledge, count: int = 1) -> list[Prediction]:
    """The configs that promise most, of all schedules that the model knows, the best first.

    Args:
        w: the workload.
        spaces: of its schedules, by name.
        knowledge: what was learnt.
        count: how many at most, of each schedule.
    """
    found = []
    for name, space in spaces.items():
        expert = knowledge.expert(w, name, space)
        if expert:
            found += _of_schedule(w, space, knowledge, expert, count)
    return sorted(found, key=lambda each: each.careful_seconds)


def _of_schedule(w: Conv, space: Space, knowledge: Knowledge, expert: Expert, count: int) -> list[Prediction]:
    """The most promising configs of one schedule."""
    points = candidates(w, space, knowledge, expert)
    found = _expected(w, space, knowledge, expert, points) if len(points) else []
    return sorted(found, key=lambda each: each.careful_seconds)[:count]


def _expected(w: Conv, space: Space, knowledge: Knowledge, expert: Expert, points: np.ndarray) -> list[Prediction]:
    """What the model expects of points (n, knobs)."""
    slowness = expert.slowness(w, space, points, knowledge.machine)
    seconds = knowledge.machine.least_seconds(w) * 2.0 ** slowness.mean(axis=0)
    told = zip(points, seconds, slowness.std(axis=0), strict=True)
    return [Prediction(expert.schedule, space.config(point), float(time), float(doubt)) for point, time, doubt in told]


def default_unless_slower(
    found: list[Prediction], w: Conv, schedule: str, space: Space, knowledge: Knowledge
) -> list[Prediction]:
    """Predictions, before them the default of the schedule that is tried first, where the best promises little more.

    Such a default is the best of many configs by the schedule's own estimate. Where there is none, and the default is
    one that a search leaves out, the predictions stay as they are.

    Args:
        found: the best first.
        w: the workload.
        schedule: the one that is tried first.
        space: of that schedule.
        knowledge: what was learnt.
    """
    expert, point = knowledge.expert(w, schedule, space), space.point(space.default)
    if not found or not expert or not space.legal(point[None])[0]:
        return found
    (default,) = _expected(w, space, knowledge, expert, point[None])
    if found[0].seconds * LEAD <= default.seconds:
        return found
    others = (each for each in found if (each.schedule, each.config) != (default.schedule, default.config))
    return [default, *others]


def candidates(w: Conv, space: Space, knowledge: Knowledge, expert: Expert) -> np.ndarray:
    """Legal points to begin with: (n, knobs)."""
    others = (knowledge.workload(example.workload) for example in expert.examples)
    far = [distance(w, other, any_rank=True) for other in others]
    near = [expert.examples[i].config for i in np.argsort(far, kind="stable")[:NEAREST] if np.isfinite(far[i])]
    configs = [space.default, *near, *expert.portfolio]
    points = distinct(np.stack([space.nearest(config) for config in configs]))
    legal = space.legal(points)
    beside = [space.neighbours(point)[:BESIDE] for point in points[~legal]]
    return distinct(np.concatenate([points[legal], *beside]))
