"""What "verified" means: a kernel's output against float64, on fresh random inputs, every element accounted for.

The error is relative to the output: ‖output - reference‖ / ‖reference‖. What a right kernel errs by is a share of the
output where it rounds as it stores, but a share of the sums where it adds in float32 and applies an epilogue to that.
Both are of one size where outputs are about as large as their sums, as most of many outputs are: a sum of products of
standard normal numbers is positive half of the time, and nearly always far from zero. Of few outputs none may be. GELU
makes -1e-9 of a sum of -6.3, and 1 + erf in float32 makes zero: the relative error of a right kernel is 1 then. And
where ReLU makes zeros, it is 0 for a kernel that stores nothing else. Such inputs tell nothing of a kernel, whatever
its error is compared with: so those of few outputs are the best of several draws, the ones of the largest output.

A relative error over many outputs says little of few wrong ones: in bfloat16 one in 10,000 may be anything. Each output
of a random sample is therefore also compared with the largest error that rounding explains (`Conv.sample_outputs`),
where a convolution has more than `MANY_OUTPUTS` outputs. Above `FULL_FLOPS` only that sample is computed, and the
relative error is over the sample. That every element was written, and is finite, is checked of the whole output always.

All output channels are compared at each pixel of the sample. What is certain to be among them: every channel; every
border, corner and remainder of a tile of 2, 4, ... 256 pixels; of every tile of one channel or more at least one pixel,
if the tile has at least 64, its sides are powers of two, and it is aligned to them or is an aligned run of pixels in
the order of (n, p). Any other wrong set of T pixels is missed with a probability of at most exp(-T / 64). Beyond 2
TFLOP or 2^28 outputs, 64 becomes 128 or more (`tvmconv.workloads.pixel_sample`). Without an epilogue, an output that
has nothing to do with the right one is off by more than is allowed with a probability of 0.92 in bfloat16, 0.99 in
float16, and 0.9999 in float32.
"""

from __future__ import annotations

import functools
import os
import secrets
from dataclasses import dataclass

import numpy as np

from tvmconv.arithmetic import ceil_div
from tvmconv.devices.comparison import OutputComparison, ReferenceOutput
from tvmconv.errors import WorkloadError
from tvmconv.workloads import Conv, Workload
from tvmconv.workloads.dtypes import get_numpy_dtype
from tvmconv.workloads.pixel_sample import MAX_CELL, MIN_CELL, choose_cell

FULL_FLOPS = 20e9  # up to which every output is computed in float64
MANY_OUTPUTS = 1 << 20  # outputs, from which on few wrong ones may be lost in the relative error of all
SAMPLED_OUTPUT_BYTES = 64  # of memory for an output of a sample while it is computed; 20 afterwards
VERIFICATION_MODES = ("auto", "sample", "full")
MIN_SAMPLED_OUTPUTS = 4096  # outputs of a sample; of less than four times as many all are compared
MIN_DRAWN_OUTPUTS = (
    64  # outputs, of all draws together: that an epilogue makes zeros of all of them has a probability of 2^-64
)


@dataclass(frozen=True)
class Verification:
    """How far an output is from the reference.

    Attributes:
        error: relative L2 error, ‖output - reference‖ / ‖reference‖; NaN when the kernel left an element unwritten.
        tolerance: the largest error that counts as correct for the workload's dtype.
        worst: the largest error of a single output of the sample, over what rounding explains; 0 without a sample.
        sampled: how many outputs were compared, where that is a sample; None where all were.
    """

    error: float
    tolerance: float
    worst: float = 0.0
    sampled: int | None = None

    @property
    def ok(self) -> bool:
        """Whether the kernel computed the workload."""
        return self._comparison.is_within_tolerance(self.tolerance)

    @property
    def fault(self) -> str:
        """What is wrong with a kernel that is not right, in a few words."""
        return self._comparison.describe_mismatch(self.tolerance)

    @property
    def _comparison(self) -> OutputComparison:
        return OutputComparison(self.error, self.worst)


def is_sampled(workload: Workload, mode: str = "auto", full_flops: float = FULL_FLOPS) -> bool:
    """Whether only a sample of a workload's outputs is computed in float64.

    Args:
        workload: a convolution may be sampled; of other operators every output is computed.
        mode: "auto" for a sample above `full_flops`, "sample" for one wherever there are enough outputs, "full" for
            none.
        full_flops: FLOP.
    """
    if mode not in VERIFICATION_MODES:
        raise WorkloadError(f"verification {mode!r}: expected one of {', '.join(VERIFICATION_MODES)}")
    if (
        mode == "full"
        or not isinstance(workload, Conv)
        or _count_elements(workload.output_shape) < MIN_CELL * MIN_SAMPLED_OUTPUTS
    ):
        return False
    return mode == "sample" or workload.flops > full_flops


class Problem:
    """A workload with inputs: what several kernels are verified and timed on.

    Args:
        workload: the workload.
        seed: of the inputs; by default a fresh one, of few outputs the one of several with the largest output.
        mode: whether all outputs are compared, or a sample; see `is_sampled`.
        full_flops: FLOP above which "auto" means a sample.
        cell: about one pixel in cell / 2 is in the sample; by default what is affordable (`choose_cell`).

    Raises:
        WorkloadError: inputs and reference do not fit in this machine's memory, or there is no such mode.
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
        *inputs, output = workload.argument_shapes
        reference_bytes = self.num_sampled_outputs * SAMPLED_OUTPUT_BYTES + 3 * 8 * _count_elements(output) * (
            not self.is_sampled
        )
        required_bytes = (
            sum(4 * _count_elements(shape) for shape in inputs)
            + 4 * _count_elements(output) * self.is_sampled
            + reference_bytes
        )
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if required_bytes > memory_bytes:
            raise WorkloadError(
                f"{workload} needs {required_bytes / 1e9:.1f} GB for its inputs and float64 reference; "
                f"this machine has {memory_bytes / 1e9:.1f} GB"
            )

    def _choose_cell(self) -> int:
        """The cell of the sample; 0 where there is none, as the relative error over all outputs tells enough."""
        if not isinstance(self.workload, Conv):
            return 0
        if self.is_sampled:
            return choose_cell(self.workload)
        return MAX_CELL if _count_elements(self.workload.argument_shapes[-1]) > MANY_OUTPUTS else 0

    @property
    def num_sampled_outputs(self) -> int:
        """How many outputs are in the sample, about; 0 without one."""
        return 2 * _count_elements(self.workload.argument_shapes[-1]) // self._cell if self._cell else 0

    @property
    def nbytes(self) -> int:
        """The size of inputs and reference together, about, known before they are computed."""
        *inputs, output = self.workload.argument_shapes
        input_bytes = sum(
            _count_elements(shape) * get_numpy_dtype(dtype).itemsize
            for shape, dtype in zip(inputs, self.workload.argument_dtypes[:-1], strict=True)
        )
        return input_bytes + 20 * self.num_sampled_outputs + 8 * _count_elements(output) * (not self.is_sampled)

    @functools.cached_property
    def seed(self) -> int:
        """Of the inputs."""
        if self._fixed_seed is not None:
            return self._fixed_seed
        seeds = [
            secrets.randbits(32)
            for _ in range(ceil_div(MIN_DRAWN_OUTPUTS, _count_elements(self.workload.argument_shapes[-1])))
        ]
        return max(seeds, key=self._output_norm) if len(seeds) > 1 else seeds[0]

    def _output_norm(self, seed: int) -> float:
        return float(np.linalg.norm(self.workload.reference(*self.workload.inputs(seed))))

    @functools.cached_property
    def inputs(self) -> tuple[np.ndarray, ...]:
        """Random inputs in the workload's dtype."""
        return self.workload.inputs(self.seed)

    @functools.cached_property
    def reference(self) -> np.ndarray:
        """The whole output in float64, whatever is compared."""
        return self.workload.reference(*self.inputs)

    @functools.cached_property
    def expected_output(self) -> ReferenceOutput:
        """What an output is compared with: all that is right, or a sample of it, or both."""
        points = None
        if self._cell and isinstance(self.workload, Conv):
            points = self.workload.sample_outputs(self._cell, self.seed, *self.inputs)
        return ReferenceOutput(None if self.is_sampled else self.reference, points)

    def check(self, output: np.ndarray) -> Verification:
        """Compare an output with what is expected."""
        comparison = self.expected_output.compare(output)
        return Verification(
            comparison.relative_error,
            self.workload.tolerance,
            comparison.max_error_ratio,
            self.expected_output.num_sampled,
        )


def _count_elements(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64))
