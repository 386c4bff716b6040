"""Search by cost models: they learn from what was measured, and say what to measure next."""

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

_NUM_STARTUP_TRIALS = 5  # successful configs, drafted or at random, before a model is asked
_ENSEMBLE_SIZE = 4  # ensembles' members that take turns in choosing
_EXPLORATION_FRACTION = 0.05  # the share of configs proposed at random by trees, whatever they think
_MIN_IMPROVEMENT = 0.05  # a process of shares goes for configs that are faster by so much of the best one's speed
_CHALLENGE_MIN_TRIALS = 48  # trials; before, what is tuned is worth more
_EXCLUDED_PENALTY = 1e4  # what makes the score of configs that are no rivals worse than that of any
_NUM_ROUND_ROBIN = 8  # of processes; the last one looks for a rival
_MAX_TRANSFER_TRIALS = 32  # another workload's trials count like at most so many of this one's

_MAX_FULLY_SCORED = (
    8192  # spaces of up to so many legal points are scored in full, of listed ones as many; of larger ones:
)
_NUM_SAMPLED = 1024  # points drawn at random,
_NUM_PARENTS = 64  # and a few times the best of them, by each model, changed a little
_OFFSPRING_PER_PARENT = 6
_NUM_GENERATIONS = 3

ScoreFunction = Callable[
    [np.ndarray], np.ndarray
]  # from points (n, knobs) to what each model in its turn thinks: (models, n)

Prior = Callable[[np.ndarray], np.ndarray]  # from points (n, knobs) to how slow somebody else thinks them to be: (n,)

AcquisitionFunction = Callable[[GaussianProcess, GPInputs], np.ndarray]  # what a process thinks of configs: (n,)


class BayesianTuner(Tuner):
    """Proposes where Gaussian processes expect the largest improvement, each in its turn.

    Boosted trees tell what fails, and they choose as well once another workload's trials are known. Two proposals of a
    batch differ in at least two knobs.

    Attributes:
        options: what it is made of.
    """

    batch_size = 4
    options = BayesianTunerOptions()

    def __init__(self, space: Space, seed: int = 0):
        super().__init__(space, seed)
        self._mutator = Mutator(space)
        self._transfer_groups: list[TrialGroup] = []
        self._initial_candidates = iterate_initial_candidates(space)
        self._kernel_parameters: dict[
            str, np.ndarray
        ] = {}  # of the last process of each target, to begin the next one with
        self._num_proposed = 0  # by models
        self._local_search_turns = itertools.cycle((False, True))  # whether the next proposal is near the best
        self._prior: Prior | None = None

    def tell_transfer_trials(self, space: Space, trials: Iterable[Trial]) -> None:
        """Learn from another workload: what is fast there, compared with the rest there, may be fast here.

        Args:
            space: the same schedule's for the other workload.
            trials: what was measured there.
        """
        trial_points = list(iterate_points_and_costs(space, trials))
        if trial_points:
            weight = min(1.0, _MAX_TRANSFER_TRIALS / len(trial_points))
            self._transfer_groups.append(self._make_group(space, trial_points, weight))

    def set_prior(self, prior: Prior) -> None:
        """Take somebody's word for what is fast: as a draft while nothing is known, then as one more feature."""
        self._prior = prior

    @functools.cached_property
    def _encoder(self) -> GPInputEncoder:
        return GPInputEncoder(self.space, self.options.power_of_two_features, self.options.numeric_equality)

    def _propose_startup_points(self) -> Iterable[np.ndarray]:
        """What to measure before anything is known: what was guessed to be fast, or what the schedule estimates."""
        if not self._prior:
            return self._initial_candidates
        points = self.space.sample_legal(_NUM_SAMPLED, self._rng)
        return self._select_diverse(points, -self._prior(points)[None]) if len(points) else []

    def _compute_features(self, points: np.ndarray) -> np.ndarray:
        """What the models learn from: float32 (n, features)."""
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
        """By the mean of the places that the models give them, which go by what they expect."""
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
        """The models in turn, taught what was measured; processes go by the criterion, or by improvement and rivals."""
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
            turn_index = self._num_proposed % max(len(member_scores), 1)  # requests of one are to ask more than one
            member_scores = member_scores[turn_index:] + member_scores[:turn_index]
            if ensemble:
                member_scores = member_scores * (_ENSEMBLE_SIZE // max(len(member_scores), 1)) + list(
                    ensemble.predict_scores(features)
                )
            return np.stack(member_scores) + feasibility.predict_log_likelihood(features)

        return scores

    def _choose_restriction(self) -> KnobRestriction | None:
        """Where to look for a rival of the best config, if it is time."""
        if not self.options.challenge_binary_knobs or len(self._evaluated) < _CHALLENGE_MIN_TRIALS:
            return None
        return restrict_to_opposite_value(
            self.space, self._sort_points_by_cost()[0], self._num_proposed // _NUM_ROUND_ROBIN
        )

    def _predict_best(self, restriction: KnobRestriction, gp: GaussianProcess) -> float:
        """What a process thinks of the best config that was measured on a side; of none, that it is average."""
        points = np.stack([point for point, cost in self._evaluated.values() if math.isfinite(cost)])
        points = points[restriction.mask_points(points)]
        if not len(points):
            return 0.0
        return float(gp.predict(self._encoder.encode(points, self._compute_features(points)))[0].max())

    def _fit_processes(self) -> Iterator[GaussianProcess]:
        """One of ranks and one of shares, where the parts say so."""
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
        """Trials as the model learns them, with the features of this tuner's space."""
        points, costs = zip(*trial_points, strict=True)
        features, names = space.compute_features(np.stack(points))
        feature_by_name = dict(zip(names, features.T, strict=True))
        missing = np.full(len(points), np.nan, dtype=np.float32)
        _, feature_names = self.space.compute_features(np.empty((0, len(self.space.knobs)), dtype=np.int32))
        feature_rows = np.stack([feature_by_name.get(name, missing) for name in feature_names], axis=1)
        if self._prior:
            prior_values = (
                self._prior(np.stack(points)) if space is self.space else missing
            )  # it is of this workload alone
            feature_rows = np.column_stack([feature_rows, prior_values]).astype(np.float32)
        return TrialGroup(feature_rows, np.array(costs), weight)

    def _generate_candidates(self, score_points: ScoreFunction) -> tuple[np.ndarray, np.ndarray]:
        """Fresh legal points (n, knobs), the best config's neighbours among them, and their scores (models, n)."""
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
        """The neighbours of the best config, (n, knobs); of many, as many at random as are sampled of all."""
        if not self._count_successes():
            return np.empty((0, len(self.space.knobs)), dtype=np.int32)
        neighbors = self.space.list_neighbors(self._sort_points_by_cost()[0])
        return (
            neighbors
            if len(neighbors) <= _NUM_SAMPLED
            else neighbors[self._rng.permutation(len(neighbors))[:_NUM_SAMPLED]]
        )

    def _select_diverse(self, candidates: np.ndarray, scores: np.ndarray) -> Iterator[np.ndarray]:
        """The best candidate of each model in its turn, every second one of the best config's neighbours.

        As long as there are others, no near copies, but for these neighbours.
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
