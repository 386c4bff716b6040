"""Epilogues of the NHWC direct kernels: accumulators, and vectors of channels or of columns that are stored."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.workloads import epilogue
from tvmconv.workloads.dtypes import ACCUMULATOR, INT8
from tvmconv.workloads.quantization import convert_expression

from ...tir_builder import unrolled_loop
from .strip_thread import COLUMN_AXIS, ROW_AXIS, StripThread, allocate_local, emit_guarded, emit_vector_copy


class StripEpilogue:
    """Accumulators of a strip (rows, columns, channels), and their store to the output with the epilogue."""

    def __init__(self, thread: StripThread) -> None:
        self._thread, config = thread, thread.config
        vector = config.vector
        self.accum = allocate_local("sums", (config.rows.local, config.columns.local, vector), ACCUMULATOR)
        self._output_dtype = str(thread.arrays["Y"].dtype)
        self._results = allocate_local("results", self._row_shape, self._output_dtype)
        argument_kinds = {op.name: op.argument_kind for op in epilogue.get_ops(config.w.epilogue) if op.argument_kind}
        self._numbers = [name for name, kind in argument_kinds.items() if kind == "tensor"]
        shapes = {"channel": (vector,), "output": self._row_shape}
        self._argument_regs = {
            name: allocate_local(name, shapes[kind], str(thread.arrays[name].dtype))
            for name, kind in argument_kinds.items()
            if kind in shapes
        }
        self._channel_arguments = [name for name, kind in argument_kinds.items() if kind == "channel"]

    @property
    def _row_shape(self) -> tuple[int, int]:
        """Extents of a row of outputs in registers, the innermost one contiguous in memory."""
        return self._thread.config.columns.local, self._thread.config.vector

    def init_accumulators(self) -> None:
        """Set the accumulators to zero, and load the epilogue arguments that all pixels share."""
        num_rows, num_columns, vector = self.accum.shape
        with (
            unrolled_loop(num_rows, "i") as i,
            unrolled_loop(num_columns, "j") as j,
            unrolled_loop(vector, "channel") as channel,
        ):
            T.buffer_store(self.accum, tirx.const(0, ACCUMULATOR), [i, j, channel])
        for name in self._channel_arguments:
            self._load_argument(name, (), lambda lane: self._thread.first_channel + lane)

    def _make_result(self, value: Any, read_element: Callable[[Any], Any]) -> Any:
        """Return the output of a sum. `read_element` returns the element of an argument by its name."""

        def read_argument(name: str) -> Any:
            number = self._thread.arrays[name][0] if name in self._numbers else None
            return read_element(name).astype(ACCUMULATOR) if number is None else number

        value = epilogue.apply_to_expression(self._thread.config.w.epilogue, value, read_argument)
        return convert_expression(value, self._output_dtype)

    def accumulate_product(
        self, row_idx: Any, column_idx: Any, channel: Any, input_value: Any, weight_value: Any
    ) -> None:
        """Add the product of two operands, which are widened first, to an accumulator."""
        storage = self._thread.config.w.storage
        product = _widen(input_value, storage) * _widen(weight_value, storage)
        T.buffer_store(self.accum, self.accum[row_idx, column_idx, channel] + product, [row_idx, column_idx, channel])

    def store_row(self, row_idx: int) -> None:
        """Store output row `row_idx` of the strip."""
        thread, config, shape = self._thread, self._thread.config, self._thread.shape
        row, first_channel = thread.row + row_idx, thread.first_channel
        _, num_rows, num_columns = shape.output_size
        conditions = [row < num_rows] * (not config.rows.divides)
        conditions += [thread.vector_idx < config.channels.extent] * (not config.channels.divides)

        def list_bounds_checks(j: Any) -> list[Any]:
            return conditions + [thread.column + j < num_columns] * (not config.columns.divides)

        def output_index(j: Any, channel: Any) -> tuple[Any, ...]:
            return shape.array_index(thread.image, (thread.plane, row, thread.column + j), channel)

        def read_argument(name: str, j: Any, lane: Any) -> Any:
            registers = self._argument_regs[name]
            return registers[lane] if name in self._channel_arguments else registers[j, lane]

        for name in self._argument_regs:
            if name not in self._channel_arguments:
                with unrolled_loop(config.columns.local, "j") as j:
                    emit_guarded(
                        list_bounds_checks(j),
                        lambda: self._load_argument(name, (j,), lambda lane: output_index(j, first_channel + lane)),  # noqa: B023
                    )
        with unrolled_loop(config.columns.local, "j") as j:
            with unrolled_loop(config.vector, "channel") as lane:
                value = self._make_result(
                    self.accum[row_idx, j, lane],
                    lambda name: read_argument(name, j, lane),
                )
                T.buffer_store(self._results, value, [j, lane])
            emit_guarded(
                list_bounds_checks(j),
                lambda: emit_vector_copy(
                    config.vector,
                    thread.arrays["Y"],
                    lambda lane: output_index(j, first_channel + lane),
                    lambda lane: self._results[j, lane],
                ),
            )

    def _load_argument(self, name: str, pixel: tuple[Any, ...], source_index: Callable[[Any], Any]) -> None:
        """Load a vector of an epilogue argument."""
        emit_vector_copy(
            self._thread.config.vector,
            self._argument_regs[name],
            lambda lane: (*pixel, lane),
            lambda lane: self._thread.arrays[name][source_index(lane)],
        )


def _widen(value: Any, dtype: str) -> Any:
    """Return an operand in float32. As conversions of bytes are slow, a byte becomes the lowest bits of 2^23."""
    if dtype != INT8.name:
        return value.astype(ACCUMULATOR)
    bits = (value.astype("int32") & tirx.const(0xFF, "int32")) ^ tirx.const(0x4B000080, "int32")
    return tirx.reinterpret(ACCUMULATOR, bits) - tirx.const(2.0**23 + 128, ACCUMULATOR)


class ColumnEpilogue(StripEpilogue):
    """Epilogue of a channels-first output, which is stored in vectors of columns."""

    @property
    def _row_shape(self) -> tuple[int, int]:
        return self._thread.config.vector, self._thread.config.columns.local

    def store_row(self, row_idx: int) -> None:
        """Store output row `row_idx` of the strip."""
        for name in self._argument_regs:
            if name not in self._channel_arguments:
                registers, array = self._argument_regs[name], self._thread.arrays[name]
                self._copy_row(row_idx, registers, array, to_global=False)
        config = self._thread.config
        with unrolled_loop(config.vector, "channel") as channel, unrolled_loop(config.columns.local, "j") as j:

            def read_argument(name: str) -> Any:
                registers = self._argument_regs[name]
                return registers[channel] if name in self._channel_arguments else registers[channel, j]

            T.buffer_store(
                self._results, self._make_result(self.accum[row_idx, j, channel], read_argument), [channel, j]
            )
        self._copy_row(row_idx, self._results, self._thread.arrays["Y"], to_global=True)

    def _copy_row(self, row_idx: int, registers: Any, array: Any, *, to_global: bool) -> None:
        """Copy a row of the strip between registers and an array of the shape of the output."""
        thread, config, shape = self._thread, self._thread.config, self._thread.shape
        width, row = int(config.output_vector_columns), thread.row + row_idx
        conditions = [row < shape.output_size[ROW_AXIS]] * (not config.rows.divides)
        conditions += [thread.vector_idx < config.channels.extent] * (not config.channels.divides)
        for channel in range(config.vector):
            for first in range(0, config.columns.local, width):

                def global_index(lane: Any, channel: int = channel, first: int = first) -> tuple[Any, ...]:
                    coords = thread.plane, row, thread.column + (first + lane)
                    return shape.array_index(thread.image, coords, thread.first_channel + channel)

                def local_index(lane: Any, channel: int = channel, first: int = first) -> tuple[Any, ...]:
                    return channel, first + lane

                source, target = (registers, array) if to_global else (array, registers)
                indices = (local_index, global_index) if to_global else (global_index, local_index)
                is_inside = [thread.column + first < shape.output_size[COLUMN_AXIS]] * (not config.columns.divides)
                emit_guarded(
                    conditions + is_inside,
                    functools.partial(_copy_elements, width, (target, indices[1]), (source, indices[0])),
                )


def make_strip_epilogue(thread: StripThread) -> StripEpilogue:
    """Return the epilogue of a thread, which stores vectors of channels or of columns."""
    return ColumnEpilogue(thread) if thread.config.has_column_vectors else StripEpilogue(thread)


def _copy_elements(
    num_lanes: int, target: tuple[Any, Callable[[Any], Any]], source: tuple[Any, Callable[[Any], Any]]
) -> None:
    """Copy contiguous elements between two arrays, each given with the function that indexes its lanes."""
    emit_vector_copy(num_lanes, target[0], target[1], lambda lane: source[0][source[1](lane)])
