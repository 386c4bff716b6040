"""Gaussian process regression, which predicts the value of configs and its uncertainty from measured configs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tvmconv.search.tuners.gp_inputs import GPInputs

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


class GaussianProcess:
    """A Gaussian process with a Matérn-5/2 kernel, and a length scale for each feature and each knob.

    The covariance of two configs is large if they are close in all features and differ in few knobs. A few iterations
    of L-BFGS maximize the posterior density of the kernel parameters. (Rasmussen and Williams, "Gaussian Processes for
    Machine Learning", MIT Press 2006, chapters 2, 4 and 5.) Larger values are better. `parameters` starts the fit, and
    a value has to exceed the largest one by `margin` to be an improvement. `best_target` is in the units of
    predictions.
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
        self.best_target = float(targets.max() + margin / std)
        distances = _compute_squared_distances(self._inputs)
        fit_indices = _select_best_and_spread(targets, _MAX_FIT_INPUTS)
        fit_block = np.ix_(fit_indices, fit_indices)
        start_parameters = _make_kernel_prior(inputs)[0] if parameters is None else parameters
        posterior = _KernelPosterior(
            distances[:, fit_block[0], fit_block[1]], targets[fit_indices], *_make_kernel_prior(inputs)
        )
        self.parameters = posterior.maximise(start_parameters)
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
        measured_matches, query_matches = self._match_matrices(inputs, knob_weights)
        squared_distance -= measured_matches @ query_matches.T
        covariance = np.float32(variance) * _evaluate_matern(np.maximum(squared_distance, 0, out=squared_distance))
        whitened = self._inverse_factor @ covariance
        return self._solved_targets @ covariance, np.maximum(variance - (whitened**2).sum(axis=0), _JITTER)

    def _match_matrices(self, inputs: GPInputs, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return two matrices whose product holds the total weight of the equal knobs of each pair of configs.

        Each column stands for one value of one knob. The product takes a hundredth of the time of comparing all pairs.
        """
        knobs, values = self._knob_values.T
        query_matches = (inputs.points[:, knobs] == values).astype(np.float32)
        return (self._inputs.points[:, knobs] == values) * weights[knobs].astype(np.float32), query_matches

    def _scale_features(self, inputs: GPInputs) -> GPInputs:
        return GPInputs((inputs.features - self._feature_min) / self._feature_range, inputs.points)


def log_expected_improvement(process: GaussianProcess, inputs: GPInputs, best: float | None = None) -> np.ndarray:
    """Return the logarithm of the expected improvement over `best`, by default the best target: float (n,).

    It is the criterion of Mockus, "Bayesian Approach to Global Optimization", Kluwer 1989. For very small improvements,
    the logarithm is that of an asymptote.
    """
    from scipy.special import log_ndtr, ndtr

    mean, std = process.predict(inputs)
    z_score = (mean - (process.best_target if best is None else best)) / std
    density = np.exp(-(z_score**2) / 2) / np.sqrt(2 * np.pi)
    with np.errstate(divide="ignore", invalid="ignore"):
        log_near = np.log(z_score * ndtr(z_score) + density)
    log_far = log_ndtr(z_score) - np.log(np.maximum(-z_score, 1))
    return np.log(std) + np.where(z_score > -5, log_near, log_far)


@dataclass(frozen=True)
class _KernelPosterior:
    """The posterior density of the kernel parameters."""

    distances: np.ndarray  # squared distances in each feature and each knob: float (features + knobs, n, n)
    targets: np.ndarray  # standardized values: float (n,)
    prior_means: np.ndarray  # means of the parameters' prior
    prior_stds: np.ndarray  # standard deviations of the parameters' prior

    def maximise(self, start: np.ndarray) -> np.ndarray:
        """Return parameters with a larger density than those of `start`."""
        from scipy.optimize import minimize

        return minimize(
            self._negative_log, start, jac=True, method="L-BFGS-B", options={"maxiter": _MAX_FIT_ITERATIONS}
        ).x

    def _negative_log(self, parameters: np.ndarray) -> tuple[float, np.ndarray]:
        """Return the negative logarithm of the density, up to a constant, and its gradient.

        The formulas are equations 5.8 and 5.9 of Rasmussen and Williams.
        """
        weights, variance, noise = _split_parameters(parameters)
        correlation, correlation_slope = _evaluate_matern_with_slope(np.tensordot(weights, self.distances, 1))
        covariance = variance * correlation + (noise + _JITTER) * np.eye(len(self.targets))
        factor = np.linalg.cholesky(covariance)
        inverse = _solve_cholesky(factor, np.eye(len(self.targets)))
        solved_targets = inverse @ self.targets
        prior_z_score = (parameters - self.prior_means) / self.prior_stds
        value = (
            0.5 * self.targets @ solved_targets + np.log(np.diag(factor)).sum() + 0.5 * prior_z_score @ prior_z_score
        )
        gradient_weights = np.outer(solved_targets, solved_targets) - inverse
        slopes = (gradient_weights * variance * correlation_slope).ravel()
        by_weight = weights * (self.distances.reshape(len(weights), -1) @ slopes)
        by_scale = [variance * (gradient_weights * correlation).sum(), noise * np.trace(gradient_weights)]
        return value, prior_z_score / self.prior_stds - 0.5 * np.concatenate([by_weight, by_scale])


def _make_kernel_prior(inputs: GPInputs) -> tuple[np.ndarray, np.ndarray]:
    """Return the prior's means and standard deviations of the weights of features and knobs, variance and noise."""
    features, knobs = inputs.features.shape[1], inputs.points.shape[1]
    means = [_FEATURE_WEIGHT_MEAN] * features + [_KNOB_WEIGHT_MEAN] * knobs + [_VARIANCE_MEAN, _NOISE_MEAN]
    stds = [_WEIGHT_STD] * (features + knobs) + [_VARIANCE_STD, _NOISE_STD]
    return np.array(means), np.array(stds)


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
