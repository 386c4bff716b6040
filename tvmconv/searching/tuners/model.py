"""The cost model: which configs are fast, as an ensemble of boosted trees guesses it from those measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_TREES = {"max_depth": 3, "eta": 0.15, "colsample_bynode": 0.7, "objective": "reg:squarederror", "base_score": 0.0}
_ROUNDS = 80
_FAILURE_TREES = {"max_depth": 3, "eta": 0.2, "min_child_weight": 0.5, "objective": "binary:logistic"}
_FAILURE_ROUNDS = 30
_MOST_ROWS = 1024  # a member learns from at most as many trials, so that a long search does not slow down


@dataclass(frozen=True)
class Group:
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
    def succeeded(self) -> np.ndarray:
        """Which trials did: bool (n,)."""
        return np.isfinite(self.costs)

    def normal_scores(self) -> np.ndarray:
        """How good the trials that succeeded are: their ranks, as quantiles of the normal distribution.

        No monotone change of the costs changes them, and an outlier is as good as any other that is last.
        """
        from scipy.special import ndtri

        costs = self.costs[self.succeeded]
        ranks = np.argsort(np.argsort(-costs, kind="stable"), kind="stable")
        return ndtri((ranks + 0.5) / len(ranks))

    def shares(self) -> np.ndarray:
        """How good the trials that succeeded are: their share of the best one's speed.

        Shares of the speed, and not the logarithm of the cost: how bad the bad ones are is of no interest.
        """
        costs = self.costs[self.succeeded]
        return costs.min(initial=np.inf) / costs

    def upper_shares(self) -> np.ndarray:
        """The shares, none below their median: which of the slower half are the slowest is of no interest, either."""
        shares = self.shares()
        return np.maximum(shares, np.median(shares)) if len(shares) else shares

    def targets(self) -> np.ndarray:
        """The shares, standardised."""
        shares = self.shares()
        return (shares - shares.mean()) / max(shares.std(), 1e-6) if len(shares) else shares


class Ensemble:
    """Boosted trees, each member trained on a bootstrap sample of the trials.

    Where the trials say little, the members differ. To follow a member of its own with each proposal is Thompson
    sampling: exploration fades as the members come to agree, and where they do. (Chapelle and Li, "An Empirical
    Evaluation of Thompson Sampling", NIPS 2011; Chen and Guestrin, "XGBoost", KDD 2016.)

    Args:
        groups: what was measured.
        members: how many to train.
        rng: draws the samples.
    """

    def __init__(self, groups: Sequence[Group], members: int, rng: np.random.Generator):
        features = np.concatenate([group.features[group.succeeded] for group in groups])
        targets = np.concatenate([group.targets() for group in groups])
        weights = np.concatenate([np.full(group.succeeded.sum(), group.weight) for group in groups])
        self._members = [_bootstrapped(features, targets, weights, rng) for _ in range(members)]

    def scores(self, features: np.ndarray) -> np.ndarray:
        """How good each member thinks configs to be, in standard deviations: (members, n)."""
        import xgboost as xgb

        rows = xgb.DMatrix(features, nthread=1)
        return np.stack([member.predict(rows) for member in self._members])


def _bootstrapped(features: np.ndarray, targets: np.ndarray, weights: np.ndarray, rng: np.random.Generator) -> Any:
    drawn = rng.choice(len(targets), min(len(targets), _MOST_ROWS), p=weights / weights.sum())
    rows, counts = np.unique(drawn, return_counts=True)
    return _train(_TREES, _ROUNDS, features[rows], targets[rows], counts, rng)


class Success:
    """How likely configs are to succeed, as boosted trees guess; as long as (nearly) all did, all are.

    Args:
        groups: what was measured.
        rng: draws the trials to learn from, where they are many.
    """

    def __init__(self, groups: Sequence[Group], rng: np.random.Generator):
        self._trees = _failures(groups, rng)

    def log_likelihood(self, features: np.ndarray) -> np.ndarray:
        """The logarithm of the likelihood: float (n,)."""
        if self._trees is None:
            return np.zeros(len(features))
        import xgboost as xgb  # it takes seconds where scikit-learn is installed

        return np.log(self._trees.predict(xgb.DMatrix(features, nthread=1)) + 1e-9)


def _failures(groups: Sequence[Group], rng: np.random.Generator) -> Any:
    features = np.concatenate([group.features for group in groups])
    succeeded = np.concatenate([group.succeeded for group in groups])
    weights = np.concatenate([np.full(len(group.costs), group.weight) for group in groups])
    if (~succeeded).sum() < 2:
        return None
    rows = rng.permutation(len(succeeded))[: 2 * _MOST_ROWS]
    return _train(_FAILURE_TREES, _FAILURE_ROUNDS, features[rows], succeeded[rows], weights[rows], rng)


def _train(
    parameters: dict[str, Any],
    rounds: int,
    features: np.ndarray,
    labels: np.ndarray,
    weights: np.ndarray,
    rng: np.random.Generator,
) -> Any:
    import xgboost as xgb

    # One thread: sums in another order would be other trees, and other proposals from the same seed.
    fixed = {"nthread": 1, "verbosity": 0, "seed": int(rng.integers(2**31))}
    rows = xgb.DMatrix(features, label=labels.astype(np.float32), weight=weights, nthread=1)
    return xgb.train({**parameters, **fixed}, rows, rounds)
