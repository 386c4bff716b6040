"""Convolutions of one to three spatial axes as planes of rows and columns; an image is one plane, a signal one row.

Schedules written for images thereby serve signals and volumes. Each output plane of a volume is computed like an image,
from as many input planes as the filter is deep.
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
    """Sizes of a convolution over planes, rows and columns, with 1 for missing axes."""

    w: Conv
    input_size: tuple[int, ...]
    output_size: tuple[int, ...]
    kernel_size: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]  # distances between taps
    pad_low: tuple[int, ...]  # zeros before the input

    @classmethod
    @functools.lru_cache(maxsize=64)
    def from_workload(cls, w: Conv) -> PlaneShape:
        """Return the plane shape of a convolution."""

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
        """Output planes of the whole batch."""
        return self.w.N * self.output_size[0]

    @property
    def num_taps(self) -> int:
        """Number of filter taps."""
        return math.prod(self.kernel_size)

    def tap_from_index(self, tap_number: Any) -> tuple[Any, Any, Any]:
        """Return plane, row and column of a tap from its index."""
        columns = self.kernel_size[-1]
        return (*self.tap_row_from_index(tap_number // columns), tap_number % columns)

    def tap_row_from_index(self, row_number: Any) -> tuple[Any, Any]:
        """Return plane and row of a filter row from its index."""
        num_planes, num_rows, _ = self.kernel_size
        return (0, row_number) if num_planes == 1 else (row_number // num_rows, row_number % num_rows)

    def tap_index(self, tap: tuple[Any, Any, Any]) -> Any:
        """Return the index of a tap in memory order."""
        _, num_rows, num_columns = self.kernel_size
        plane, row, column = tap
        return (plane * num_rows + row) * num_columns + column

    def array_index(self, first_index: Any, spatial_index: Sequence[Any], last_index: Any) -> tuple[Any, ...]:
        """Return the index of an element in a channels-last array; `spatial_index` is its plane, row and column."""
        return (first_index, *spatial_index[PLANE_NDIM - self.w.spatial_ndim :], last_index)
