"""The scale of an activation from its values in calibration, by one of three observers.

| observer | the largest number of the 8-bit type stands for |
| --- | --- |
| `minmax` | the largest absolute value |
| `percentile` | the absolute value that all but 0.1 % of the values do not exceed |
| `mse` | the absolute value for which the mean squared error of quantized values is least |

All of them read a histogram of absolute values, which grows with the values, so that each batch is seen once. Values of
which none is negative may use all integers of `int8`, from -128 for zero: their scale is that of 255 steps.
"""

from __future__ import annotations

from typing import Literal

import torch

from tvmconv.torch.eight_bit_rounding import get_largest, round_to_8_bits

ObserverName = Literal["mse", "minmax", "percentile"]
OBSERVERS: tuple[ObserverName, ...] = ("mse", "minmax", "percentile")
NUM_BINS = 2048
PERCENTILE = 0.999  # fraction of the values that do not saturate
NUM_THRESHOLDS = 64  # candidates of the observer `mse`, down to `MIN_THRESHOLD` of the largest value
MIN_THRESHOLD = 0.1
MIN_SCALE = 2.0**-120  # whose reciprocal, by which kernels multiply, is finite in float32


class AbsoluteHistogram:
    """A histogram of the absolute values of tensors, other than zeros.

    The bins divide a range from zero to a power of two times the first tensor's largest value. For a larger value, the
    range is doubled, and bins are merged in pairs.
    """

    def __init__(self) -> None:
        self.largest = 0.0
        self.has_negative = False  # whether a value is below zero
        self._range = 0.0
        self._counts = torch.zeros(NUM_BINS, dtype=torch.float64)

    def add(self, tensor: torch.Tensor) -> None:
        """Count the finite values of a tensor."""
        values = tensor.detach().float().flatten()
        values = values[(values != 0) & values.isfinite()]
        if not values.numel():
            return
        self.has_negative = self.has_negative or bool((values < 0).any())
        values = values.abs()
        largest = float(values.max())
        self.largest = max(self.largest, largest)
        self._range = self._range or largest
        while self._range < largest:
            merged = self._counts.view(-1, 2).sum(1)
            self._counts = torch.cat([merged, torch.zeros_like(merged)])
            self._range *= 2
        counts = torch.histc(values, NUM_BINS, 0.0, self._range)
        self._counts += counts.to("cpu", torch.float64)

    @property
    def centers(self) -> torch.Tensor:
        """Centers of the bins."""
        return (torch.arange(NUM_BINS, dtype=torch.float64) + 0.5) * (self._range / NUM_BINS)

    def choose_scale(self, dtype: torch.dtype, observer: ObserverName, zero_point: int = 0) -> float:
        """Return the scale by which values are divided before they are rounded to an 8-bit type.

        Args:
            dtype: The type.
            observer: The observer.
            zero_point: Integer that stands for zero. The largest value becomes the largest integer.
        """
        if not self.largest:
            return 1.0
        if observer == "minmax":
            threshold = self.largest
        elif observer == "percentile":
            cumulative = self._counts.cumsum(0)
            index = int(torch.searchsorted(cumulative, PERCENTILE * cumulative[-1]).clamp(max=NUM_BINS - 1))
            threshold = min(self.largest, (index + 1) * self._range / NUM_BINS)
        else:
            threshold = self._minimize_squared_error(dtype, zero_point)
        return max(threshold / (get_largest(dtype) - zero_point), MIN_SCALE)

    def _minimize_squared_error(self, dtype: torch.dtype, zero_point: int) -> float:
        """Return the candidate threshold with the least squared error; the largest of equal ones."""
        occupied = self._counts > 0
        centers, counts = self.centers[occupied], self._counts[occupied]
        thresholds = torch.linspace(1.0, MIN_THRESHOLD, NUM_THRESHOLDS, dtype=torch.float64) * self.largest
        scales = (thresholds / (get_largest(dtype) - zero_point))[:, None]
        rounded = (round_to_8_bits((centers / scales).float(), dtype, zero_point).double() - zero_point) * scales
        errors = ((rounded - centers).square() * counts).sum(1)
        return float(thresholds[int(errors.argmin())])
