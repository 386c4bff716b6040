"""Accumulators of a thread tile, and their epilogue."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.workloads import Conv, epilogue
from tvmconv.workloads.dtypes import ACCUMULATOR

from ..plane_shape import PlaneShape
from .thread_loops import ThreadCoords, allocate_local, emit_guarded, emit_vector_copy, get_thread_channel, open_loop
from .thread_tile import ThreadTile


class StripEpilogue:
    """Accumulators of a thread tile, and their store to the output with the epilogue."""

    def __init__(
        self, w: Conv, arrays: Mapping[str, Any], thread_tile: ThreadTile, thread_coords: ThreadCoords
    ) -> None:
        self._w, self._arrays, self._thread_tile, self._thread_coords = w, arrays, thread_tile, thread_coords
        self._plane_shape = PlaneShape.from_workload(w)
        rows, columns, vector = thread_tile.rows.local, thread_tile.columns.local, thread_tile.vector
        self.accum = allocate_local("sums", (rows, columns, vector), ACCUMULATOR)
        self._results = allocate_local("results", (columns, vector), w.storage)
        argument_kinds = {op.name: op.argument_kind for op in epilogue.get_ops(w.epilogue) if op.argument_kind}
        shapes = {"channel": (vector,), "output": (columns, vector)}
        self._argument_regs = {
            name: allocate_local(name, shapes[argument_kind], str(arrays[name].dtype))
            for name, argument_kind in argument_kinds.items()
        }
        self._channel_arg_names = [name for name, argument_kind in argument_kinds.items() if argument_kind == "channel"]

    def init_accumulators(self) -> None:
        """Set the accumulators to zero, and load the epilogue arguments that all pixels share."""
        num_rows, num_columns, vector = self.accum.shape
        with open_loop("i", num_rows) as i, open_loop("j", num_columns) as j, open_loop("channel", vector) as channel:
            T.buffer_store(self.accum, tirx.const(0, ACCUMULATOR), [i, j, channel])
        for name in self._channel_arg_names:
            self._read_vector(
                name,
                lambda lane: (lane,),
                lambda lane: get_thread_channel(self._thread_tile, self._thread_coords) + lane,
            )

    def accumulate_product(
        self, row_idx: Any, column_idx: Any, channel: Any, input_value: Any, weight_value: Any
    ) -> None:
        """Add the product of two operands, which are widened first, to an accumulator."""
        product = input_value.astype(ACCUMULATOR) * weight_value.astype(ACCUMULATOR)
        T.buffer_store(self.accum, self.accum[row_idx, column_idx, channel] + product, [row_idx, column_idx, channel])

    def store_row(self, row_idx: int) -> None:
        """Store output row `row_idx` of the strip."""
        thread_tile, thread_coords = self._thread_tile, self._thread_coords
        row, channel = thread_coords.row + row_idx, get_thread_channel(thread_tile, thread_coords)
        _, num_rows, num_columns = self._plane_shape.output_size
        conditions = [row < num_rows] * (not thread_tile.rows.divides)
        conditions += [thread_coords.vector_idx < thread_tile.channels.extent] * (not thread_tile.channels.divides)

        def list_bounds_checks(column_idx: Any) -> list[Any]:
            return conditions + [thread_coords.column + column_idx < num_columns] * (not thread_tile.columns.divides)

        for name in self._argument_regs:
            if name not in self._channel_arg_names:
                with open_loop("j", thread_tile.columns.local) as j:
                    self._read_pixel(name, list_bounds_checks(j), j, self._output_index(row, j, channel))
        with open_loop("j", thread_tile.columns.local) as j:
            with open_loop("channel", thread_tile.vector) as lane:
                value = epilogue.apply_to_expression(
                    self._w.epilogue, self.accum[row_idx, j, lane], lambda name: self._argument_element(name, j, lane)
                )
                T.buffer_store(self._results, value.astype(self._w.storage), [j, lane])

            def write_pixel() -> None:
                emit_vector_copy(
                    thread_tile.vector,
                    self._arrays["Y"],
                    lambda lane: self._output_index(row, j, channel + lane),
                    lambda lane: self._results[j, lane],
                )

            emit_guarded(list_bounds_checks(j), write_pixel)

    def _output_index(self, row: Any, column_idx: Any, channel: Any) -> tuple[Any, ...]:
        """Return the index in the output of a column of the strip."""
        return self._plane_shape.array_index(
            self._thread_coords.image,
            (self._thread_coords.plane, row, self._thread_coords.column + column_idx),
            channel,
        )

    def _argument_element(self, name: str, column_idx: Any, lane: Any) -> Any:
        argument_regs = self._argument_regs[name]
        return (argument_regs[lane] if name in self._channel_arg_names else argument_regs[column_idx, lane]).astype(
            ACCUMULATOR
        )

    def _read_pixel(self, name: str, conditions: list[Any], column_idx: Any, output_index: tuple[Any, ...]) -> None:
        *pixel, channel = output_index
        emit_guarded(
            conditions,
            lambda: self._read_vector(name, lambda lane: (column_idx, lane), lambda lane: (*pixel, channel + lane)),
        )

    def _read_vector(
        self, name: str, register_index: Callable[[Any], Sequence[Any]], source_index: Callable[[Any], Any]
    ) -> None:
        """Load a vector of an epilogue argument."""
        emit_vector_copy(
            self._thread_tile.vector,
            self._argument_regs[name],
            register_index,
            lambda lane: self._arrays[name][source_index(lane)],
        )
