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
    machine = knowledge.machine
    points = candidates(w, space, knowledge, expert)
    if not len(points):
        return []
    slowness = expert.slowness(w, space, points, machine)
    mean, doubt = slowness.mean(axis=0), slowness.std(axis=0)
    best = np.argsort(mean + CAUTION * doubt, kind="stable")[:count]
    least = machine.least_seconds(w)
    return [
        Prediction(expert.schedule, space.config(points[i]), float(least * 2.0 ** mean[i]), float(doubt[i]))
        for i in best
    ]


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
