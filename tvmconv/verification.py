"""Verification of a kernel's output against a float64 reference on fresh random inputs.

The error is relative to the output: ‖output - reference‖ / ‖reference‖. Float32 accumulation causes an error
proportional to the sums, which an epilogue may map to outputs near zero. On average over many outputs both have the
same magnitude. For workloads with few outputs, the inputs are therefore the draw of several with the largest output
norm.

The relative error over many outputs hardly changes if a few are wrong. A convolution with more than `MANY_OUTPUTS`
outputs is therefore also checked on a random sample, in which each output is compared with the largest error that
rounding explains (`Conv.sample_outputs`). Above `FULL_FLOPS` only that sample is computed. The whole output is always
checked for elements that are unwritten or not finite. The section "A sample of the outputs" of docs/verification.md
states what the sample covers, and with which probabilities it detects a fault.
"""

from __future__ import annotations

import functools
import os
import secrets
from dataclasses import dataclass

import numpy as np

from tvmconv.arithmetic import ceil_div
from tvmconv.devices.comparison import OutputComparison, ReferenceOutput, compare_stats, compute_stats
from tvmconv.errors import WorkloadError
from tvmconv.workloads import Conv, Workload
from tvmconv.workloads.dtypes import get_numpy_dtype
from tvmconv.workloads.epilogue import STATS
from tvmconv.workloads.pixel_sample import MAX_CELL, MIN_CELL, choose_cell

FULL_FLOPS = 20e9  # FLOP up to which every output is computed in float64
MANY_OUTPUTS = 1 << 20  # number of outputs above which the relative error may hide a few wrong ones
SAMPLED_OUTPUT_BYTES = 64  # memory per sampled output during the computation; 20 bytes afterwards
VERIFICATION_MODES = ("auto", "sample", "full")
MIN_SAMPLED_OUTPUTS = 4096  # all outputs are compared if there are fewer than four times as many
MIN_DRAWN_OUTPUTS = 64  # total outputs of all draws: ReLU makes all of them zero with a probability of 2^-64


@dataclass(frozen=True)
class Verification:
    """Result of the comparison of an output with its reference.

    Attributes:
        error: Relative L2 error, ‖output - reference‖ / ‖reference‖; NaN if the kernel left an element unwritten.
        tolerance: Largest accepted relative error for the workload's dtype.
        worst: Largest error of a sampled output, relative to the error that rounding explains; 0 without a sample.
        sampled: Number of compared outputs if only a sample was compared, else None.

    Examples:
        >>> import tvmconv as tc
        >>> tc.Verification(error=2e-7, tolerance=1e-5).ok
        True
    """

    error: float
    tolerance: float
    worst: float = 0.0
    sampled: int | None = None

    @property
    def ok(self) -> bool:
        """Whether the output is correct."""
        return self._comparison.is_within_tolerance(self.tolerance)

    @property
    def fault(self) -> str:
        """Short description of the mismatch of a wrong output."""
        return self._comparison.describe_mismatch(self.tolerance)

    @property
    def _comparison(self) -> OutputComparison:
        return OutputComparison(self.error, self.worst)


def is_sampled(workload: Workload, mode: str = "auto", full_flops: float = FULL_FLOPS) -> bool:
    """Return whether only a sample of a workload's outputs is computed in float64. "auto" samples above `full_flops`,
    "sample" whenever there are enough outputs, and "full" never.
    """
    if mode not in VERIFICATION_MODES:
        raise WorkloadError(f"verification {mode!r}: expected one of {', '.join(VERIFICATION_MODES)}")
    if mode == "full" or not isinstance(workload, Conv):
        return False
    if _count_elements(workload.output_shape) < MIN_CELL * MIN_SAMPLED_OUTPUTS:
        return False
    return mode == "sample" or workload.flops > full_flops


class Problem:
    """A workload with inputs on which several kernels are verified and timed.

    Args:
        workload: Workload to compute.
        seed: Seed of the inputs. By default it is fresh; for few outputs, it is the one of several with the largest
            output norm.
        mode: Comparison of all outputs or of a sample, see `is_sampled`.
        full_flops: FLOP above which the mode "auto" samples.
        cell: Inverse density of the sample, which has about one pixel in cell / 2; `choose_cell` sets the default.

    Raises:
        WorkloadError: Inputs and reference do not fit in this machine's memory, or the mode is unknown.

    Examples:
        >>> import tvmconv
        >>> problem = Problem(tvmconv.parse("conv2d:1x4x8x8,4x4x3x3,s1,p1"), seed=0)
        >>> problem.check(problem.reference.astype("float32")).ok
        True
    """

    def __init__(
        self,
        workload: Workload,
        seed: int | None = None,
        *,
        mode: str = "auto",
        full_flops: float = FULL_FLOPS,
        cell: int | None = None,
    ):
        self.workload = workload
        self.is_sampled = is_sampled(workload, mode, full_flops)
        self.mode = mode
        self._fixed_seed = seed
        self._cell = self._choose_cell() if cell is None else cell
        *input_counts, output_count = map(_count_elements, workload.argument_shapes)
        sample_bytes = self.num_sampled_outputs * SAMPLED_OUTPUT_BYTES
        required_bytes = 4 * sum(input_counts) + sample_bytes + output_count * (4 if self.is_sampled else 3 * 8)
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if required_bytes > memory_bytes:
            raise WorkloadError(
                f"{workload} needs {required_bytes / 1e9:.1f} GB for its inputs and float64 reference; "
                f"this machine has {memory_bytes / 1e9:.1f} GB"
            )

    def _choose_cell(self) -> int:
        """Return the cell of the sample, or 0 without a sample."""
        if not isinstance(self.workload, Conv):
            return 0
        if self.is_sampled:
            return choose_cell(self.workload)
        return MAX_CELL if _count_elements(self.workload.argument_shapes[-1]) > MANY_OUTPUTS else 0

    @property
    def num_sampled_outputs(self) -> int:
        """Approximate number of outputs in the sample; 0 without a sample."""
        return 2 * _count_elements(self.workload.argument_shapes[-1]) // self._cell if self._cell else 0

    @property
    def nbytes(self) -> int:
        """Approximate size of inputs and reference in bytes, known before they are computed."""
        *inputs, output = self.workload.argument_shapes
        input_bytes = sum(
            _count_elements(shape) * get_numpy_dtype(dtype).itemsize
            for shape, dtype in zip(inputs, self.workload.argument_dtypes[:-1], strict=True)
        )
        return input_bytes + 20 * self.num_sampled_outputs + 8 * _count_elements(output) * (not self.is_sampled)

    @functools.cached_property
    def seed(self) -> int:
        """Seed of the inputs."""
        if self._fixed_seed is not None:
            return self._fixed_seed
        num_draws = ceil_div(MIN_DRAWN_OUTPUTS, _count_elements(self.workload.argument_shapes[-1]))
        seeds = [secrets.randbits(32) for _ in range(num_draws)]
        return max(seeds, key=self._output_norm) if num_draws > 1 else seeds[0]

    def _output_norm(self, seed: int) -> float:
        return float(np.linalg.norm(self.workload.reference(*self.workload.inputs(seed))))

    @functools.cached_property
    def inputs(self) -> tuple[np.ndarray, ...]:
        """Random inputs in the dtypes of the workload."""
        return self.workload.inputs(self.seed)

    @functools.cached_property
    def reference(self) -> np.ndarray:
        """Full output in float64, even if only a sample is compared."""
        return self.workload.reference(*self.inputs)

    @functools.cached_property
    def expected_output(self) -> ReferenceOutput:
        """Reference that outputs are compared with: the full output, a sample of it, or both."""
        points = None
        if self._cell and isinstance(self.workload, Conv):
            points = self.workload.sample_outputs(self._cell, self.seed, *self.inputs)
        stats = _returns_stats(self.workload), self.workload.tolerance
        return ReferenceOutput(None if self.is_sampled else self.reference, points, *stats)

    def check(self, output: np.ndarray, stats: np.ndarray | None = None) -> Verification:
        """Compare an output with the reference.

        Args:
            output: Array of the workload's output shape and dtype, in memory order.
            stats: Statistics of the output's channels that the kernel returned; they are compared with those of the
                output. None to compare the output alone.

        Returns:
            The relative L2 error, and whether the output is within the tolerance.
        """
        comparison, num_sampled = self.expected_output.compare(output), self.expected_output.num_sampled
        tolerance, worst = self.workload.tolerance, comparison.max_error_ratio
        if stats is not None:
            worst = float(np.maximum(worst, compare_stats(stats, compute_stats(output), tolerance)))
        return Verification(comparison.relative_error, tolerance, worst, num_sampled)


def _returns_stats(workload: Workload) -> bool:
    return STATS in workload.epilogue


def _count_elements(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64))
