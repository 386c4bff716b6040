"""Convolutions of any rank as planes of rows and columns: an image is one plane, a signal one of a single row.

What is written for images serves signals and volumes so: of a volume, each plane of the output is computed like an
image, from as many planes of the input as the kernel is deep.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvmconv.workloads import Conv

PLANE_NDIM = 3


@dataclass(frozen=True)
class PlaneShape:
    """The sizes of a convolution over planes, rows and columns, with 1 for those that it does not have.

    Attributes:
        w: the convolution.
        input_size: of an input.
        output_size: of an output.
        kernel_size: of the kernel.
        strides: strides.
        dilations: distances between taps.
        pad_low: zeros before the input.
    """

    w: Conv
    input_size: tuple[int, ...]
    output_size: tuple[int, ...]
    kernel_size: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pad_low: tuple[int, ...]

    @classmethod
    @functools.lru_cache(maxsize=64)
    def from_workload(cls, w: Conv) -> PlaneShape:
        """Those of a convolution."""

        def prepend_units(sizes: Sequence[int], unit_value: int = 1) -> tuple[int, ...]:
            return (*[unit_value] * (PLANE_NDIM - w.spatial_ndim), *sizes)

        return cls(
            w,
            input_size=prepend_units(w.input_size),
            output_size=prepend_units(w.output_size),
            kernel_size=prepend_units(w.kernel),
            strides=prepend_units(w.stride),
            dilations=prepend_units(w.dilation),
            pad_low=prepend_units(w.pad_low, 0),
        )

    @property
    def num_output_planes(self) -> int:
        """Planes of all outputs."""
        return self.w.N * self.output_size[0]

    @property
    def num_taps(self) -> int:
        """Taps of the kernel."""
        return math.prod(self.kernel_size)

    def tap_from_index(self, tap_number: Any) -> tuple[Any, Any, Any]:
        """Plane, row and column of a tap, from its number."""
        columns = self.kernel_size[-1]
        return (*self.tap_row_from_index(tap_number // columns), tap_number % columns)

    def tap_row_from_index(self, row_number: Any) -> tuple[Any, Any]:
        """Plane and row of a row of taps, from its number."""
        num_planes, num_rows, _ = self.kernel_size
        return (0, row_number) if num_planes == 1 else (row_number // num_rows, row_number % num_rows)

    def tap_index(self, tap: tuple[Any, Any, Any]) -> Any:
        """The number of a tap, as they lie in memory."""
        _, num_rows, num_columns = self.kernel_size
        plane, row, column = tap
        return (plane * num_rows + row) * num_columns + column

    def array_index(self, first_index: Any, spatial_index: Sequence[Any], last_index: Any) -> tuple[Any, ...]:
        """Where an element lies in an array with channels last: `spatial_index` is its plane, row and column."""
        return (first_index, *spatial_index[PLANE_NDIM - self.w.spatial_ndim :], last_index)
