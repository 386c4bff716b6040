"""Bayesian optimization: cost models learn from measured configs, and propose the next ones."""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from tvmconv.search.tuners.base import Trial, Tuner, iterate_points_and_costs, list_legal_default_points
from tvmconv.search.tuners.binary_challenge import KnobRestriction, restrict_to_opposite_value
from tvmconv.search.tuners.gaussian_process import GaussianProcess, log_expected_improvement
from tvmconv.search.tuners.gp_inputs import GPInputEncoder, GPInputs
from tvmconv.search.tuners.initial_candidates import iterate_initial_candidates
from tvmconv.search.tuners.options import BayesianTunerOptions
from tvmconv.search.tuners.tree_models import FeasibilityModel, TreeEnsemble, TrialGroup
from tvmconv.space.mutation import Mutator
from tvmconv.space.search_space import Space, remove_duplicate_points

_NUM_STARTUP_TRIALS = 5  # number of successful configs before the models propose
_ENSEMBLE_SIZE = 4  # number of members of the tree ensemble, which take turns
_EXPLORATION_FRACTION = 0.05  # fraction of random proposals when only trees propose
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
    options = BayesianTunerOptions()

    def __init__(self, space: Space, seed: int = 0):
        super().__init__(space, seed)
        self._mutator = Mutator(space)
        self._transfer_groups: list[TrialGroup] = []
        self._initial_candidates = iterate_initial_candidates(space)
        self._kernel_parameters: dict[str, np.ndarray] = {}  # start of the next fit for each target
        self._num_proposed = 0  # number of proposals by models
        self._local_search_turns = itertools.cycle((False, True))  # whether the next proposal is a local one
        self._prior: Prior | None = None

    def tell_transfer_trials(self, space: Space, trials: Iterable[Trial]) -> None:
        """Learn the relative throughput of configs for another workload.

        The space is that of the same schedule for the other workload.
        """
        trial_points = list(iterate_points_and_costs(space, trials))
        if trial_points:
            weight = min(1.0, _MAX_TRANSFER_TRIALS / len(trial_points))
            self._transfer_groups.append(self._make_group(space, trial_points, weight))

    def set_prior(self, prior: Prior) -> None:
        """Set a prediction of costs, which chooses the first configs and is a feature of the models afterwards."""
        self._prior = prior

    @functools.cached_property
    def _encoder(self) -> GPInputEncoder:
        return GPInputEncoder(self.space, self.options.power_of_two_features, self.options.numeric_equality)

    def _propose_startup_points(self) -> Iterable[np.ndarray]:
        """Return the first points to measure, by the prior or else by the schedule's estimate."""
        if not self._prior:
            return self._initial_candidates
        points = self.space.sample_legal(_NUM_SAMPLED, self._rng)
        return self._select_diverse(points, -self._prior(points)[None]) if len(points) else []

    def _compute_features(self, points: np.ndarray) -> np.ndarray:
        """Return the features of points (n, knobs): float32 (n, features)."""
        features, _ = self.space.compute_features(points)
        if not self._prior:
            return features
        return np.column_stack([features, self._prior(points)]).astype(np.float32)

    def _select_points(self, max_configs: int, skip_model: bool) -> Iterable[np.ndarray]:
        is_startup = self._count_successes() < _NUM_STARTUP_TRIALS and not any(
            group.success_mask.any() for group in self._transfer_groups
        )
        if is_startup or (skip_model and self._has_unloaded_libraries()):
            return itertools.chain(
                list_legal_default_points(self.space), self._propose_startup_points(), self._random_points
            )
        candidates, scores = self._generate_candidates(self._build_scorer())
        return itertools.chain(
            [] if self._evaluated else list_legal_default_points(self.space), self._select_diverse(candidates, scores)
        )

    def _rank_points(self, points: np.ndarray, skip_model: bool) -> np.ndarray:
        """Return points in the order of their mean rank by the predictions of the models."""
        if (
            not len(points)
            or self._count_successes() < _NUM_STARTUP_TRIALS
            or (skip_model and self._has_unloaded_libraries())
        ):
            return super()._rank_points(points, skip_model)
        ranks = (
            self._build_scorer(lambda gp, inputs: gp.predict(inputs)[0])(points)
            .argsort(axis=1, kind="stable")
            .argsort(axis=1)
        )
        return points[np.argsort(-ranks.mean(axis=0), kind="stable")]

    def _has_unloaded_libraries(self) -> bool:
        """Return whether the models need a library that this process has not loaded, which takes seconds."""
        num_failed = len(self._evaluated) - self._count_successes()
        has_trees = bool(num_failed or self._transfer_groups or self.options.use_trees or not self.options.use_gp)
        return "scipy.optimize" not in sys.modules or (has_trees and "xgboost" not in sys.modules)

    def _build_scorer(self, acquisition: AcquisitionFunction | None = None) -> ScoreFunction:
        """Return a function that scores points by all models, rotated so that the next model in turn comes first.

        Gaussian processes use `acquisition`; by default the expected improvement, with the challenge in its turn.
        """
        groups = self._collect_groups()
        feasibility = FeasibilityModel(groups, self._rng)
        gps = list(self._fit_processes()) if self._count_successes() >= _NUM_STARTUP_TRIALS else []
        uses_trees = not gps or self.options.use_trees or bool(self._transfer_groups)
        ensemble = TreeEnsemble(groups, _ENSEMBLE_SIZE, self._rng) if uses_trees else None
        restriction = None if acquisition or uses_trees else self._choose_restriction()

        def scores(points: np.ndarray) -> np.ndarray:
            features = self._compute_features(points)
            inputs = self._encoder.encode(points, features)
            member_scores = [(acquisition or log_expected_improvement)(gp, inputs) for gp in gps]
            if restriction:
                member_scores *= _NUM_ROUND_ROBIN // len(member_scores)
                challenge_scores = log_expected_improvement(gps[-1], inputs, self._predict_best(restriction, gps[-1]))
                member_scores[-1] = np.where(
                    restriction.mask_points(points), challenge_scores, member_scores[-1] - _EXCLUDED_PENALTY
                )
            # Requests of one config would otherwise always get it from the first model.
            turn_index = self._num_proposed % max(len(member_scores), 1)
            member_scores = member_scores[turn_index:] + member_scores[:turn_index]
            if ensemble:
                member_scores = member_scores * (_ENSEMBLE_SIZE // max(len(member_scores), 1)) + list(
                    ensemble.predict_scores(features)
                )
            return np.stack(member_scores) + feasibility.predict_log_likelihood(features)

        return scores

    def _choose_restriction(self) -> KnobRestriction | None:
        """Return the restriction of the next challenge; None if there are too few trials."""
        if not self.options.challenge_binary_knobs or len(self._evaluated) < _CHALLENGE_MIN_TRIALS:
            return None
        return restrict_to_opposite_value(
            self.space, self._sort_points_by_cost()[0], self._num_proposed // _NUM_ROUND_ROBIN
        )

    def _predict_best(self, restriction: KnobRestriction, gp: GaussianProcess) -> float:
        """Return the largest value that a process predicts for measured configs of a restriction; 0 without one."""
        points = np.stack([point for point, cost in self._evaluated.values() if math.isfinite(cost)])
        points = points[restriction.mask_points(points)]
        if not len(points):
            return 0.0
        return float(gp.predict(self._encoder.encode(points, self._compute_features(points)))[0].max())

    def _fit_processes(self) -> Iterator[GaussianProcess]:
        """Yield the Gaussian processes of the ranks and of the relative throughput, as the options select."""
        if not self.options.use_gp:
            return
        points = np.stack([point for point, _ in self._evaluated.values()])
        own_group = self._make_group(self.space, list(self._evaluated.values()))
        inputs = self._encoder.encode(points[own_group.success_mask], own_group.features[own_group.success_mask])
        targets: dict[str, tuple[np.ndarray, float]] = {}
        if self.options.rank_objective:
            targets["ranks"] = own_group.compute_normal_scores(), 0.0
        if self.options.throughput_objective:
            targets["shares"] = own_group.compute_clipped_throughput(), _MIN_IMPROVEMENT
        for name, (values, margin) in targets.items():
            gp = GaussianProcess(inputs, values, self._kernel_parameters.get(name), margin)
            self._kernel_parameters[name] = gp.parameters
            yield gp

    def _collect_groups(self) -> list[TrialGroup]:
        own_groups = [self._make_group(self.space, list(self._evaluated.values()))] if self._evaluated else []
        return own_groups + self._transfer_groups

    def _make_group(
        self, space: Space, trial_points: list[tuple[np.ndarray, float]], weight: float = 1.0
    ) -> TrialGroup:
        """Return trials of a space with the features of this tuner's space."""
        points, costs = zip(*trial_points, strict=True)
        features, names = space.compute_features(np.stack(points))
        feature_by_name = dict(zip(names, features.T, strict=True))
        missing = np.full(len(points), np.nan, dtype=np.float32)
        _, feature_names = self.space.compute_features(np.empty((0, len(self.space.knobs)), dtype=np.int32))
        feature_rows = np.stack([feature_by_name.get(name, missing) for name in feature_names], axis=1)
        if self._prior:
            prior_values = self._prior(np.stack(points)) if space is self.space else missing  # for this workload only
            feature_rows = np.column_stack([feature_rows, prior_values]).astype(np.float32)
        return TrialGroup(feature_rows, np.array(costs), weight)

    def _generate_candidates(self, score_points: ScoreFunction) -> tuple[np.ndarray, np.ndarray]:
        """Return new legal points (n, knobs), including neighbours of the best config, and scores (models, n)."""
        legal_points = self.space.enumerated_legal
        neighbors = (
            self._list_neighbors_of_best()
            if self.options.local_search
            else np.empty((0, len(self.space.knobs)), dtype=np.int32)
        )
        if legal_points is not None and len(legal_points) <= _MAX_FULLY_SCORED:
            points = legal_points[self._find_unclaimed(legal_points)]
            return points, score_points(points)
        if legal_points is not None:
            points = remove_duplicate_points(
                np.concatenate([neighbors, self.space.sample_legal(_MAX_FULLY_SCORED, self._rng)])
            )
            points = points[self._find_unclaimed(points)]
            return points, score_points(points)
        sampled = self.space.sample_legal(_NUM_SAMPLED, self._rng)
        points = remove_duplicate_points(
            np.concatenate([neighbors, sampled, self._sort_points_by_cost()[:_NUM_PARENTS]])
        )
        scores = score_points(points)
        for _ in range(_NUM_GENERATIONS):
            best = np.unique(np.argsort(-scores, axis=1)[:, :_NUM_PARENTS])
            offspring = self._mutator.mutate(np.repeat(points[best], _OFFSPRING_PER_PARENT, axis=0), self._rng)
            extended = remove_duplicate_points(np.concatenate([points, offspring[self.space.is_legal(offspring)]]))
            new_points = extended[len(points) :]
            scores = np.concatenate([scores, score_points(new_points)], axis=1)
            points = extended
        is_unclaimed = self._find_unclaimed(points)
        return points[is_unclaimed], scores[:, is_unclaimed]

    def _list_neighbors_of_best(self) -> np.ndarray:
        """Return at most `_NUM_SAMPLED` neighbours of the best config, (n, knobs)."""
        if not self._count_successes():
            return np.empty((0, len(self.space.knobs)), dtype=np.int32)
        neighbors = self.space.list_neighbors(self._sort_points_by_cost()[0])
        if len(neighbors) <= _NUM_SAMPLED:
            return neighbors
        return neighbors[self._rng.permutation(len(neighbors))[:_NUM_SAMPLED]]

    def _select_diverse(self, candidates: np.ndarray, scores: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the best candidate of each model in turn; with `local_search`, every second one is a neighbour.

        Other candidates differ from all previous ones in at least two knobs, as long as there are such candidates.
        """
        is_taken, is_near_copy, is_neighbor = np.zeros((3, len(candidates)), dtype=bool)
        if self.options.local_search and self._count_successes():
            is_neighbor = np.count_nonzero(candidates != self._sort_points_by_cost()[0], axis=1) == 1
        for order in itertools.cycle(np.argsort(-scores, axis=1, kind="stable")):
            if not self.options.use_gp and self._rng.random() < _EXPLORATION_FRACTION:
                yield from itertools.islice(self._random_points, 1)
            remaining = order[(is_neighbor & ~is_taken)[order]] if next(self._local_search_turns) else order[:0]
            if not len(remaining):
                remaining = order[~is_near_copy[order]]
            if not len(remaining):
                remaining = order[~is_taken[order]]
            if not len(remaining):
                return
            is_taken[remaining[0]] = True
            is_near_copy |= np.count_nonzero(candidates != candidates[remaining[0]], axis=1) < 2
            self._num_proposed += 1
            yield candidates[remaining[0]]
