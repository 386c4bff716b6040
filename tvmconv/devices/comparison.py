"""Comparison of an output with a float64 reference: the full output, a sample of it, or both."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvmconv.workloads.base import OutputSample

CHUNK_ELEMENTS = 1 << 22  # elements per task of the thread pool


@dataclass(frozen=True)
class OutputComparison:
    """Errors of an output."""

    # Relative L2 error ‖output - reference‖ / ‖reference‖ over the compared outputs; NaN if any element of the whole
    # output is NaN, infinite if one is infinite.
    relative_error: float
    # Largest error of a sampled output, relative to the error that rounding may cause; 0 without a sample.
    max_error_ratio: float = 0.0

    def is_within_tolerance(self, tolerance: float) -> bool:
        """Return whether the output is correct, given the largest accepted relative error."""
        return self.relative_error <= tolerance and self.max_error_ratio <= 1.0  # False for NaN

    def describe_mismatch(self, tolerance: float) -> str:
        """Return a short description of the mismatch of a wrong output."""
        if np.isnan(self.relative_error):
            return "some elements are NaN, with which the output was filled before"
        if not self.relative_error <= tolerance:
            return f"relative L2 error {self.relative_error:.2g} against the reference: expected at most {tolerance:g}"
        return f"a single output is off by {self.max_error_ratio:.3g} times the error that rounding may cause"


@dataclass(frozen=True)
class ReferenceOutput:
    """Reference of a comparison."""

    full_output: NDArray[np.float64] | None = None  # all outputs in float64; None if only a sample is compared
    # Sampled outputs with their largest allowed errors; None if only the full output is compared.
    sample: OutputSample | None = None
    # Whether the kernel also returns mean and variance of each channel of the output, which is channels last.
    returns_stats: bool = False
    stats_tolerance: float = 0.0  # largest error of a statistic, see `compare_stats`

    @property
    def l2_norm(self) -> float:
        """L2 norm of the reference values, to which errors are relative; 1 if the norm is zero."""
        assert self.full_output is not None or self.sample is not None
        values = self.full_output if self.full_output is not None else self.sample.values  # type: ignore[union-attr]
        return float(np.linalg.norm(values)) or 1.0

    @property
    def num_sampled(self) -> int | None:
        """Number of compared outputs if only a sample is compared, else None."""
        return self.sample.values.size if self.full_output is None and self.sample is not None else None

    def compare(self, output: NDArray[Any]) -> OutputComparison:
        """Compare an output on the host."""
        max_error_ratio = 0.0
        if self.sample is not None:
            sampled_outputs = output.reshape(-1)[self.sample.positions].astype(np.float64)
            difference = np.abs(sampled_outputs - self.sample.values)
            max_error_ratio = float(np.max(difference / self.sample.max_errors, initial=0.0))
        if self.full_output is not None:
            error = compute_relative_error(output, self.full_output)
        else:
            error = float(np.linalg.norm(difference)) / self.l2_norm + _find_nonfinite(output)
        return OutputComparison(error, max_error_ratio)


def compute_stats(output: NDArray[Any]) -> NDArray[np.float64]:
    """Return mean and biased variance of each channel of an output that is channels last, of shape (2, channels)."""
    columns = output.reshape(-1, output.shape[-1]).astype(np.float64)
    return np.stack([columns.mean(0), columns.var(0)])


def compare_stats(stats: NDArray[Any], expected: NDArray[np.float64], tolerance: float) -> float:
    """Return the largest error of statistics of channels relative to the allowed one; NaN if one is NaN.

    The allowed errors are the tolerance times the root mean square of a channel for its mean, and times twice the mean
    square for its variance.
    """
    square = expected[0] ** 2 + expected[1]
    allowed = tolerance * np.stack([np.sqrt(square), 2 * square]) + np.finfo(np.float32).tiny
    return float(np.max(np.abs(stats - expected) / allowed))


def make_reference(reference: ReferenceOutput | NDArray[np.float64]) -> ReferenceOutput:
    """Return a reference unchanged, or make one from the array of the full output."""
    return reference if isinstance(reference, ReferenceOutput) else ReferenceOutput(np.asarray(reference))


def compute_relative_error(output: NDArray[Any], reference: NDArray[np.float64]) -> float:
    """Return ‖output - reference‖ / ‖reference‖ in float64; NaN if any element of `output` is NaN."""
    scale = np.linalg.norm(reference)
    return float(np.linalg.norm(output - reference) / (scale if scale else 1.0))


def _find_nonfinite(output: NDArray[Any]) -> float:
    """Return NaN if any element is NaN, infinity if one is infinite, and otherwise zero."""
    flat = output.reshape(-1)
    chunks = [flat[start : start + CHUNK_ELEMENTS] for start in range(0, flat.size, CHUNK_ELEMENTS)]

    def find_in_chunk(chunk: NDArray[Any]) -> float:
        return 0.0 if np.isfinite(chunk).all() else float(np.abs(chunk.astype(np.float32)).max())

    with ThreadPoolExecutor() as threads:
        return float(np.max([*threads.map(find_in_chunk, chunks)]))  # NaN if there is one
