"""A thread's walk down a window of X, whose products with dY below it the thread adds to the sums of its taps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.workloads.dtypes import ACCUMULATOR

from ...tir_builder import (
    Buffer,
    Expr,
    allocate,
    if_,
    load_shared,
    logical_and,
    store,
    to_uint32,
    unpack,
)
from .window_wgrad_config import WindowWgradConfig


class WindowWgradWalk:
    """A thread's walk down a tile. Each row of X is loaded once, and each row of dY when a tap first meets it.

    Args:
        config: The config.
        sums: Sums of the thread: rows and columns of the filter, channels.
        first_column: First column of dY of the thread.
        window: Shared-memory address of the first pixel of X.
        gradient: Shared-memory address of the first pixel of dY.
    """

    def __init__(
        self, config: WindowWgradConfig, sums: Buffer, first_column: Expr, window: Expr, gradient: Expr
    ) -> None:
        self.config, self.shape, self.sums = config, config.shape, sums
        self.first_column, self.window, self.gradient = first_column, window, gradient
        _, num_rows, num_columns = self.shape.output_size
        self.vector, self.rows, self.strip = int(config.vector), min(int(config.rows), num_rows), int(config.strip)
        if config.has_known_columns:
            self.strip = min(self.strip, num_columns)
        self.columns = config.list_columns()
        self.pixel_bytes = int(config.channels) * config.itemsize
        self.words = allocate("words", max(1, self.vector * config.itemsize // 4), "uint32")
        self.inputs = allocate("inputs", len(self.columns) * self.vector, ACCUMULATOR)
        self.gradients = allocate("gradients", self.rows * self.strip * self.vector, ACCUMULATOR)

    def run(self, release_stage: Callable[[], None]) -> None:
        """Walk down all rows of X; `release_stage` is emitted after the loads of the last one."""
        lines, loaded_rows = self.config.list_lines(), set[int]()
        for line in lines:
            self.load_inputs(line)
            row_taps = self.list_row_taps(line)
            for y in sorted({y for y, _ in row_taps} - loaded_rows):
                self.load_gradients(y)
                loaded_rows.add(y)
            if line == lines[-1]:
                release_stage()
            self.add_products(row_taps)

    def list_row_taps(self, line: int) -> list[tuple[int, int]]:
        """Return the rows of dY that a row of X meets, with the rows of the filter below which it does."""
        step, dilation = self.shape.strides[1], self.shape.dilations[1]
        row_taps = ((y, r) for y in range(self.rows) for r in range(int(self.config.taps_y)))
        return [(y, r) for y, r in row_taps if y * step + r * dilation == line]

    def load_inputs(self, line: int) -> None:
        """Load the columns of a row of X."""
        config, shape = self.config, self.shape
        first_line = shape.pad_low[1] if config.has_known_lines else 0
        first_column = shape.pad_low[2] if config.has_known_columns or config.whole_rows else 0
        for i, column in enumerate(self.columns):
            pixel = (line - first_line) * int(config.window_columns) + column - first_column
            guards = self.list_guards(column - first_column, shape.strides[2], shape.input_size[2])
            self.load(self.inputs, i * self.vector, self.window, pixel * self.pixel_bytes, guards)

    def load_gradients(self, y: int) -> None:
        """Load the columns of a row of dY."""
        for j in range(self.strip):
            offset = (y * int(self.config.gradient_columns) + j) * self.pixel_bytes
            guards = self.list_guards(j, 1, self.shape.output_size[2])
            self.load(self.gradients, (y * self.strip + j) * self.vector, self.gradient, offset, guards)

    def list_guards(self, offset: int, step: int, width: int) -> list[Expr]:
        """Return the conditions that a column is in a row of an array, if TMA copies whole rows; boxes have zeros.

        Args:
            offset: The column, from that of the thread's first column of dY on.
            step: Distance of the columns below two neighbouring ones of dY.
            width: Columns of the array.
        """
        if not self.config.whole_rows or self.config.has_known_columns:
            return []
        column, last = self.first_column * step + offset, int(self.config.columns) - self.strip
        return [column >= 0] * (offset < 0) + [column < width] * (last * step + offset >= width)

    def load(self, values: Buffer, first: int, address: Expr, offset: int, guards: Sequence[Expr]) -> None:
        """Load a vector of channels of a pixel, or zeros, and convert it to the dtype of the sums."""
        num_bytes = self.vector * self.config.itemsize
        if guards:
            for word in range(max(1, num_bytes // 4)):
                store(self.words, word, T.uint32(0))
        with if_(logical_and(*guards)):
            load_shared(self.words, address + to_uint32(offset % 2**32), num_bytes)  # addresses have 32 bits
        for e, value in enumerate(unpack(self.words, self.vector, self.config.w.storage)):
            store(values, first + e, value)

    def add_products(self, row_taps: Sequence[tuple[int, int]]) -> None:
        """Multiply the loaded row of X by rows of dY, for all columns of the filter."""
        step, dilation = self.shape.strides[2], self.shape.dilations[2]
        num_columns, vector = self.shape.kernel_size[2], self.vector
        positions = {column: position for position, column in enumerate(self.columns)}
        for j in range(self.strip):
            for (y, r), s in ((row_tap, s) for row_tap in row_taps for s in range(num_columns)):
                position = positions.get(j * step + s * dilation)
                if position is None:  # the column is outside of the image
                    continue
                for e in range(vector):
                    number = (r * num_columns + s) * vector + e
                    product = self.inputs[position * vector + e] * self.gradients[(y * self.strip + j) * vector + e]
                    store(self.sums, number, self.sums[number] + product)
