"""Gaussian process regression, which predicts the value of configs and its uncertainty from measured configs.

Source of the formulas: Rasmussen and Williams, "Gaussian Processes for Machine Learning", MIT Press 2006.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tvmconv.space import ChoiceKnob
from tvmconv.space.search_space import Space

_MAX_INPUTS = 192  # number of measured configs that are used; half of them are the best ones
_MAX_FIT_INPUTS = 96  # number of configs for the fit of the kernel parameters, whose time is cubic in it
_MAX_FIT_ITERATIONS = 12
_JITTER = 1e-6
_PREDICTION_BATCH_SIZE = 2048  # number of configs per matrix product

# Means and standard deviations of the prior of the kernel parameters, which are logarithms. The values have unit
# variance, and the features have a range of one. The weights are those of squared distances in features, and of knobs
# that differ.
_FEATURE_WEIGHT_MEAN, _KNOB_WEIGHT_MEAN, _WEIGHT_STD = 0.0, -2.0, 1.5
_VARIANCE_MEAN, _VARIANCE_STD = 0.0, 0.7
_NOISE_MEAN, _NOISE_STD = -5.0, 1.5


@dataclass(frozen=True)
class GPInputs:
    """Encoded configs."""

    features: np.ndarray  # numeric features: float (n, features)
    points: np.ndarray  # option indices of knobs that are compared for equality only: int32 (n, knobs)

    def __getitem__(self, indices: np.ndarray | slice) -> GPInputs:
        return GPInputs(self.features[indices], self.points[indices])


class GPInputEncoder:
    """An encoder of configs by their features, the powers of two in their numbers, and the options of word knobs. A
    block of 128 threads often performs more like one of 64 than like one of 112, because splits, alignment and
    shared-memory banks depend on powers of two. The logarithm of a number does not show its power of two.
    """

    def __init__(self, space: Space):
        self._power_of_two_counts: list[tuple[int, np.ndarray]] = []  # exponent of two in each option of a knob
        self._equality_knobs: list[int] = []
        for knob_index, knob in enumerate(space.knobs.values()):
            if knob.size < 3:  # the features already distinguish the options
                continue
            kind = knob.option_table.dtype.kind if isinstance(knob, ChoiceKnob) else "split"
            if kind not in tuple("biuf"):
                self._equality_knobs.append(knob_index)
            elif kind in "iu" and knob.option_table.min() >= 1:
                options = knob.option_table
                if (options & (options - 1)).any():  # not all of them are powers of two
                    self._power_of_two_counts.append((knob_index, np.log2(options & -options)))

    def encode(self, points: np.ndarray, features: np.ndarray) -> GPInputs:
        """Return the encoded configs of points (n, knobs) with features (n, features)."""
        powers = [counts[points[:, knob_index]] for knob_index, counts in self._power_of_two_counts]
        return GPInputs(np.column_stack([features.astype(float), *powers]), points[:, self._equality_knobs])


class GaussianProcess:
    """A Gaussian process with a Matérn-5/2 kernel, and a length scale for each feature and each knob. The covariance of
    two configs is large if they are close in all features and differ in few knobs. A few iterations of L-BFGS maximize
    the posterior density of the kernel parameters, starting from `parameters`. Larger values are better; one has to
    exceed the largest value by `margin` to be an improvement.
    """

    def __init__(self, inputs: GPInputs, values: np.ndarray, parameters: np.ndarray | None = None, margin: float = 0.0):
        selected = _select_best_and_spread(values, _MAX_INPUTS)
        inputs, values = inputs[selected], values[selected]
        self._feature_min = inputs.features.min(axis=0)
        self._feature_range = np.ptp(inputs.features, axis=0)
        self._feature_range[self._feature_range == 0] = 1
        self._inputs = self._scale_features(inputs)
        std = max(values.std(), 1e-9)
        targets = (values - values.mean()) / std
        self.best_target = float(targets.max() + margin / std)  # in the units of predictions
        distances = _compute_squared_distances(self._inputs)
        fit_indices = _select_best_and_spread(targets, _MAX_FIT_INPUTS)
        rows, columns = np.ix_(fit_indices, fit_indices)
        self.parameters = _fit_kernel(
            distances[:, rows, columns], targets[fit_indices], inputs.features.shape[1], parameters
        )
        weights, variance, noise = _split_parameters(self.parameters)
        correlation, _ = _evaluate_matern_with_slope(np.tensordot(weights, distances, 1))
        factor = np.linalg.cholesky(variance * correlation + (noise + _JITTER) * np.eye(len(targets)))
        self._solved_targets = _solve_cholesky(factor, targets)
        self._inverse_factor = np.linalg.inv(factor).astype(np.float32)
        knob_values = [
            (knob_index, value)
            for knob_index, column in enumerate(inputs.points.T)
            for value in np.unique(column).tolist()
        ]
        self._knob_values = np.array(knob_values, dtype=np.intp).reshape(-1, 2)  # pairs of knob index and value

    def predict(self, inputs: GPInputs) -> tuple[np.ndarray, np.ndarray]:
        """Return the mean and the standard deviation of the value of each config: float (n,), (n,)."""
        batches = [
            self._predict_batch(inputs[start : start + _PREDICTION_BATCH_SIZE])
            for start in range(0, max(len(inputs.points), 1), _PREDICTION_BATCH_SIZE)
        ]
        mean, variance = (np.concatenate(arrays) for arrays in zip(*batches, strict=True))
        return mean, np.sqrt(variance)

    def _predict_batch(self, inputs: GPInputs) -> tuple[np.ndarray, np.ndarray]:
        """Return the mean and the variance for one batch, which is so small that its matrices fit in the cache."""
        weights, variance, _ = _split_parameters(self.parameters)
        inputs = self._scale_features(inputs)
        scales, knob_weights = np.split(weights, [inputs.features.shape[1]])
        measured_features, query_features = (each.features * np.sqrt(scales) for each in (self._inputs, inputs))
        squared_distance = (
            (measured_features**2).sum(axis=1)[:, None]
            + (query_features**2).sum(axis=1)
            - 2 * measured_features @ query_features.T
        )
        squared_distance += knob_weights.sum()
        squared_distance = squared_distance.astype(np.float32)  # float32 products are twice as fast
        # The weight of equal knobs, as a product of matrices with a column for each value of a knob. It takes a
        # hundredth of the time of comparing all pairs.
        knobs, values = self._knob_values.T
        query_matches = (inputs.points[:, knobs] == values).astype(np.float32)
        measured_matches = (self._inputs.points[:, knobs] == values) * knob_weights[knobs].astype(np.float32)
        squared_distance -= measured_matches @ query_matches.T
        covariance = np.float32(variance) * _evaluate_matern(np.maximum(squared_distance, 0, out=squared_distance))
        whitened = self._inverse_factor @ covariance
        return self._solved_targets @ covariance, np.maximum(variance - (whitened**2).sum(axis=0), _JITTER)

    def _scale_features(self, inputs: GPInputs) -> GPInputs:
        return replace(inputs, features=(inputs.features - self._feature_min) / self._feature_range)


def log_expected_improvement(process: GaussianProcess, inputs: GPInputs, best: float | None = None) -> np.ndarray:
    """Return the logarithm of the expected improvement over `best`, by default the best target: float (n,). It is the
    criterion of Mockus, "Bayesian Approach to Global Optimization", Kluwer 1989. For very small improvements, the
    logarithm is that of an asymptote.
    """
    from scipy.special import log_ndtr, ndtr

    mean, std = process.predict(inputs)
    z_score = (mean - (process.best_target if best is None else best)) / std
    density = np.exp(-(z_score**2) / 2) / np.sqrt(2 * np.pi)
    with np.errstate(divide="ignore", invalid="ignore"):
        log_near = np.log(z_score * ndtr(z_score) + density)
    log_far = log_ndtr(z_score) - np.log(np.maximum(-z_score, 1))
    return np.log(std) + np.where(z_score > -5, log_near, log_far)


def _fit_kernel(distances: np.ndarray, targets: np.ndarray, num_features: int, start: np.ndarray | None) -> np.ndarray:
    """Return kernel parameters with a larger posterior density than those of `start`, or than the prior's means. The
    distances are squared ones in each feature and each knob, float (features + knobs, n, n); the targets are
    standardized, float (n,). The parameters are logarithms of the distances' weights, of the variance and of the noise.
    """
    from scipy.optimize import minimize

    num_knobs = len(distances) - num_features
    weight_means = [_FEATURE_WEIGHT_MEAN] * num_features + [_KNOB_WEIGHT_MEAN] * num_knobs
    prior_means = np.array([*weight_means, _VARIANCE_MEAN, _NOISE_MEAN])
    prior_stds = np.array([_WEIGHT_STD] * len(distances) + [_VARIANCE_STD, _NOISE_STD])

    def negative_log_density(parameters: np.ndarray) -> tuple[float, np.ndarray]:
        """Return it up to a constant, and its gradient, by equations 5.8 and 5.9."""
        weights, variance, noise = _split_parameters(parameters)
        correlation, correlation_slope = _evaluate_matern_with_slope(np.tensordot(weights, distances, 1))
        covariance = variance * correlation + (noise + _JITTER) * np.eye(len(targets))
        factor = np.linalg.cholesky(covariance)
        inverse = _solve_cholesky(factor, np.eye(len(targets)))
        solved_targets = inverse @ targets
        z_score = (parameters - prior_means) / prior_stds
        value = 0.5 * targets @ solved_targets + np.log(np.diag(factor)).sum() + 0.5 * z_score @ z_score
        gradient_weights = np.outer(solved_targets, solved_targets) - inverse
        slopes = (gradient_weights * variance * correlation_slope).ravel()
        by_weight = weights * (distances.reshape(len(weights), -1) @ slopes)
        by_scale = [variance * (gradient_weights * correlation).sum(), noise * np.trace(gradient_weights)]
        return value, z_score / prior_stds - 0.5 * np.concatenate([by_weight, by_scale])

    start_parameters = prior_means if start is None else start
    options = {"maxiter": _MAX_FIT_ITERATIONS}
    return minimize(negative_log_density, start_parameters, jac=True, method="L-BFGS-B", options=options).x


def _split_parameters(parameters: np.ndarray) -> tuple[np.ndarray, float, float]:
    """Return the weights of squared distances, the variance, and the noise."""
    *weights, variance, noise = np.exp(np.clip(parameters, -20, 20))
    return np.array(weights), variance, noise


def _compute_squared_distances(inputs: GPInputs) -> np.ndarray:
    """Return squared distances in each feature, and 0 or 1 for each knob: float (features + knobs, n, n)."""
    features, points = inputs.features.T, inputs.points.T
    feature_distances = (features[:, :, None] - features[:, None]) ** 2
    return np.concatenate([feature_distances, points[:, :, None] != points[:, None]])


def _evaluate_matern(squared: np.ndarray) -> np.ndarray:
    """Return the Matérn-5/2 kernel of squared distances."""
    distance = np.sqrt(5 * squared)
    return (1 + distance * (1 + distance / 3)) * np.exp(-distance)


def _evaluate_matern_with_slope(squared: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the Matérn-5/2 kernel of squared distances, and its derivative by them."""
    distance = np.sqrt(5 * squared)
    decay = np.exp(-distance)
    return (1 + distance + distance**2 / 3) * decay, -5 / 6 * (1 + distance) * decay


def _solve_cholesky(factor: np.ndarray, right_side: np.ndarray) -> np.ndarray:
    from scipy.linalg import cho_solve

    return cho_solve((factor, True), right_side, check_finite=False)


def _select_best_and_spread(values: np.ndarray, max_count: int) -> np.ndarray:
    """Return at most `max_count` indices: half of them of the best values, the others evenly spread over the rest."""
    order = np.argsort(-values, kind="stable")
    if len(order) <= max_count:
        return order
    half = max_count // 2
    return np.concatenate([order[:half], order[np.linspace(half, len(order) - 1, max_count - half).astype(int)]])
