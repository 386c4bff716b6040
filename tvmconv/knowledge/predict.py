"""Configs that promise most for a workload that nobody measured.

Candidates are what was fast on the workloads most like this one, configs that serve many, the schedule's default, and
what lies around the best of these; the model says which is the fastest. It is asked carefully: where its members
disagree it knows little, and what it hopes for there is not to be trusted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tvmconv.knobs import Config
from tvmconv.knobs.moves import Moves
from tvmconv.knobs.space import Space, distinct
from tvmconv.knowledge.likeness import distance
from tvmconv.knowledge.model import Expert, Knowledge
from tvmconv.workloads import Conv

NEAREST = 16  # workloads whose fastest configs are candidates
ROUNDS, PARENTS, CHILDREN = 3, 8, 24  # of the search around the best candidates: each of the best is changed so often
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


def predict(
    w: Conv, spaces: Mapping[str, Space], knowledge: Knowledge, count: int = 1, *, leave: Sequence[str] = ()
) -> list[Prediction]:
    """The configs that promise most, of all schedules that the model knows, the best first.

    Args:
        w: the workload.
        spaces: of its schedules, by name.
        knowledge: what was learnt.
        count: how many at most, of each schedule.
        leave: texts of workloads whose measurements are not to be used as examples.
    """
    found = []
    for name, space in spaces.items():
        expert = knowledge.expert(w, name, space)
        if expert:
            found += _of_schedule(w, space, knowledge, expert, count, frozenset(leave))
    return sorted(found, key=lambda each: each.careful_seconds)


def _of_schedule(
    w: Conv, space: Space, knowledge: Knowledge, expert: Expert, count: int, leave: frozenset[str]
) -> list[Prediction]:
    """The most promising configs of one schedule."""
    machine = knowledge.machine
    points = candidates(w, space, knowledge, expert, leave)
    if not len(points):
        return []
    rng, moves = np.random.default_rng(0), Moves(space)
    slowness = expert.slowness(w, space, points, machine)
    for _ in range(ROUNDS):
        parents = points[np.argsort(_careful(slowness), kind="stable")[:PARENTS]]
        children = moves.mutate(np.repeat(parents, CHILDREN, axis=0), rng)
        twice = moves.mutate(children[::2], rng)
        fresh = distinct(np.concatenate([points, children, twice]))[len(points) :]
        fresh = fresh[space.legal(fresh)]
        if len(fresh):
            points = np.concatenate([points, fresh])
            slowness = np.concatenate([slowness, expert.slowness(w, space, fresh, machine)], axis=1)
    best = np.argsort(_careful(slowness), kind="stable")[:count]
    least = machine.least_seconds(w)
    mean, doubt = slowness.mean(axis=0), slowness.std(axis=0)
    return [
        Prediction(expert.schedule, space.config(points[i]), float(least * 2.0 ** mean[i]), float(doubt[i]))
        for i in best
    ]


def candidates(
    w: Conv, space: Space, knowledge: Knowledge, expert: Expert, leave: frozenset[str] = frozenset()
) -> np.ndarray:
    """Legal points to begin with: (n, knobs)."""
    others = [example for example in expert.examples if example.workload not in leave]
    far = [distance(w, knowledge.workload(example.workload)) for example in others]
    near = [others[i].config for i in np.argsort(far, kind="stable")[:NEAREST] if np.isfinite(far[i])]
    configs = [space.default, *near, *expert.portfolio]
    points = distinct(np.stack([space.nearest(config) for config in configs]))
    legal = space.legal(points)
    beside = [space.neighbours(point)[:4] for point in points[~legal][:PARENTS]]
    return distinct(np.concatenate([points[legal], *beside]))


def _careful(slowness: np.ndarray) -> np.ndarray:
    return slowness.mean(axis=0) + CAUTION * slowness.std(axis=0)
