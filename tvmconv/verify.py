"""What "verified" means: a kernel's output against float64, on fresh random inputs, every element accounted for.

The error is relative to the output: ‖output - reference‖ / ‖reference‖. What a right kernel errs by is a share of the
output where it rounds as it stores, but a share of the sums where it adds in float32 and applies an epilogue to that.
Both are of one size where outputs are about as large as their sums, as most of many outputs are: a sum of products of
standard normal numbers is positive half of the time, and nearly always far from zero. Of few outputs none may be. GELU
makes -1e-9 of a sum of -6.3, and 1 + erf in float32 makes zero: the relative error of a right kernel is 1 then. And
where ReLU makes zeros, it is 0 for a kernel that stores nothing else. Such inputs tell nothing of a kernel, whatever
its error is compared with: so those of few outputs are the best of several draws, the ones of the largest output.
"""

from __future__ import annotations

import functools
import os
import secrets
from dataclasses import dataclass

import numpy as np

from tvmconv.devices.base import relative_error
from tvmconv.errors import WorkloadError
from tvmconv.workloads import Workload
from tvmconv.workloads.dtypes import numpy_dtype

ENOUGH = 64  # outputs, of all draws together: that an epilogue makes zeros of all of them has a probability of 2^-64


@dataclass(frozen=True)
class Verification:
    """How far an output is from the reference.

    Attributes:
        error: relative L2 error, ‖output - reference‖ / ‖reference‖; NaN when the kernel left an element unwritten.
        tolerance: the largest error that counts as correct for the workload's dtype.
    """

    error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether the kernel computed the workload."""
        return self.error <= self.tolerance


class Problem:
    """A workload with inputs: what several kernels are verified and timed on.

    Args:
        workload: the workload.
        seed: of the inputs; by default a fresh one, of few outputs the one of several with the largest output.

    Raises:
        WorkloadError: inputs and reference do not fit in this machine's memory.
    """

    def __init__(self, workload: Workload, seed: int | None = None):
        self.workload = workload
        self._given = seed
        *inputs, output = workload.argument_shapes
        needed = sum(4 * _elements(shape) for shape in inputs) + 3 * 8 * _elements(output)
        present = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if needed > present:
            raise WorkloadError(
                f"{workload} needs {needed / 1e9:.1f} GB for its inputs and float64 reference; "
                f"this machine has {present / 1e9:.1f} GB"
            )

    @property
    def nbytes(self) -> int:
        """The size of inputs and reference together, known before they are computed."""
        *inputs, output = self.workload.argument_shapes
        kept = sum(
            _elements(shape) * numpy_dtype(dtype).itemsize
            for shape, dtype in zip(inputs, self.workload.argument_dtypes[:-1], strict=True)
        )
        return kept + 8 * _elements(output)

    @functools.cached_property
    def seed(self) -> int:
        """Of the inputs."""
        if self._given is not None:
            return self._given
        drawn = [secrets.randbits(32) for _ in range(-(-ENOUGH // _elements(self.workload.argument_shapes[-1])))]
        return max(drawn, key=self._output_norm) if len(drawn) > 1 else drawn[0]

    def _output_norm(self, seed: int) -> float:
        return float(np.linalg.norm(self.workload.reference(*self.workload.inputs(seed))))

    @functools.cached_property
    def inputs(self) -> tuple[np.ndarray, ...]:
        """Random inputs in the workload's dtype."""
        return self.workload.inputs(self.seed)

    @functools.cached_property
    def reference(self) -> np.ndarray:
        """The output in float64."""
        return self.workload.reference(*self.inputs)

    def check(self, output: np.ndarray) -> Verification:
        """Compare an output with the reference."""
        error = relative_error(output, self.reference)
        return Verification(error, self.workload.tolerance)


def _elements(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64))
