"""The cost model: which configs are fast, as an ensemble of boosted trees guesses it from those measured."""

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
_MAX_TRAINING_TRIALS = 1024  # a member learns from at most as many trials, so that a long search does not slow down


@dataclass(frozen=True)
class TrialGroup:
    """Trials that compare with each other: those of one workload.

    Attributes:
        features: float32 (n, features); NaN where a trial lacks one.
        costs: seconds (n,), infinite for trials that failed.
        weight: of each trial.
    """

    features: np.ndarray
    costs: np.ndarray
    weight: float = 1.0

    @property
    def success_mask(self) -> np.ndarray:
        """Which trials did: bool (n,)."""
        return np.isfinite(self.costs)

    def compute_normal_scores(self) -> np.ndarray:
        """How good the trials that succeeded are: their ranks, as quantiles of the normal distribution.

        No monotone change of the costs changes them, and an outlier is as good as any other that is last.
        """
        from scipy.special import ndtri

        costs = self.costs[self.success_mask]
        ranks = np.argsort(np.argsort(-costs, kind="stable"), kind="stable")
        return ndtri((ranks + 0.5) / len(ranks))

    def compute_throughput(self) -> np.ndarray:
        """How good the trials that succeeded are: their share of the best one's speed.

        Shares of the speed, and not the logarithm of the cost: how bad the bad ones are is of no interest.
        """
        costs = self.costs[self.success_mask]
        return costs.min(initial=np.inf) / costs

    def compute_clipped_throughput(self) -> np.ndarray:
        """The shares, none below their median: which of the slower half are the slowest is of no interest, either."""
        throughput = self.compute_throughput()
        return np.maximum(throughput, np.median(throughput)) if len(throughput) else throughput

    def compute_targets(self) -> np.ndarray:
        """The shares, standardised."""
        throughput = self.compute_throughput()
        return (throughput - throughput.mean()) / max(throughput.std(), 1e-6) if len(throughput) else throughput


class TreeEnsemble:
    """Boosted trees, each member trained on a bootstrap sample of the trials.

    Where the trials say little, the members differ. To follow a member of its own with each proposal is Thompson
    sampling: exploration fades as the members come to agree, and where they do. (Chapelle and Li, "An Empirical
    Evaluation of Thompson Sampling", NIPS 2011; Chen and Guestrin, "XGBoost", KDD 2016.)

    Args:
        groups: what was measured.
        num_members: how many to train.
        rng: draws the samples.
    """

    def __init__(self, groups: Sequence[TrialGroup], num_members: int, rng: np.random.Generator):
        features = np.concatenate([group.features[group.success_mask] for group in groups])
        targets = np.concatenate([group.compute_targets() for group in groups])
        weights = np.concatenate([np.full(group.success_mask.sum(), group.weight) for group in groups])
        self._boosters = [_train_on_bootstrap(features, targets, weights, rng) for member_index in range(num_members)]

    def predict_scores(self, features: np.ndarray) -> np.ndarray:
        """How good each member thinks configs to be, in standard deviations: (members, n)."""
        import xgboost as xgb

        inputs = xgb.DMatrix(features, nthread=1)
        return np.stack([booster.predict(inputs) for booster in self._boosters])


def _train_on_bootstrap(
    features: np.ndarray, targets: np.ndarray, weights: np.ndarray, rng: np.random.Generator
) -> Any:
    sampled = rng.choice(len(targets), min(len(targets), _MAX_TRAINING_TRIALS), p=weights / weights.sum())
    trial_indices, counts = np.unique(sampled, return_counts=True)
    return _train_booster(
        _REGRESSION_PARAMETERS,
        _REGRESSION_BOOSTING_ROUNDS,
        features[trial_indices],
        targets[trial_indices],
        counts,
        rng,
    )


class FeasibilityModel:
    """How likely configs are to succeed, as boosted trees guess; as long as (nearly) all did, all are.

    Args:
        groups: what was measured.
        rng: draws the trials to learn from, where they are many.
    """

    def __init__(self, groups: Sequence[TrialGroup], rng: np.random.Generator):
        self._booster = _train_feasibility(groups, rng)

    def predict_log_likelihood(self, features: np.ndarray) -> np.ndarray:
        """The logarithm of the likelihood: float (n,)."""
        if self._booster is None:
            return np.zeros(len(features))
        import xgboost as xgb  # it takes seconds where scikit-learn is installed

        return np.log(self._booster.predict(xgb.DMatrix(features, nthread=1)) + 1e-9)


def _train_feasibility(groups: Sequence[TrialGroup], rng: np.random.Generator) -> Any:
    features = np.concatenate([group.features for group in groups])
    success_mask = np.concatenate([group.success_mask for group in groups])
    weights = np.concatenate([np.full(len(group.costs), group.weight) for group in groups])
    if (~success_mask).sum() < 2:
        return None
    trial_indices = rng.permutation(len(success_mask))[: 2 * _MAX_TRAINING_TRIALS]
    return _train_booster(
        _FEASIBILITY_PARAMETERS,
        _FEASIBILITY_BOOSTING_ROUNDS,
        features[trial_indices],
        success_mask[trial_indices],
        weights[trial_indices],
        rng,
    )


def _train_booster(
    parameters: dict[str, Any],
    boosting_rounds: int,
    features: np.ndarray,
    labels: np.ndarray,
    weights: np.ndarray,
    rng: np.random.Generator,
) -> Any:
    import xgboost as xgb

    # One thread: sums in another order would be other trees, and other proposals from the same seed.
    fixed_parameters = {"nthread": 1, "verbosity": 0, "seed": int(rng.integers(2**31))}
    training_data = xgb.DMatrix(features, label=labels.astype(np.float32), weight=weights, nthread=1)
    return xgb.train({**parameters, **fixed_parameters}, training_data, boosting_rounds)
