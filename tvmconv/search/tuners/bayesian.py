"""Bayesian optimization: cost models learn from measured configs, and propose the next ones.

Two Gaussian processes learn the ranks and the relative throughput of configs, and take turns. Every eighth proposal is
a challenge: it has the opposite value of a binary knob of the best config, and only needs to improve on the best config
with that value. Different tiles are fast with and without shared memory, for example, and a search that has tuned only
one value expects little of the other one.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from tvmconv.search.tuners.base import Trial, Tuner, iterate_points_and_costs
from tvmconv.search.tuners.gaussian_process import GaussianProcess, GPInputEncoder, GPInputs, log_expected_improvement
from tvmconv.search.tuners.tree_models import FeasibilityModel, TreeEnsemble, TrialGroup
from tvmconv.space.mutation import Mutator
from tvmconv.space.search_space import Space, remove_duplicate_points

_NUM_STARTUP_TRIALS = 5  # number of successful configs before the models propose
_ENSEMBLE_SIZE = 4  # number of members of the tree ensemble, which take turns
_MIN_IMPROVEMENT = 0.05  # required improvement of relative throughput, as a fraction of the best one
_CHALLENGE_MIN_TRIALS = 48  # number of trials before binary knobs are challenged
_EXCLUDED_PENALTY = 1e4  # penalty that puts the score of a config outside the challenge below all others
_NUM_ROUND_ROBIN = 8  # number of turns of the Gaussian processes; the last turn is the challenge
_MAX_TRANSFER_TRIALS = 32  # maximum total weight of the trials of another workload

_MAX_FULLY_SCORED = 8192  # largest space that is scored in full, and size of the sample of a larger listed space
# A space that is too large to list is searched by mutation of the best points, starting from a random sample.
_NUM_SAMPLED = 1024
_NUM_PARENTS = 64  # number of points that are mutated for each model
_OFFSPRING_PER_PARENT = 6
_NUM_GENERATIONS = 3

ScoreFunction = Callable[[np.ndarray], np.ndarray]  # from points (n, knobs) to the score by each model (models, n)
Prior = Callable[[np.ndarray], np.ndarray]  # from points (n, knobs) to a predicted cost (n,)
AcquisitionFunction = Callable[[GaussianProcess, GPInputs], np.ndarray]  # from n configs to their scores (n,)


class BayesianTuner(Tuner):
    """Bayesian optimization by Gaussian processes, which propose configs of the largest expected improvement in turn.
    Boosted trees predict which configs fail. They also propose configs when trials of another workload are known. Two
    proposals of a batch differ in at least two knobs.
    """

    batch_size = 4

    def __init__(self, space: Space, seed: int = 0):
        super().__init__(space, seed)
        self._encoder = GPInputEncoder(space)
        self._mutator = Mutator(space)
        self._transfer_groups: list[TrialGroup] = []
        self._initial_candidates = iterate_initial_candidates(space)
        self._kernel_parameters: list[np.ndarray | None] = [None, None]  # start of the next fit for each process
        self._num_proposed = 0  # number of proposals by models
        self._prior: Prior | None = None

    def set_prior(self, prior: Prior) -> None:
        """Set a prediction of costs, which chooses the first configs and is a feature of the models afterwards. It has
        to be set before any trials are learnt.
        """
        self._prior = prior

    def tell_transfer_trials(self, space: Space, trials: Iterable[Trial]) -> None:
        """Learn the relative throughput of configs of the same schedule for another workload, whose space is given."""
        trial_points = list(iterate_points_and_costs(space, trials))
        if not trial_points:
            return
        points, costs = zip(*trial_points, strict=True)
        features, names = space.compute_features(np.stack(points))
        feature_by_name = dict(zip(names, features.T, strict=True))
        _, own_names = self.space.compute_features(np.empty((0, len(self.space.knobs)), dtype=np.int32))
        missing = np.full(len(points), np.nan, dtype=np.float32)  # also the prior, which is for this workload only
        feature_rows = [feature_by_name.get(name, missing) for name in own_names] + [missing] * bool(self._prior)
        weight = min(1.0, _MAX_TRANSFER_TRIALS / len(points))
        self._transfer_groups.append(TrialGroup(np.stack(feature_rows, axis=1), np.array(costs), weight))

    def _select_points(self, max_configs: int, skip_model: bool) -> Iterable[np.ndarray]:
        knows_fast_configs = self._can_fit_processes() or any(group.is_valid.any() for group in self._transfer_groups)
        if not knows_fast_configs or (skip_model and self._has_unloaded_libraries()):
            return itertools.chain(self._list_legal_default(), self._propose_startup_points(), self._random_points)
        candidates, scores = self._generate_candidates(self._build_scorer())
        return itertools.chain(
            [] if self._evaluated else self._list_legal_default(), self._select_diverse(candidates, scores)
        )

    def _rank_points(self, points: np.ndarray, skip_model: bool) -> np.ndarray:
        """Return points in the order of their mean rank by the predictions of the models."""
        if not len(points) or not self._can_fit_processes() or (skip_model and self._has_unloaded_libraries()):
            return super()._rank_points(points, skip_model)
        scores = self._build_scorer(lambda gp, inputs: gp.predict(inputs)[0])(points)
        ranks = scores.argsort(axis=1, kind="stable").argsort(axis=1)
        return points[np.argsort(-ranks.mean(axis=0), kind="stable")]

    def _propose_startup_points(self) -> Iterable[np.ndarray]:
        """Return the first points to measure, by the prior or else by the schedule's estimate."""
        if not self._prior:
            return self._initial_candidates
        points = self.space.sample_legal(_NUM_SAMPLED, self._rng)
        return self._select_diverse(points, -self._prior(points)[None]) if len(points) else []

    def _can_fit_processes(self) -> bool:
        return self._count_successes() >= _NUM_STARTUP_TRIALS

    def _has_unloaded_libraries(self) -> bool:
        """Return whether the models need a library that this process has not loaded, which takes seconds."""
        has_trees = len(self._evaluated) > self._count_successes() or bool(self._transfer_groups)
        return "scipy.optimize" not in sys.modules or (has_trees and "xgboost" not in sys.modules)

    def _build_scorer(self, acquisition: AcquisitionFunction | None = None) -> ScoreFunction:
        """Return a function that scores points by all models, rotated so that the next model in turn comes first.
        Gaussian processes use `acquisition`; by default the expected improvement, with the challenge in its turn.
        """
        groups = [*([self._make_own_group()] if self._evaluated else []), *self._transfer_groups]
        feasibility = FeasibilityModel(groups, self._rng)
        gps = self._fit_processes() if self._can_fit_processes() else []
        ensemble = TreeEnsemble(groups, _ENSEMBLE_SIZE, self._rng) if self._transfer_groups else None
        challenge = None if acquisition or ensemble else self._choose_challenge()

        def scores(points: np.ndarray) -> np.ndarray:
            features = self._compute_features(points)
            inputs = self._encoder.encode(points, features)
            member_scores = [(acquisition or log_expected_improvement)(gp, inputs) for gp in gps]
            if challenge:
                knob_index, option = challenge
                member_scores *= _NUM_ROUND_ROBIN // len(member_scores)
                best = self._predict_best(knob_index, option, gps[-1])
                member_scores[-1] = np.where(
                    points[:, knob_index] == option,
                    log_expected_improvement(gps[-1], inputs, best),
                    member_scores[-1] - _EXCLUDED_PENALTY,
                )
            # Requests of one config would otherwise always get it from the first model.
            turn_index = self._num_proposed % max(len(member_scores), 1)
            member_scores = member_scores[turn_index:] + member_scores[:turn_index]
            if ensemble:
                member_scores = member_scores * (_ENSEMBLE_SIZE // max(len(member_scores), 1))
                member_scores += list(ensemble.predict_scores(features))
            return np.stack(member_scores) + feasibility.predict_log_likelihood(features)

        return scores

    def _choose_challenge(self) -> tuple[int, int] | None:
        """Return a binary knob, which take turns, and the option that the best config lacks; None with few trials."""
        binary_knobs = [knob_index for knob_index, size in enumerate(self.space.sizes) if size == 2]
        if not binary_knobs or len(self._evaluated) < _CHALLENGE_MIN_TRIALS:
            return None
        knob_index = binary_knobs[self._num_proposed // _NUM_ROUND_ROBIN % len(binary_knobs)]
        return knob_index, 1 - int(self._sort_points_by_cost()[0][knob_index])

    def _predict_best(self, knob_index: int, option: int, gp: GaussianProcess) -> float:
        """Return the largest value that a process predicts for measured configs with an option; 0 without one."""
        points = np.stack([point for point, cost in self._evaluated.values() if math.isfinite(cost)])
        points = points[points[:, knob_index] == option]
        if not len(points):
            return 0.0
        return float(gp.predict(self._encoder.encode(points, self._compute_features(points)))[0].max())

    def _fit_processes(self) -> list[GaussianProcess]:
        """Return the Gaussian processes of the ranks and of the relative throughput."""
        points = np.stack([point for point, _ in self._evaluated.values()])
        group = self._make_own_group()
        inputs = self._encoder.encode(points[group.is_valid], group.features[group.is_valid])
        targets = (group.compute_normal_scores(), 0.0), (group.compute_clipped_throughput(), _MIN_IMPROVEMENT)
        gps = [
            GaussianProcess(inputs, values, parameters, margin)
            for (values, margin), parameters in zip(targets, self._kernel_parameters, strict=True)
        ]
        self._kernel_parameters = [gp.parameters for gp in gps]
        return gps

    def _make_own_group(self) -> TrialGroup:
        points, costs = zip(*self._evaluated.values(), strict=True)
        return TrialGroup(self._compute_features(np.stack(points)), np.array(costs))

    def _compute_features(self, points: np.ndarray) -> np.ndarray:
        """Return the features of points (n, knobs): float32 (n, features)."""
        features, _ = self.space.compute_features(points)
        if not self._prior:
            return features
        return np.column_stack([features, self._prior(points)]).astype(np.float32)

    def _generate_candidates(self, score_points: ScoreFunction) -> tuple[np.ndarray, np.ndarray]:
        """Return new legal points (n, knobs) and their scores (models, n)."""
        legal_points = self.space.enumerated_legal
        if legal_points is not None:
            if len(legal_points) > _MAX_FULLY_SCORED:
                legal_points = remove_duplicate_points(self.space.sample_legal(_MAX_FULLY_SCORED, self._rng))
            points = legal_points[self._find_unclaimed(legal_points)]
            return points, score_points(points)
        sampled = self.space.sample_legal(_NUM_SAMPLED, self._rng)
        points = remove_duplicate_points(np.concatenate([sampled, self._sort_points_by_cost()[:_NUM_PARENTS]]))
        scores = score_points(points)
        for _ in range(_NUM_GENERATIONS):
            best = np.unique(np.argsort(-scores, axis=1)[:, :_NUM_PARENTS])
            offspring = self._mutator.mutate(np.repeat(points[best], _OFFSPRING_PER_PARENT, axis=0), self._rng)
            extended = remove_duplicate_points(np.concatenate([points, offspring[self.space.is_legal(offspring)]]))
            scores = np.concatenate([scores, score_points(extended[len(points) :])], axis=1)
            points = extended
        is_unclaimed = self._find_unclaimed(points)
        return points[is_unclaimed], scores[:, is_unclaimed]

    def _select_diverse(self, candidates: np.ndarray, scores: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the best candidate of each model in turn. Candidates differ from all previous ones in at least two
        knobs, as long as there are such candidates.
        """
        is_taken, is_near_copy = np.zeros((2, len(candidates)), dtype=bool)
        for order in itertools.cycle(np.argsort(-scores, axis=1, kind="stable")):
            remaining = order[~is_near_copy[order]]
            if not len(remaining):
                remaining = order[~is_taken[order]]
            if not len(remaining):
                return
            best = candidates[remaining[0]]
            is_taken[remaining[0]] = True
            is_near_copy |= np.count_nonzero(candidates != best, axis=1) < 2
            self._num_proposed += 1
            yield best


def iterate_initial_candidates(space: Space) -> Iterator[np.ndarray]:
    """Yield the points of a space by the schedule's latency estimate, the best first. A point that differs from an
    earlier one in only one knob is deferred until all others have come. There are no points if the schedule has no
    estimate, or if the space is too large to list.
    """
    legal_points = space.enumerated_legal
    usage = space.compute_usage(legal_points) if legal_points is not None and len(legal_points) else None
    if legal_points is None or usage is None or usage.estimate is None:
        return
    remaining = legal_points[np.argsort(usage.estimate, kind="stable")]
    while len(remaining):
        chosen: list[np.ndarray] = []
        deferred = []
        for point in remaining:
            if any(np.count_nonzero(point != other) == 1 for other in chosen):
                deferred.append(point)
                continue
            chosen.append(point)
            yield point
        remaining = np.array(deferred)
