"""An output compared with what is right: with the whole of it, with a sample, or with both."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tvmconv.workloads.base import OutputSample

if TYPE_CHECKING:
    from numpy.typing import NDArray

CHUNK_ELEMENTS = 1 << 22  # elements that a thread looks at


@dataclass(frozen=True)
class OutputComparison:
    """How far an output is from what is right.

    Attributes:
        relative_error: relative L2 error, ‖output - reference‖ / ‖reference‖, over all outputs or those of the sample;
            NaN where any element of the whole output is NaN, infinite where one is infinite.
        max_error_ratio: the largest error of a single output of the sample, over what rounding may change of it; 0
            without one.
    """

    relative_error: float
    max_error_ratio: float = 0.0

    def is_within_tolerance(self, tolerance: float) -> bool:
        """Whether a kernel with this error, at most `tolerance` relative to the output, computed what it should."""
        return self.relative_error <= tolerance and self.max_error_ratio <= 1.0  # False for NaN

    def describe_mismatch(self, tolerance: float) -> str:
        """What is wrong with a kernel that is not right, in a few words."""
        if np.isnan(self.relative_error):
            return "some elements are NaN, which is what the output held before"
        if not self.relative_error <= tolerance:
            return f"relative L2 error {self.relative_error:.2g} against the reference: expected at most {tolerance:g}"
        return f"a single output is off by {self.max_error_ratio:.3g} times what rounding may change of it"


@dataclass(frozen=True)
class ReferenceOutput:
    """What is right.

    Attributes:
        full_output: all outputs in float64; None where only a sample is compared.
        sample: a sample of them, each with the error that it may have; None where the whole tells enough.
    """

    full_output: NDArray[np.float64] | None = None
    sample: OutputSample | None = None

    @property
    def l2_norm(self) -> float:
        """What errors are relative to: the L2 norm of what the output is compared with; 1 if that is zero."""
        assert self.full_output is not None or self.sample is not None
        values = self.full_output if self.full_output is not None else self.sample.values  # type: ignore[union-attr]
        return float(np.linalg.norm(values)) or 1.0

    @property
    def num_sampled(self) -> int | None:
        """How many outputs are compared, where that is a sample; None where all are."""
        return self.sample.values.size if self.full_output is None and self.sample is not None else None

    def compare(self, output: NDArray[Any]) -> OutputComparison:
        """Compare an output, on the host."""
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


def make_reference(reference: ReferenceOutput | NDArray[np.float64]) -> ReferenceOutput:
    """A reference as it is, an array as the whole output."""
    return reference if isinstance(reference, ReferenceOutput) else ReferenceOutput(np.asarray(reference))


def compute_relative_error(output: NDArray[Any], reference: NDArray[np.float64]) -> float:
    """‖output - reference‖ / ‖reference‖ in float64; NaN if any element of `output` is NaN."""
    scale = np.linalg.norm(reference)
    return float(np.linalg.norm(output - reference) / (scale if scale else 1.0))


def _find_nonfinite(output: NDArray[Any]) -> float:
    """NaN if any element is NaN, infinity if one is infinite, else zero."""
    flat = output.reshape(-1)

    def iterate_chunks() -> Iterator[NDArray[Any]]:
        return (flat[start : start + CHUNK_ELEMENTS] for start in range(0, flat.size, CHUNK_ELEMENTS))

    def find_nonfinite_in_chunk(chunk: NDArray[Any]) -> float:
        return 0.0 if np.isfinite(chunk).all() else float(np.abs(chunk.astype(np.float32)).max())  # NaN if there is one

    with ThreadPoolExecutor() as threads:
        nonfinite_values = [value for value in threads.map(find_nonfinite_in_chunk, iterate_chunks()) if value]
    return float(np.nan if any(map(np.isnan, nonfinite_values)) else np.inf if nonfinite_values else 0.0)
