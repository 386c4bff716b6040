"""Search by cost models: they learn from what was measured, and say what to measure next."""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from tvmconv.knobs.moves import Moves
from tvmconv.knobs.space import Space, distinct
from tvmconv.searching.tuners.base import Trial, Tuner, default_point, points_and_costs
from tvmconv.searching.tuners.draft import draft
from tvmconv.searching.tuners.gaussian import GaussianProcess, log_improvement
from tvmconv.searching.tuners.model import Ensemble, Group, Success
from tvmconv.searching.tuners.parts import Parts
from tvmconv.searching.tuners.rivals import Side, other_side
from tvmconv.searching.tuners.rows import Comparison, Rows

_FOUNDERS = 5  # successful configs, drafted or at random, before a model is asked
_MEMBERS = 4  # ensembles' members that take turns in choosing
_EXPLORATION = 0.05  # the share of configs proposed at random by trees, whatever they think
_MARGIN = 0.05  # a process of shares goes for configs that are faster by so much of the best one's speed
_RIVALS_AFTER = 48  # trials; before, what is tuned is worth more
_LAST = 1e4  # what makes the score of configs that are no rivals worse than that of any
_TURNS = 8  # of processes; the last one looks for a rival
_TRANSFERRED = 32  # another workload's trials count like at most so many of this one's

_SCORED_WHOLE = 8192  # spaces of up to so many legal points are scored in full, of listed ones as many; of larger ones:
_SAMPLE = 1024  # points drawn at random,
_PARENTS = 64  # and a few times the best of them, by each model, changed a little
_CHILDREN = 6
_GENERATIONS = 3

Scores = Callable[[np.ndarray], np.ndarray]  # from points (n, knobs) to what each model in its turn thinks: (models, n)

Guess = Callable[[np.ndarray], np.ndarray]  # from points (n, knobs) to how slow somebody else thinks them to be: (n,)

Criterion = Callable[[GaussianProcess, Rows], np.ndarray]  # what a process thinks of configs: (n,)


class XGBTuner(Tuner):
    """Proposes where Gaussian processes expect the largest improvement, each in its turn.

    Boosted trees tell what fails, and they choose as well once another workload's trials are known. Two proposals of a
    batch differ in at least two knobs.

    Attributes:
        parts: what it is made of.
    """

    batch = 4
    parts = Parts()

    def __init__(self, space: Space, seed: int = 0):
        super().__init__(space, seed)
        self._moves = Moves(space)
        self._others: list[Group] = []
        self._draft = draft(space)
        self._parameters: dict[str, np.ndarray] = {}  # of the last process of each target, to begin the next one with
        self._proposed = 0  # by models
        self._turns = itertools.cycle((False, True))  # whether the next proposal is near the best
        self._guess: Guess | None = None

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

    def guide(self, guess: Guess) -> None:
        """Take somebody's word for what is fast: as a draft while nothing is known, then as one more feature."""
        self._guess = guess

    @functools.cached_property
    def _comparison(self) -> Comparison:
        return Comparison(self.space, self.parts.twos, self.parts.numbers)

    def _drafted(self) -> Iterable[np.ndarray]:
        """What to measure before anything is known: what was guessed to be fast, or what the schedule estimates."""
        if not self._guess:
            return self._draft
        points = self.space.sample(_SAMPLE, self._rng)
        return self._diverse(points, -self._guess(points)[None]) if len(points) else []

    def _features(self, points: np.ndarray) -> np.ndarray:
        """What the models learn from: float32 (n, features)."""
        features, _ = self.space.features(points)
        if not self._guess:
            return features
        return np.column_stack([features, self._guess(points)]).astype(np.float32)

    def _choose(self, n: int, quick: bool) -> Iterable[np.ndarray]:
        is_unknown = self._succeeded() < _FOUNDERS and not any(group.succeeded.any() for group in self._others)
        if is_unknown or (quick and self._models_load_libraries()):
            return itertools.chain(default_point(self.space), self._drafted(), self._random)
        candidates, scores = self._candidates(self._models())
        return itertools.chain([] if self._learnt else default_point(self.space), self._diverse(candidates, scores))

    def _best_first(self, points: np.ndarray, quick: bool) -> np.ndarray:
        """By the mean of the places that the models give them, which go by what they expect."""
        if not len(points) or self._succeeded() < _FOUNDERS or (quick and self._models_load_libraries()):
            return super()._best_first(points, quick)
        places = (
            self._models(lambda process, rows: process.predict(rows)[0])(points)
            .argsort(axis=1, kind="stable")
            .argsort(axis=1)
        )
        return points[np.argsort(-places.mean(axis=0), kind="stable")]

    def _models_load_libraries(self) -> bool:
        """Return whether the models need a library that this process has not loaded, which takes seconds."""
        num_failed = len(self._learnt) - self._succeeded()
        has_trees = bool(num_failed or self._others or self.parts.trees or not self.parts.process)
        return "scipy.optimize" not in sys.modules or (has_trees and "xgboost" not in sys.modules)

    def _models(self, criterion: Criterion | None = None) -> Scores:
        """The models in turn, taught what was measured; processes go by the criterion, or by improvement and rivals."""
        groups = self._groups()
        success = Success(groups, self._rng)
        processes = list(self._processes()) if self._succeeded() >= _FOUNDERS else []
        with_trees = not processes or self.parts.trees or bool(self._others)
        trees = Ensemble(groups, _MEMBERS, self._rng) if with_trees else None
        side = None if criterion or with_trees else self._rivals()

        def scores(points: np.ndarray) -> np.ndarray:
            features = self._features(points)
            rows = self._comparison.rows(points, features)
            voices = [(criterion or log_improvement)(process, rows) for process in processes]
            if side:
                voices *= _TURNS // len(voices)
                rivals = log_improvement(processes[-1], rows, self._best_of(side, processes[-1]))
                voices[-1] = np.where(side.has(points), rivals, voices[-1] - _LAST)
            first = self._proposed % max(len(voices), 1)  # requests of one are to ask more than one
            voices = voices[first:] + voices[:first]
            if trees:
                voices = voices * (_MEMBERS // max(len(voices), 1)) + list(trees.scores(features))
            return np.stack(voices) + success.log_likelihood(features)

        return scores

    def _rivals(self) -> Side | None:
        """Where to look for a rival of the best config, if it is time."""
        if not self.parts.rivals or len(self._learnt) < _RIVALS_AFTER:
            return None
        return other_side(self.space, self._ranked()[0], self._proposed // _TURNS)

    def _best_of(self, side: Side, process: GaussianProcess) -> float:
        """What a process thinks of the best config that was measured on a side; of none, that it is average."""
        points = np.stack([point for point, cost in self._learnt.values() if math.isfinite(cost)])
        points = points[side.has(points)]
        if not len(points):
            return 0.0
        return float(process.predict(self._comparison.rows(points, self._features(points)))[0].max())

    def _processes(self) -> Iterator[GaussianProcess]:
        """One of ranks and one of shares, where the parts say so."""
        if not self.parts.process:
            return
        points = np.stack([point for point, _ in self._learnt.values()])
        own = self._group(self.space, list(self._learnt.values()))
        rows = self._comparison.rows(points[own.succeeded], own.features[own.succeeded])
        targets: dict[str, tuple[np.ndarray, float]] = {}
        if self.parts.ranks:
            targets["ranks"] = own.normal_scores(), 0.0
        if self.parts.shares:
            targets["shares"] = own.upper_shares(), _MARGIN
        for name, (values, margin) in targets.items():
            process = GaussianProcess(rows, values, self._parameters.get(name), margin)
            self._parameters[name] = process.parameters
            yield process

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
        rows = np.stack([column.get(name, missing) for name in wanted], axis=1)
        if self._guess:
            guessed = self._guess(np.stack(points)) if space is self.space else missing  # it is of this workload alone
            rows = np.column_stack([rows, guessed]).astype(np.float32)
        return Group(rows, np.array(costs), weight)

    def _candidates(self, models: Scores) -> tuple[np.ndarray, np.ndarray]:
        """Fresh legal points (n, knobs), the best config's neighbours among them, and their scores (models, n)."""
        listed = self.space.listed
        near = self._near() if self.parts.near else np.empty((0, len(self.space.knobs)), dtype=np.int32)
        if listed is not None and len(listed) <= _SCORED_WHOLE:
            points = listed[self._fresh(listed)]
            return points, models(points)
        if listed is not None:
            points = distinct(np.concatenate([near, self.space.sample(_SCORED_WHOLE, self._rng)]))
            points = points[self._fresh(points)]
            return points, models(points)
        sampled = self.space.sample(_SAMPLE, self._rng)
        points = distinct(np.concatenate([near, sampled, self._ranked()[:_PARENTS]]))
        scores = models(points)
        for _ in range(_GENERATIONS):
            best = np.unique(np.argsort(-scores, axis=1)[:, :_PARENTS])
            children = self._moves.mutate(np.repeat(points[best], _CHILDREN, axis=0), self._rng)
            grown = distinct(np.concatenate([points, children[self.space.legal(children)]]))
            born = grown[len(points) :]
            scores = np.concatenate([scores, models(born)], axis=1)
            points = grown
        fresh = self._fresh(points)
        return points[fresh], scores[:, fresh]

    def _near(self) -> np.ndarray:
        """The neighbours of the best config, (n, knobs); of many, as many at random as are sampled of all."""
        if not self._succeeded():
            return np.empty((0, len(self.space.knobs)), dtype=np.int32)
        near = self.space.neighbours(self._ranked()[0])
        return near if len(near) <= _SAMPLE else near[self._rng.permutation(len(near))[:_SAMPLE]]

    def _diverse(self, candidates: np.ndarray, scores: np.ndarray) -> Iterator[np.ndarray]:
        """The best candidate of each model in its turn, every second one of the best config's neighbours.

        As long as there are others, no near copies, but for these neighbours.
        """
        taken, copies, beside = np.zeros((3, len(candidates)), dtype=bool)
        if self.parts.near and self._succeeded():
            beside = np.count_nonzero(candidates != self._ranked()[0], axis=1) == 1
        for order in itertools.cycle(np.argsort(-scores, axis=1, kind="stable")):
            if not self.parts.process and self._rng.random() < _EXPLORATION:
                yield from itertools.islice(self._random, 1)
            left = order[(beside & ~taken)[order]] if next(self._turns) else order[:0]
            if not len(left):
                left = order[~copies[order]]
            if not len(left):
                left = order[~taken[order]]
            if not len(left):
                return
            taken[left[0]] = True
            copies |= np.count_nonzero(candidates != candidates[left[0]], axis=1) < 2
            self._proposed += 1
            yield candidates[left[0]]
