"""Convolutions of one to three spatial axes as planes of rows and columns; an image is one plane, a signal one row.

Schedules written for images thereby serve signals and volumes. Each output plane of a volume is computed like an image,
from as many input planes as the filter is deep.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tvmconv.workloads import Conv
from tvmconv.workloads.layout import CHANNELS_FIRST

from .transposed_view import TransposedView

PLANE_NDIM = 3


@dataclass(frozen=True)
class PlaneShape:
    """Sizes of a convolution over planes, rows and columns, with 1 for missing axes."""

    w: Conv | TransposedView
    input_size: tuple[int, ...]
    output_size: tuple[int, ...]
    kernel_size: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]  # distances between taps
    pad_low: tuple[int, ...]  # zeros before the input
    upsampling: tuple[int, ...]  # distances of inputs, with zeros between them; above 1 only in gradients

    @classmethod
    @functools.lru_cache(maxsize=64)
    def from_workload(cls, w: Conv | TransposedView) -> PlaneShape:
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
            upsampling=prepend_units(w.upsampling if isinstance(w, TransposedView) else (1,) * w.spatial_ndim),
        )

    @property
    def is_transposed(self) -> bool:
        """Whether the weight is that of a forward convolution, with flipped taps and exchanged channels."""
        return isinstance(self.w, TransposedView)

    @property
    def num_output_planes(self) -> int:
        """Output planes of the whole batch."""
        return self.w.N * self.output_size[0]

    @property
    def num_taps(self) -> int:
        """Number of filter taps."""
        return math.prod(self.kernel_size)

    @property
    def window_extent(self) -> tuple[int, ...]:
        """Extent of an output's window, with dilation and with the zeros between inputs."""
        return tuple((taps - 1) * step + 1 for taps, step in zip(self.kernel_size, self.dilations, strict=True))

    def first_input(self, axis: int, first_output: Any) -> Any:
        """Return the first input of a tile, possibly outside the input; tiles begin at multiples of `upsampling`."""
        if self.upsampling[axis] == 1:
            return first_output * self.strides[axis] - self.pad_low[axis]
        return first_output // self.upsampling[axis] + -self.pad_low[axis] // self.upsampling[axis]

    def input_offset(self, axis: int, output: int, tap: int) -> int | None:
        """Return the input below a tap of a tile's output, from `first_input` on; None for a zero between inputs."""
        step, pad_low = self.upsampling[axis], self.pad_low[axis]
        offset, remainder = divmod(output * self.strides[axis] + tap * self.dilations[axis] - pad_low, step)
        return None if remainder else offset - -pad_low // step

    def find_tap(self, axis: int, output: int, offset: int) -> int | None:
        """Return the tap below which an output of a tile has an input; None if there is no such tap."""
        taps = range(self.kernel_size[axis])
        return next((tap for tap in taps if self.input_offset(axis, output, tap) == offset), None)

    def list_input_offsets(self, axis: int, num_outputs: int, num_taps: int | None = None) -> list[int]:
        """Return the offsets of the inputs that neighbouring outputs read below the first taps, by default all taps."""
        taps = range(self.kernel_size[axis] if num_taps is None else num_taps)
        offsets = {self.input_offset(axis, output, tap) for output in range(num_outputs) for tap in taps}
        return sorted(offset for offset in offsets if offset is not None)

    def count_distinct_inputs(self, axis: int, num_outputs: Any) -> Any:
        """Return the number of distinct inputs that neighbouring outputs read; `num_outputs` may be a column."""
        counts = np.zeros(int(np.max(num_outputs, initial=0)) + 1, int)
        for n in np.unique(num_outputs):
            counts[n] = self._count_input_offsets(axis, int(n))
        return counts[num_outputs]

    @functools.lru_cache(maxsize=1024)  # noqa: B019  (shapes are few, and cached themselves)
    def _count_input_offsets(self, axis: int, num_outputs: int) -> int:
        return len(self.list_input_offsets(axis, num_outputs))

    @functools.lru_cache(maxsize=64)  # noqa: B019  (shapes are few, and cached themselves)
    def count_inside_taps(self, axis: int) -> float:
        """Return the mean number of taps of an output along an axis that meet an input inside of the image."""
        num_outputs, size, first = self.output_size[axis], self.input_size[axis], self.first_input(axis, 0)
        taps = itertools.product(range(num_outputs), range(self.kernel_size[axis]))
        offsets = (self.input_offset(axis, output, tap) for output, tap in taps)
        return sum(offset is not None and 0 <= first + offset < size for offset in offsets) / num_outputs

    def weight_tap(self, tap_number: Any) -> Any:
        """Return the index in memory of a tap's weight."""
        return self.num_taps - 1 - tap_number if self.is_transposed else tap_number

    def weight_index(self, channel: Any, tap_number: Any, channel_in: Any) -> tuple[Any, ...]:
        """Return the index in K of an output channel, a tap in memory order, and an input channel of its group."""
        if self.is_transposed:
            outputs, inputs = self.w.O // self.w.groups, self.w.C // self.w.groups
            channel, channel_in = channel // outputs * inputs + channel_in, channel % outputs
        return self.array_index(channel, self.tap_from_index(tap_number), channel_in)

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

    def array_index(self, first_index: Any, spatial_index: Sequence[Any], channel: Any) -> tuple[Any, ...]:
        """Return the index of an element of an array (images or filters, space, channels), its axes in memory order.

        `spatial_index` is the plane, the row and the column.
        """
        space = spatial_index[PLANE_NDIM - self.w.spatial_ndim :]
        if self.w.layout == CHANNELS_FIRST:
            return (first_index, channel, *space)
        return (first_index, *space, channel)
