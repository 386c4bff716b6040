"""Cost models of boosted trees: an ensemble that predicts throughput, and a model of feasibility.

Importing xgboost takes seconds if scikit-learn is installed, so it happens on first use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_REGRESSION_PARAMETERS = {
    "max_depth": 3,
    "eta": 0.15,
    "colsample_bynode": 0.7,
    "objective": "reg:squarederror",
    "base_score": 0.0,
}
_REGRESSION_BOOSTING_ROUNDS = 80
_FEASIBILITY_PARAMETERS = {"max_depth": 3, "eta": 0.2, "min_child_weight": 0.5, "objective": "binary:logistic"}
_FEASIBILITY_BOOSTING_ROUNDS = 30
_MAX_TRAINING_TRIALS = 1024  # limit of trials in the training set of a member, so that long searches do not slow down


@dataclass(frozen=True)
class TrialGroup:
    """Trials of one workload, whose costs are comparable. The methods return a value for each valid trial."""

    features: np.ndarray  # float32 (n, features); NaN for features that a trial lacks
    costs: np.ndarray  # seconds per launch, float (n,); infinite for trials that failed
    weight: float = 1.0  # weight of each trial

    @property
    def is_valid(self) -> np.ndarray:
        """Which trials succeeded: bool (n,)."""
        return np.isfinite(self.costs)

    def compute_normal_scores(self) -> np.ndarray:
        """Return the ranks as quantiles of the normal distribution. They are invariant under monotone transforms of the
        costs, and robust against outliers.
        """
        from scipy.special import ndtri

        costs = self.costs[self.is_valid]
        ranks = np.argsort(np.argsort(-costs, kind="stable"), kind="stable")
        return ndtri((ranks + 0.5) / len(ranks))

    def compute_throughput(self) -> np.ndarray:
        """Return the throughput relative to the best one. Unlike the logarithm of the cost, it hardly distinguishes
        slow configs, whose order does not matter.
        """
        costs = self.costs[self.is_valid]
        return costs.min(initial=np.inf) / costs

    def compute_clipped_throughput(self) -> np.ndarray:
        """Return the relative throughput, at least its median, so that the order of the slower half does not count."""
        throughput = self.compute_throughput()
        return np.maximum(throughput, np.median(throughput))

    def compute_targets(self) -> np.ndarray:
        """Return the relative throughput with zero mean and unit variance."""
        throughput = self.compute_throughput()
        return (throughput - throughput.mean()) / max(throughput.std(), 1e-6) if len(throughput) else throughput


class TreeEnsemble:
    """An ensemble of boosted trees, each member of which is trained on a bootstrap sample of the trials. The members
    differ where trials are few. When each proposal follows one member, this is Thompson sampling, whose exploration
    decreases as the members agree. Sources: Chapelle and Li, "An Empirical Evaluation of Thompson Sampling", NIPS 2011;
    Chen and Guestrin, "XGBoost", KDD 2016.
    """

    def __init__(self, groups: Sequence[TrialGroup], num_members: int, rng: np.random.Generator):
        features = np.concatenate([group.features[group.is_valid] for group in groups])
        targets = np.concatenate([group.compute_targets() for group in groups])
        weights = np.concatenate([np.full(group.is_valid.sum(), group.weight) for group in groups])
        self._boosters = []
        for _ in range(num_members):
            sampled = rng.choice(len(targets), min(len(targets), _MAX_TRAINING_TRIALS), p=weights / weights.sum())
            trials, counts = np.unique(sampled, return_counts=True)
            self._boosters.append(
                _train_booster(
                    _REGRESSION_PARAMETERS, _REGRESSION_BOOSTING_ROUNDS, features[trials], targets[trials], counts, rng
                )
            )

    def predict_scores(self, features: np.ndarray) -> np.ndarray:
        """Return the throughput that each member predicts, in standard deviations: float (members, n)."""
        import xgboost as xgb

        inputs = xgb.DMatrix(features, nthread=1)
        return np.stack([booster.predict(inputs) for booster in self._boosters])


class FeasibilityModel:
    """A classifier of boosted trees that predicts whether configs succeed; with at most one failure, all do."""

    def __init__(self, groups: Sequence[TrialGroup], rng: np.random.Generator):
        is_valid = np.concatenate([group.is_valid for group in groups])
        self._booster = None
        if (~is_valid).sum() >= 2:
            features = np.concatenate([group.features for group in groups])
            weights = np.concatenate([np.full(len(group.costs), group.weight) for group in groups])
            trials = rng.permutation(len(is_valid))[: 2 * _MAX_TRAINING_TRIALS]
            self._booster = _train_booster(
                _FEASIBILITY_PARAMETERS,
                _FEASIBILITY_BOOSTING_ROUNDS,
                features[trials],
                is_valid[trials],
                weights[trials],
                rng,
            )

    def predict_log_likelihood(self, features: np.ndarray) -> np.ndarray:
        """Return the logarithm of the probability of success: float (n,)."""
        if self._booster is None:
            return np.zeros(len(features))
        import xgboost as xgb

        return np.log(self._booster.predict(xgb.DMatrix(features, nthread=1)) + 1e-9)


def _train_booster(
    parameters: dict[str, Any],
    boosting_rounds: int,
    features: np.ndarray,
    labels: np.ndarray,
    weights: np.ndarray,
    rng: np.random.Generator,
) -> Any:
    import xgboost as xgb

    # With several threads, sums in another order would make other trees, and other proposals from the same seed.
    fixed_parameters = {"nthread": 1, "verbosity": 0, "seed": int(rng.integers(2**31))}
    training_data = xgb.DMatrix(features, label=labels.astype(np.float32), weight=weights, nthread=1)
    return xgb.train({**parameters, **fixed_parameters}, training_data, boosting_rounds)
