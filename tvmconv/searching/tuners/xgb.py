"""Search by cost models: they learn from what was measured, and say what to measure next."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from tvmconv.knobs.moves import Moves
from tvmconv.knobs.space import Space, distinct
from tvmconv.searching.tuners.base import Trial, Tuner, default_point, points_and_costs
from tvmconv.searching.tuners.draft import draft
from tvmconv.searching.tuners.gaussian import GaussianProcess, log_improvement
from tvmconv.searching.tuners.model import Ensemble, Group, Success
from tvmconv.searching.tuners.rows import Comparison, Rows

_FOUNDERS = 5  # successful configs, drafted or at random, before a model is asked
_MEMBERS = 4  # ensembles' members that take turns in choosing
_EXPLORATION = 0.05  # the share of configs proposed at random by trees, whatever they think
_MARGIN = 0.05  # a process of shares goes for configs that are faster by so much of the best one's speed
_TRANSFERRED = 32  # another workload's trials count like at most so many of this one's

_SCORED_WHOLE = 8192  # spaces of up to so many legal points are scored in full, of listed ones as many; of larger ones:
_SAMPLE = 1024  # points drawn at random,
_PARENTS = 64  # and a few times the best of them, by each model, changed a little
_CHILDREN = 6
_GENERATIONS = 3

Scores = Callable[[np.ndarray], np.ndarray]  # from points (n, knobs) to what each model in its turn thinks: (models, n)

Guess = Callable[[np.ndarray], np.ndarray]  # from points (n, knobs) to how slow somebody else thinks them to be: (n,)

Criterion = Callable[[GaussianProcess, Rows], np.ndarray]  # what a process thinks of configs: (n,)


@dataclass(frozen=True)
class Parts:
    """What the tuner is made of; `scripts/ablation.py` leaves out one after another.

    Attributes:
        process: Gaussian processes choose, by the improvement that they expect.
        trees: boosted trees choose, each member of an ensemble in its turn; without a process, or where another
            workload's trials are known, they do anyway.
        near: every second proposal is a neighbour of the best config.
        ranks: a process learns ranks.
        shares: a process learns shares of the speed; with ranks as well, the two take turns.
        twos: processes see how often two divides a number.
        numbers: processes see which numbers are equal, as they do of other knobs.
    """

    process: bool = True
    trees: bool = False
    near: bool = False
    ranks: bool = True
    shares: bool = True
    twos: bool = True
    numbers: bool = False


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
        if not self._guess or not len(points):
            return features
        return np.column_stack([features, self._guess(points)]).astype(np.float32)

    def _choose(self, n: int) -> Iterable[np.ndarray]:
        if self._succeeded() < _FOUNDERS and not any(group.succeeded.any() for group in self._others):
            return itertools.chain(default_point(self.space), self._drafted(), self._random)
        candidates, scores = self._candidates(self._models())
        return itertools.chain([] if self._learnt else default_point(self.space), self._diverse(candidates, scores))

    def _best_first(self, points: np.ndarray) -> np.ndarray:
        """By the mean of the places that the models give them, which go by what they expect."""
        if not len(points) or self._succeeded() < _FOUNDERS:
            return super()._best_first(points)
        places = (
            self._models(lambda process, rows: process.predict(rows)[0])(points)
            .argsort(axis=1, kind="stable")
            .argsort(axis=1)
        )
        return points[np.argsort(-places.mean(axis=0), kind="stable")]

    def _models(self, criterion: Criterion | None = None) -> Scores:
        """The models, taught what was measured until now; a process goes by the criterion, or by the improvement."""
        criterion = criterion or log_improvement
        groups = self._groups()
        success = Success(groups, self._rng)
        processes = list(self._processes()) if self._succeeded() >= _FOUNDERS else []
        with_trees = not processes or self.parts.trees or bool(self._others)
        trees = Ensemble(groups, _MEMBERS, self._rng) if with_trees else None

        def scores(points: np.ndarray) -> np.ndarray:
            features = self._features(points)
            rows = self._comparison.rows(points, features)
            voices = [criterion(process, rows) for process in processes]
            if trees:
                members = list(trees.scores(features))
                voices = voices * (_MEMBERS // len(voices)) + members if voices else members
            return np.stack(voices) + success.log_likelihood(features)

        return scores

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
        orders = itertools.cycle(np.argsort(-scores, axis=1, kind="stable"))
        for order in itertools.islice(orders, self._proposed % 2, None):  # requests of one do not ask one process alone
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
