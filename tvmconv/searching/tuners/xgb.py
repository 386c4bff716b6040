"""Search by a cost model: boosted trees learn from what was measured, and say what to measure next."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import numpy as np

from tvmconv.knobs.moves import Moves
from tvmconv.knobs.space import Space, distinct
from tvmconv.searching.tuners.base import Trial, Tuner, default_point, points_and_costs
from tvmconv.searching.tuners.draft import draft
from tvmconv.searching.tuners.model import Ensemble, Group

_FOUNDERS = 10  # successful configs, drafted or at random, before the model is asked
_MEMBERS = 4  # models that take turns in choosing
_EXPLORATION = 0.05  # the share of configs proposed at random, whatever the models think
_TRANSFERRED = 32  # another workload's trials count like at most so many of this one's

_SCORED_WHOLE = 20_000  # spaces of up to so many legal points are scored in full; of larger ones:
_SAMPLE = 1024  # points drawn at random,
_PARENTS = 64  # and a few times the best of them, by each model, changed a little
_CHILDREN = 6
_GENERATIONS = 3


class XGBTuner(Tuner):
    """Proposes what an ensemble of boosted trees believes to be fast, each member in its turn.

    Two proposals of a batch differ in at least two knobs, but for a few at random.
    """

    batch = 4

    def __init__(self, space: Space, seed: int = 0):
        super().__init__(space, seed)
        self._moves = Moves(space)
        self._others: list[Group] = []
        self._draft = draft(space)

    def transfer(self, space: Space, trials: Iterable[Trial]) -> None:
        """Learn from another workload: what is fast there, compared with the rest there, may be fast here.

        Args:
            space: the same schedule's for the other workload.
            trials: what was measured there.
        """
        known = list(points_and_costs(space, trials))
        if known:
            weight = min(1.0, _TRANSFERRED / len(known))
            self._others.append(self._group(space, known, weight))

    def _choose(self, n: int) -> Iterable[np.ndarray]:
        if self._succeeded() < _FOUNDERS and not any(group.succeeded.any() for group in self._others):
            return itertools.chain(default_point(self.space), self._draft, self._random)
        ensemble = Ensemble(self._groups(), _MEMBERS, self._rng)
        candidates, scores = self._candidates(ensemble)
        return itertools.chain([] if self._learnt else default_point(self.space), self._diverse(candidates, scores))

    def _best_first(self, points: np.ndarray) -> np.ndarray:
        """By the mean of what the members think."""
        if not len(points) or self._succeeded() < _FOUNDERS:
            return super()._best_first(points)
        scores = Ensemble(self._groups(), _MEMBERS, self._rng).scores(self.space.features(points)[0])
        return points[np.argsort(-scores.mean(axis=0), kind="stable")]

    def _groups(self) -> list[Group]:
        own = [self._group(self.space, list(self._learnt.values()))] if self._learnt else []
        return own + self._others

    def _group(self, space: Space, known: list[tuple[np.ndarray, float]], weight: float = 1.0) -> Group:
        """Trials as the model learns them, with the features of this tuner's space."""
        points, costs = zip(*known, strict=True)
        features, names = space.features(np.stack(points))
        column = dict(zip(names, features.T, strict=True))
        missing = np.full(len(points), np.nan, dtype=np.float32)
        _, wanted = self.space.features(np.empty((0, len(self.space.knobs)), dtype=np.int32))
        return Group(np.stack([column.get(name, missing) for name in wanted], axis=1), np.array(costs), weight)

    def _candidates(self, ensemble: Ensemble) -> tuple[np.ndarray, np.ndarray]:
        """Fresh legal points (n, knobs), and their scores (members, n)."""
        listed = self.space.listed
        if listed is not None and len(listed) <= _SCORED_WHOLE:
            points = listed[self._fresh(listed)]
            return points, ensemble.scores(self.space.features(points)[0])
        points = distinct(np.concatenate([self.space.sample(_SAMPLE, self._rng), self._ranked()[:_PARENTS]]))
        scores = ensemble.scores(self.space.features(points)[0])
        for _ in range(_GENERATIONS):
            best = np.unique(np.argsort(-scores, axis=1)[:, :_PARENTS])
            children = self._moves.mutate(np.repeat(points[best], _CHILDREN, axis=0), self._rng)
            grown = distinct(np.concatenate([points, children[self.space.legal(children)]]))
            born = grown[len(points) :]
            scores = np.concatenate([scores, ensemble.scores(self.space.features(born)[0])], axis=1)
            points = grown
        fresh = self._fresh(points)
        return points[fresh], scores[:, fresh]

    def _diverse(self, candidates: np.ndarray, scores: np.ndarray) -> Iterator[np.ndarray]:
        """The best candidate of each member in its turn; as long as there are others, no near copies."""
        taken, near = np.zeros((2, len(candidates)), dtype=bool)
        for order in itertools.cycle(np.argsort(-scores, axis=1, kind="stable")):
            if self._rng.random() < _EXPLORATION:
                yield from itertools.islice(self._random, 1)
            left = order[~near[order]]
            if not len(left):
                left = order[~taken[order]]
            if not len(left):
                return
            taken[left[0]] = True
            near |= np.count_nonzero(candidates != candidates[left[0]], axis=1) < 2
            yield candidates[left[0]]
