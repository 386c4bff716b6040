"""An output compared with what is right: with the whole of it, with a sample, or with both."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tvmconv.workloads.base import Points

if TYPE_CHECKING:
    from numpy.typing import NDArray

CHUNK = 1 << 22  # elements that a thread looks at


@dataclass(frozen=True)
class Comparison:
    """How far an output is from what is right.

    Attributes:
        error: relative L2 error, ‖output - reference‖ / ‖reference‖, over all outputs or those of the sample; NaN where
            any element of the whole output is NaN, infinite where one is infinite.
        worst: the largest error of a single output of the sample, over what rounding may change of it; 0 without one.
    """

    error: float
    worst: float = 0.0

    def is_right(self, tolerance: float) -> bool:
        """Whether a kernel with this error, at most `tolerance` relative to the output, computed what it should."""
        return self.error <= tolerance and self.worst <= 1.0  # False for NaN

    def fault(self, tolerance: float) -> str:
        """What is wrong with a kernel that is not right, in a few words."""
        if np.isnan(self.error):
            return "some elements are NaN, which is what the output held before"
        if not self.error <= tolerance:
            return f"relative L2 error {self.error:.2g} against the reference: expected at most {tolerance:g}"
        return f"a single output is off by {self.worst:.3g} times what rounding may change of it"


@dataclass(frozen=True)
class Reference:
    """What is right.

    Attributes:
        whole: all outputs in float64; None where only a sample is compared.
        points: a sample of them, each with the error that it may have; None where the whole tells enough.
    """

    whole: NDArray[np.float64] | None = None
    points: Points | None = None

    @property
    def norm(self) -> float:
        """What errors are relative to: the L2 norm of what the output is compared with; 1 if that is zero."""
        assert self.whole is not None or self.points is not None
        values = self.whole if self.whole is not None else self.points.values  # type: ignore[union-attr]
        return float(np.linalg.norm(values)) or 1.0

    @property
    def sampled(self) -> int | None:
        """How many outputs are compared, where that is a sample; None where all are."""
        return self.points.values.size if self.whole is None and self.points is not None else None

    def compare(self, output: NDArray[Any]) -> Comparison:
        """Compare an output, on the host."""
        worst = 0.0
        if self.points is not None:
            found = output.reshape(-1)[self.points.positions].astype(np.float64)
            difference = np.abs(found - self.points.values)
            worst = float(np.max(difference / self.points.allowed, initial=0.0))
        if self.whole is not None:
            error = relative_error(output, self.whole)
        else:
            error = float(np.linalg.norm(difference)) / self.norm + _not_finite(output)
        return Comparison(error, worst)


def as_reference(reference: Reference | NDArray[np.float64]) -> Reference:
    """A reference as it is, an array as the whole output."""
    return reference if isinstance(reference, Reference) else Reference(np.asarray(reference))


def relative_error(output: NDArray[Any], reference: NDArray[np.float64]) -> float:
    """‖output - reference‖ / ‖reference‖ in float64; NaN if any element of `output` is NaN."""
    scale = np.linalg.norm(reference)
    return float(np.linalg.norm(output - reference) / (scale if scale else 1.0))


def _not_finite(output: NDArray[Any]) -> float:
    """NaN if any element is NaN, infinity if one is infinite, else zero."""
    flat = output.reshape(-1)

    def parts() -> Iterator[NDArray[Any]]:
        return (flat[start : start + CHUNK] for start in range(0, flat.size, CHUNK))

    def worst_of(part: NDArray[Any]) -> float:
        return 0.0 if np.isfinite(part).all() else float(np.abs(part.astype(np.float32)).max())  # NaN if there is one

    with ThreadPoolExecutor() as threads:
        found = [each for each in threads.map(worst_of, parts()) if each]
    return float(np.nan if any(map(np.isnan, found)) else np.inf if found else 0.0)
