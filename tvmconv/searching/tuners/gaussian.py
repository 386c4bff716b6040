"""A Gaussian process: what configs cost and how sure that is, from a few hundred measurements."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tvmconv.searching.tuners.rows import Rows

_MOST_ROWS = 192  # measurements that it goes by, the best half of them the best of all
_MOST_FITTED = 96  # of these, to fit the kernel to: a step takes time cubic in them
_STEPS = 12  # of the fit
_JITTER = 1e-6
_TOGETHER = 2048  # configs that are asked for at a time

# The prior of the kernel's parameters, all of them logarithms: means and standard deviations. The values have unit
# variance, and features a range of one.
_WEIGHT, _KNOB_WEIGHT, _WEIGHT_SPREAD = 0.0, -2.0, 1.5  # of a squared distance in a feature, of a knob that differs
_VARIANCE, _VARIANCE_SPREAD = 0.0, 0.7
_NOISE, _NOISE_SPREAD = -5.0, 1.5


class GaussianProcess:
    """Regression with a Matérn-5/2 kernel, and a length scale for each feature and each knob.

    Configs are alike that are close in all features, and of whose knobs few differ. The kernel's parameters have the
    largest posterior density that a few steps of L-BFGS find. (Rasmussen and Williams, "Gaussian Processes for Machine
    Learning", MIT Press 2006, chapters 2, 4 and 5.)

    Args:
        rows: the configs that were measured.
        values: how good they are: float (n,), the larger the better. A first guess of them, by another model, is to be
            subtracted before, and added to what is predicted.
        parameters: where to begin the fit: those of an earlier process of the same features and knobs.
        margin: by how much a value has to exceed the largest to count as an improvement.

    Attributes:
        parameters: of the kernel.
        best: the largest value and the margin, in the units of predictions.
    """

    def __init__(self, rows: Rows, values: np.ndarray, parameters: np.ndarray | None = None, margin: float = 0.0):
        kept = _best_and_others(values, _MOST_ROWS)
        rows, values = rows[kept], values[kept]
        self._low = rows.features.min(axis=0)
        self._range = np.ptp(rows.features, axis=0)
        self._range[self._range == 0] = 1
        self._rows = self._scaled(rows)
        spread = max(values.std(), 1e-9)
        targets = (values - values.mean()) / spread
        self.best = float(targets.max() + margin / spread)
        distances = _distances(self._rows)
        fitted = _best_and_others(targets, _MOST_FITTED)
        square = np.ix_(fitted, fitted)
        start = _prior(rows)[0] if parameters is None else parameters
        posterior = _Posterior(distances[:, square[0], square[1]], targets[fitted], *_prior(rows))
        self.parameters = posterior.maximise(start)
        weights, variance, noise = _parts(self.parameters)
        alike, _ = _matern(np.tensordot(weights, distances, 1))
        factor = np.linalg.cholesky(variance * alike + (noise + _JITTER) * np.eye(len(targets)))
        self._weights = _solve(factor, targets)
        self._inverse = np.linalg.inv(factor).astype(np.float32)
        found = [(i, value) for i, column in enumerate(rows.points.T) for value in np.unique(column).tolist()]
        self._values = np.array(found, dtype=np.intp).reshape(-1, 2)  # the number of each knob, with each of its values

    def predict(self, rows: Rows) -> tuple[np.ndarray, np.ndarray]:
        """The mean and the standard deviation of each config's value: float (n,), (n,)."""
        parts = [self._predict(rows[i : i + _TOGETHER]) for i in range(0, max(len(rows.points), 1), _TOGETHER)]
        mean, variance = (np.concatenate(each) for each in zip(*parts, strict=True))
        return mean, np.sqrt(variance)

    def _predict(self, rows: Rows) -> tuple[np.ndarray, np.ndarray]:
        """The mean and the variance of so few configs that what is known beside what is asked stays in the cache."""
        weights, variance, _ = _parts(self.parameters)
        rows = self._scaled(rows)
        scales, knob_weights = np.split(weights, [rows.features.shape[1]])
        known, asked = (each.features * np.sqrt(scales) for each in (self._rows, rows))
        squared = (known**2).sum(axis=1)[:, None] + (asked**2).sum(axis=1) - 2 * known @ asked.T
        squared += knob_weights.sum()
        squared = squared.astype(np.float32)  # half as wide, twice as fast
        ours, theirs = self._shared_values(rows, knob_weights)
        squared -= ours @ theirs.T
        covariance = np.float32(variance) * _alike(np.maximum(squared, 0, out=squared))
        explained = self._inverse @ covariance
        return self._weights @ covariance, np.maximum(variance - (explained**2).sum(axis=0), _JITTER)

    def _shared_values(self, rows: Rows, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Matrices of whose product each element is the weight of the knobs whose values two configs share.

        A column is of a value of a knob: that takes a hundredth of comparing each two configs.
        """
        knobs, values = self._values.T
        theirs = (rows.points[:, knobs] == values).astype(np.float32)
        return (self._rows.points[:, knobs] == values) * weights[knobs].astype(np.float32), theirs

    def _scaled(self, rows: Rows) -> Rows:
        return Rows((rows.features - self._low) / self._range, rows.points)


def log_improvement(process: GaussianProcess, rows: Rows, best: float | None = None) -> np.ndarray:
    """The logarithm of the improvement that is to be expected, on the best of all or on another prediction: float (n,).

    (Mockus, "Bayesian Approach to Global Optimization", Kluwer 1989; of what is hopeless, an asymptote's logarithm.)
    """
    from scipy.special import log_ndtr, ndtr

    mean, deviation = process.predict(rows)
    ahead = (mean - (process.best if best is None else best)) / deviation
    density = np.exp(-(ahead**2) / 2) / np.sqrt(2 * np.pi)
    with np.errstate(divide="ignore", invalid="ignore"):
        near = np.log(ahead * ndtr(ahead) + density)
    far = log_ndtr(ahead) - np.log(np.maximum(-ahead, 1))
    return np.log(deviation) + np.where(ahead > -5, near, far)


@dataclass(frozen=True)
class _Posterior:
    """The density of a kernel's parameters, given what was measured.

    Attributes:
        distances: squared, in each feature and of each knob: float (dimensions, n, n).
        targets: float (n,).
        means: of the parameters' prior.
        spreads: its standard deviations.
    """

    distances: np.ndarray
    targets: np.ndarray
    means: np.ndarray
    spreads: np.ndarray

    def maximise(self, start: np.ndarray) -> np.ndarray:
        """Better parameters than those to start with."""
        from scipy.optimize import minimize

        return minimize(self._negative_log, start, jac=True, method="L-BFGS-B", options={"maxiter": _STEPS}).x

    def _negative_log(self, parameters: np.ndarray) -> tuple[float, np.ndarray]:
        """Up to a constant, and its gradient (Rasmussen and Williams, equations 5.8 and 5.9)."""
        weights, variance, noise = _parts(parameters)
        alike, slope = _matern(np.tensordot(weights, self.distances, 1))
        covariance = variance * alike + (noise + _JITTER) * np.eye(len(self.targets))
        factor = np.linalg.cholesky(covariance)
        inverse = _solve(factor, np.eye(len(self.targets)))
        solved = inverse @ self.targets
        away = (parameters - self.means) / self.spreads
        value = 0.5 * self.targets @ solved + np.log(np.diag(factor)).sum() + 0.5 * away @ away
        pull = np.outer(solved, solved) - inverse
        gradient = np.concatenate(
            [
                weights * (self.distances.reshape(len(weights), -1) @ (pull * variance * slope).ravel()),
                [variance * (pull * alike).sum(), noise * np.trace(pull)],
            ]
        )
        return value, away / self.spreads - 0.5 * gradient


def _prior(rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """Means and standard deviations of the parameters: weights of features and knobs, variance, noise."""
    features, knobs = rows.features.shape[1], rows.points.shape[1]
    means = [_WEIGHT] * features + [_KNOB_WEIGHT] * knobs + [_VARIANCE, _NOISE]
    spreads = [_WEIGHT_SPREAD] * (features + knobs) + [_VARIANCE_SPREAD, _NOISE_SPREAD]
    return np.array(means), np.array(spreads)


def _parts(parameters: np.ndarray) -> tuple[np.ndarray, float, float]:
    """The weights of distances, the variance, and the noise."""
    *weights, variance, noise = np.exp(np.clip(parameters, -20, 20))
    return np.array(weights), variance, noise


def _distances(rows: Rows) -> np.ndarray:
    """Squared in each feature, and 0 or 1 for each knob: float (features + knobs, n, n)."""
    features, points = rows.features.T, rows.points.T
    apart = (features[:, :, None] - features[:, None]) ** 2
    return np.concatenate([apart, points[:, :, None] != points[:, None]])


def _alike(squared: np.ndarray) -> np.ndarray:
    """The Matérn-5/2 kernel of squared distances."""
    distance = np.sqrt(5 * squared)
    return (1 + distance * (1 + distance / 3)) * np.exp(-distance)


def _matern(squared: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same, and its derivative by these."""
    distance = np.sqrt(5 * squared)
    fading = np.exp(-distance)
    return (1 + distance + distance**2 / 3) * fading, -5 / 6 * (1 + distance) * fading


def _solve(factor: np.ndarray, right: np.ndarray) -> np.ndarray:
    from scipy.linalg import cho_solve

    return cho_solve((factor, True), right, check_finite=False)


def _best_and_others(values: np.ndarray, most: int) -> np.ndarray:
    """At most so many places: half of them those of the best, the others spread evenly over the rest."""
    order = np.argsort(-values, kind="stable")
    if len(order) <= most:
        return order
    half = most // 2
    return np.concatenate([order[:half], order[np.linspace(half, len(order) - 1, most - half).astype(int)]])
