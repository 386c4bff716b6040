"""Input window of a thread tile: input rows in registers, which neighbouring outputs share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx

from tvmconv.workloads import Conv

from ..plane_shape import PlaneShape
from .thread_loops import ThreadCoords, allocate_local, emit_guarded, emit_vector_copy, open_loop
from .thread_tile import ThreadTile, compute_window_extent, list_input_offsets


class InputWindow:
    """Rows of a thread tile's input in registers, each with the channel vectors that all output columns read."""

    def __init__(
        self,
        w: Conv,
        X: Any,
        thread_tile: ThreadTile,
        thread_coords: ThreadCoords,
        vector_elements: int,
        num_rows: int,
        num_unrolled_taps: int,
    ) -> None:
        self._w, self._X, self._vector_elements = w, X, vector_elements
        self._thread_tile, self._thread_coords = thread_tile, thread_coords
        self._column_offsets = list_input_offsets(
            thread_tile.columns.local, w.stride[-1], num_unrolled_taps, w.dilation[-1]
        )
        if self._column_offsets != [*range(len(self._column_offsets))]:  # inputs of neighbouring columns are adjacent
            self._column_offsets.sort(key=lambda place: (place % w.stride[-1], place))
        self.values = allocate_local("window", (num_rows, len(self._column_offsets), vector_elements), w.storage)
        self._plane_shape = plane_shape = PlaneShape.from_workload(w)
        first_outputs = zip(
            (thread_coords.plane, thread_coords.row, thread_coords.column),
            plane_shape.strides,
            plane_shape.pad_low,
            strict=True,
        )
        self.first_plane, self.first_row, self.first_column = (
            first_output * stride - padding for first_output, stride, padding in first_outputs
        )

    def window_column(self, output_column: Any, filter_column: int) -> Any:
        """Return the position in a row of the input for `output_column` and filter column `filter_column`."""
        offset_idx = self._column_offsets.index(filter_column * self._w.dilation[-1])
        if self._thread_tile.columns.local == 1:
            return offset_idx
        return offset_idx + output_column * (
            self._column_offsets.index(filter_column * self._w.dilation[-1] + self._w.stride[-1]) - offset_idx
        )

    def load_row(self, window_row: Any, filter_plane: Any, row_offset: Any, channel: Any, column: Any = 0) -> None:
        """Load an input row to `window_row`, from a channel on.

        `filter_plane` selects the input plane; the row and column are offsets from `first_row` and `first_column`.
        """
        plane = self.first_plane + filter_plane * self._plane_shape.dilations[0]
        row_offset = self.first_row + row_offset
        if self._column_offsets == [*range(len(self._column_offsets))]:
            with open_loop("g", len(self._column_offsets)) as offset_idx:
                self._load_vector(
                    window_row, offset_idx, (plane, row_offset, self.first_column + column + offset_idx), channel
                )
        else:
            for offset_idx, column_offset in enumerate(self._column_offsets):
                self._load_vector(
                    window_row, offset_idx, (plane, row_offset, self.first_column + column + column_offset), channel
                )

    def _load_vector(self, window_row: Any, offset_idx: Any, input_coords: tuple[Any, Any, Any], channel: Any) -> None:
        """Load a vector of the input, or zeros outside the image."""

        def fill_vector(get_value: Callable[[Any], Any]) -> None:
            emit_vector_copy(self._vector_elements, self.values, lambda lane: (window_row, offset_idx, lane), get_value)

        emit_guarded(
            self._list_bounds_checks(input_coords),
            lambda: fill_vector(
                lambda lane: self._X[
                    self._plane_shape.array_index(self._thread_coords.image, input_coords, channel + lane)
                ]
            ),
            lambda: fill_vector(lambda lane: tirx.const(0, self._w.storage)),
        )

    def _list_bounds_checks(self, input_coords: tuple[Any, Any, Any]) -> list[Any]:
        """Return the conditions under which an input coordinate is inside the image, without those that always hold."""
        plane_shape, conditions = self._plane_shape, []
        computed_sizes = (
            plane_shape.output_size[0],
            *(tile.block * tile.size for tile in (self._thread_tile.rows, self._thread_tile.columns)),
        )
        for i, (coord, size, outputs, window_extent) in enumerate(
            zip(input_coords, plane_shape.input_size, computed_sizes, compute_window_extent(self._w), strict=True)
        ):
            last_coord = (outputs - 1) * plane_shape.strides[i] + window_extent - 1 - plane_shape.pad_low[i]
            conditions += [coord >= 0] * (plane_shape.pad_low[i] > 0) + [coord < size] * (last_coord >= size)
        return conditions
