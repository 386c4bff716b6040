"""Depthwise convolution, channels last: vectors of channels, and a window of the input that slides in registers.

Each channel has its own filter, so the kernel does little arithmetic. It is bound by memory, or by load latency for
small images. Channels are contiguous: a thread computes a vector of up to 16 bytes of them for a strip of neighbouring
output pixels, and neighbouring threads compute the next vectors, so each load and store of a warp consists of whole
sectors.

A thread walks down the input rows of its strip. It loads the window of all its columns from each row and adds it to
every output row whose filter covers the row, so an input is loaded and widened to float32 once per thread, not once per
tap. The next row is loaded before the current one is added. The L1 cache serves inputs that neighbouring threads share;
no input tile in shared memory and no barrier are needed.

The weight is stored filter by filter, with the channels outermost, so a vector of channels is not contiguous. A block
transposes its part in shared memory while the first input row is being loaded (`weight`). Alternatively, each thread
loads the filters of all its channels, which are contiguous, in vectors and keeps them in registers.

Small images have few strips; threads then compute fewer channels and pixels, so that a large GPU is filled. The
defaults have the lowest estimated latency (`strip_knobs`).

Integers of 8 bits are widened, too: their products and sums are exact in float32 up to 1,024 taps.

In a mixed layout, the launch that is channels first is X's or Y's transpose, before or after the kernel. A signal is an
image of one row. Each output plane of a volume is computed like an image, from as many input planes as
the filter is deep; the thread walks down the rows of all of them.

It differs from `depthwise`, whose blocks stage an input tile channel by channel, in vector loads and four times the
outputs per load. Tensor expressions cannot express it, because the row determines which output row and filter row meet;
it is emitted as TIR.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
from tvm.s_tir import Schedule
from tvm.script.ir_builder import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.registry import schedule
from tvmconv.requirements import SOME_CHANNELS_LAST, all_of
from tvmconv.space import Knobs
from tvmconv.workloads import Conv
from tvmconv.workloads.dtypes import INT8, get_itemsize

from ...tir_builder import serial_loop, unrolled_loop
from ..reduction import FLOAT_DTYPES, has_filter_per_channel
from ..tensor_cores.eight_bit_requirements import CHANNELS_LAST_EIGHT_BITS
from ..transposed_view import TransposedView
from .strip_config import WORD_BYTES, OperandTraffic, StripConfig
from .strip_epilogue import make_strip_epilogue
from .strip_knobs import declare_knobs
from .strip_thread import (
    ROW_AXIS,
    InputWindow,
    StripThread,
    allocate_local,
    build_mixed_schedule,
    emit_guarded,
    emit_vector_copy,
    list_row_residues,
    load_filters_to_smem,
    load_planes_to_smem,
)

MAX_LOADS = 128  # unrolled input loads per thread, each with its own guards


class DepthwiseConfig(StripConfig):
    """One config, or many configs as columns."""

    UNROLL_SCOPES = ("filter", "row", "tap")
    WEIGHT_SCOPES = ("shared", "registers", "global")
    REQUIREMENTS: ClassVar[Mapping[str, Callable[[StripConfig], Any]]] = {
        f"at most {MAX_LOADS} unrolled loads per thread": lambda config: config.unrolled_loads <= MAX_LOADS,
        "filters stay in registers only if the whole filter is unrolled": lambda config: (
            np.not_equal(config.weight_scope, "registers") | np.equal(config.unroll_scope, "filter")
        ),
        # TVM would omit the barrier, because it assumes that threads read what they stored themselves.
        "filters in shared memory have more than one tap or channel per thread": lambda config: (
            ~config.is_weight_shared | (config.num_taps * config.vector > 1)
        ),
    }
    MAX_DEFAULT_PRODUCTS = 1024  # some kernels spill registers beyond this

    @classmethod
    def is_vector_allowed(cls, w: Conv | TransposedView, vector: int) -> bool:
        """Return whether the channels are those of whole input channels, or of a part of one."""
        multiplier = w.O // w.groups
        return vector % multiplier == 0 or multiplier % vector == 0

    @property
    def traffic(self) -> OperandTraffic:
        """Work of a thread with its operands.

        Registers hold two input windows and filters, those of 8 bits as floats. Filters are scattered element by
        element in global memory, or once for registers; a block reads a sector for one element at a time.
        """
        rows, row_taps = self.rows.local, self.w.kernel[-1]
        filter_vectors = self.num_taps * self._select_by_unroll_scope(1, rows, rows)
        unrolled_columns = self._select_by_unroll_scope(row_taps, row_taps, 1)
        taps = np.where(np.equal(self.weight_scope, "registers"), self.num_taps, unrolled_columns)
        num_windows = self._select_by_unroll_scope(2, 2, 2, 1)
        is_global = np.equal(self.weight_scope, "global")
        scattered_vectors = np.where(is_global, filter_vectors * self.vector, self.num_taps)
        return OperandTraffic(
            filter_vectors,
            widened_elements=self.vector * (self.loaded_vectors + filter_vectors),
            operand_registers=self.vector
            * (WORD_BYTES if self.w.storage == INT8.storage else get_itemsize(self.w.storage))
            / WORD_BYTES
            * (num_windows * self.window_vectors + taps),
            scattered_vectors=scattered_vectors,
            scattered_instructions=scattered_vectors,
            reads_per_filter_byte=2,
        )


@schedule(
    *("conv1d", "conv2d", "conv3d"),
    dtypes=(*FLOAT_DTYPES, INT8.name),
    usage=lambda w, columns: DepthwiseConfig.compute_usage(w.to_channels_last(), columns),
    condition=all_of(SOME_CHANNELS_LAST, CHANNELS_LAST_EIGHT_BITS, has_filter_per_channel),
    search_if=has_filter_per_channel,
    supersedes=("depthwise",),
)
def depthwise_nhwc(s: Schedule, w: Conv, k: Knobs) -> Schedule:
    """Compute a vector of channels for a strip of pixels per thread; tile rows and columns (block, thread, local)."""
    config = declare_knobs(DepthwiseConfig, k, w.to_channels_last())
    return build_mixed_schedule(w, config, DepthwiseNhwcKernel)


class DepthwiseNhwcKernel:
    """Emitter of a thread's work."""

    def __init__(self, thread: StripThread) -> None:
        self.thread, self.config, self.shape = thread, thread.config, thread.shape
        w, vector = self.config.w, self.config.vector
        self.channel_multiplier = w.O // w.groups
        self.input_vector_elements = max(1, vector // self.channel_multiplier)  # input channels of the thread's outputs
        self.num_unrolled_taps = w.kernel[-1] if self.config.unroll_scope != "tap" else 1  # filter columns
        self.epilogue = make_strip_epilogue(thread)
        num_windows = 1 if self.config.unroll_scope == StripConfig.INPUT_ROW_SCOPE else 2
        self.input_window = InputWindow(thread, self.input_vector_elements, num_windows, self.num_unrolled_taps)
        self.tap_regs = allocate_local("taps", (self.num_unrolled_taps, vector), w.storage)

    def emit(self) -> None:
        """Emit the thread's work."""
        if self.config.input_scope == "shared":
            self.input_window.planes = load_planes_to_smem(self.thread)
        if self.config.weight_scope == "shared":
            self.smem_filters = load_filters_to_smem(self.thread)
        elif self.config.weight_scope == "registers":
            self.load_filters_to_registers()
        {
            "filter": self.emit_unrolled_rows,
            "row": self.emit_filter_row_loop,
            "input_row": self.emit_input_row_loop,
            "tap": self.emit_tap_loop,
        }[self.config.unroll_scope]()

    def load_filters_to_registers(self) -> None:
        """Load the filters of the thread's channels, which are contiguous, in vectors."""
        vector, taps = self.config.vector, self.shape.num_taps
        self.filter_regs = allocate_local("filters", (vector * taps,), self.config.w.storage)
        with unrolled_loop(taps, "chunk") as chunk:

            def get_filter_value(lane: Any) -> Any:
                element = chunk * vector + lane
                return self.get_filter_element(element // taps, element % taps)

            emit_vector_copy(vector, self.filter_regs, lambda lane: (chunk * vector + lane,), get_filter_value)

    def get_filter_element(self, channel: Any, tap: Any) -> Any:
        """Return a filter element of one of the thread's channels; taps have their order in memory."""
        return self.thread.arrays["K"][self.shape.weight_index(self.thread.first_channel + channel, tap, 0)]

    def load_taps(self, filter_row: Any, first_column: Any = 0) -> None:
        """Load the unrolled taps of a filter row, counted over all planes, to registers."""
        vector, (*_, num_columns) = self.config.vector, self.shape.kernel_size
        with unrolled_loop(self.num_unrolled_taps, "s") as s:
            tap = self.shape.weight_tap(filter_row * num_columns + first_column + s)
            if self.config.weight_scope == "shared":
                lane_offset = self.thread.vector_idx * vector - self.thread.block_channel
                emit_vector_copy(
                    vector,
                    self.tap_regs,
                    lambda lane: (s, lane),
                    lambda lane: self.smem_filters[tap, lane_offset + lane],
                )
            else:
                with unrolled_loop(vector, "channel") as channel:
                    if self.config.weight_scope == "registers":
                        value = self.filter_regs[channel * self.shape.num_taps + tap]
                    else:
                        value = self.get_filter_element(channel, tap)
                    T.buffer_store(self.tap_regs, value, [s, channel])

    def load_input_row(self, window_half: int, filter_plane: Any, input_row: Any, column: Any = 0) -> None:
        """Load an input row, of the plane that `filter_plane` selects, to one half of the window."""
        channel = self.thread.first_channel // self.channel_multiplier
        self.input_window.load_row(window_half, filter_plane, input_row, channel, column)

    def accumulate_row(self, window_half: int, row_idx: int) -> None:
        """Accumulate an input row to output row `row_idx` of the strip, with the loaded taps."""
        for s in range(self.num_unrolled_taps):
            with (
                self.input_window.open_columns(s) as columns,
                unrolled_loop(self.config.vector, "channel") as channel,
            ):
                for j, position in columns:
                    input_channel = channel // self.channel_multiplier if self.input_vector_elements > 1 else 0
                    input_value = self.input_window.values[window_half, position, input_channel]
                    self.epilogue.accumulate_product(row_idx, j, channel, input_value, self.tap_regs[s, channel])

    def emit_unrolled_rows(self) -> None:
        """Walk down the input rows, with all rows of the strip and of the filter unrolled."""
        rows_per_thread, (filter_planes, filter_rows, _) = self.config.rows.local, self.shape.kernel_size
        input_rows = [
            (filter_plane, input_row)
            for filter_plane in range(filter_planes)
            for input_row in self.shape.list_input_offsets(ROW_AXIS, rows_per_thread)
        ]
        last_rows = {  # the last input row of each output row that has one
            row_idx: row_number
            for row_number, (_, input_row) in enumerate(input_rows)
            for row_idx in range(rows_per_thread)
            if self.shape.find_tap(ROW_AXIS, row_idx, input_row) is not None
        }
        self.load_input_row(0, *input_rows[0])
        self.epilogue.init_accumulators()
        for row_number, (filter_plane, input_row) in enumerate(input_rows):
            if row_number + 1 < len(input_rows):
                self.load_input_row((row_number + 1) % 2, *input_rows[row_number + 1])
            for row_idx in range(rows_per_thread):
                filter_row = self.shape.find_tap(ROW_AXIS, row_idx, input_row)
                if filter_row is not None:
                    self.load_taps(filter_plane * filter_rows + filter_row)
                    self.accumulate_row(row_number % 2, row_idx)
                    if last_rows[row_idx] == row_number:
                        self.epilogue.store_row(row_idx)
        for row_idx in sorted({*range(rows_per_thread)} - {*last_rows}):
            self.epilogue.store_row(row_idx)

    def emit_filter_row_loop(self) -> None:
        """Loop over the filter rows, and load for each the input row that every output row of the strip needs.

        The filter rows of each residue are a loop.
        """
        filter_planes, filter_rows, _ = self.shape.kernel_size
        self.epilogue.init_accumulators()
        for residue in list_row_residues(self.shape):
            with serial_loop(filter_planes * residue.num_rows, "r") as row:
                plane, repetition = (
                    (0, row) if filter_planes == 1 else (row // residue.num_rows, row % residue.num_rows)
                )
                self.load_taps(row if residue.period == 1 else plane * filter_rows + residue.filter_row(repetition))
                for row_idx, input_row in residue.input_rows(repetition, self.config.rows.local).items():
                    self.load_input_row(row_idx % 2, plane, input_row)
                    self.accumulate_row(row_idx % 2, row_idx)
        self.store_rows()

    def emit_input_row_loop(self) -> None:
        """Loop over the input rows, and add each to the output rows that one of the filter rows connects with it."""
        filter_planes, filter_rows, _ = self.shape.kernel_size
        step, pad_low = self.shape.upsampling[ROW_AXIS], self.shape.pad_low[ROW_AXIS]
        first_offset, *others = self.shape.list_input_offsets(ROW_AXIS, self.config.rows.local)
        input_rows = len(others) + 1
        self.epilogue.init_accumulators()
        with serial_loop(filter_planes * input_rows, "i") as index:
            filter_plane = 0 if filter_planes == 1 else index // input_rows
            input_row = index % input_rows + first_offset

            def emit_products() -> None:
                self.load_input_row(0, filter_plane, input_row)
                for row_idx in range(self.config.rows.local):
                    filter_row = step * (input_row + -pad_low // step) + pad_low - row_idx

                    def accumulate(row_idx: int = row_idx, filter_row: Any = filter_row) -> None:
                        self.load_taps(filter_plane * filter_rows + filter_row)
                        self.accumulate_row(0, row_idx)

                    emit_guarded([filter_row >= 0, filter_row < filter_rows], accumulate)

            emit_guarded([self.input_window.is_row_inside(input_row)], emit_products)
        self.store_rows()

    def emit_tap_loop(self) -> None:
        """Loop over the filter taps, and load the inputs of each."""
        (_, row_stride, _), (_, row_dilation, column_dilation) = self.shape.strides, self.shape.dilations
        self.epilogue.init_accumulators()
        with serial_loop(self.shape.num_taps, "tap") as tap:
            filter_plane, filter_row, filter_column = self.shape.tap_from_index(tap)
            self.load_taps(tap // self.shape.kernel_size[-1], filter_column)
            for row_idx in range(self.config.rows.local):
                input_row = row_idx * row_stride + filter_row * row_dilation
                self.load_input_row(row_idx % 2, filter_plane, input_row, filter_column * column_dilation)
                self.accumulate_row(row_idx % 2, row_idx)
        self.store_rows()

    def store_rows(self) -> None:
        """Store all output rows of the strip."""
        for i in range(self.config.rows.local):
            self.epilogue.store_row(i)
