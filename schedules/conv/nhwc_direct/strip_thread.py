"""Building blocks of the NHWC direct kernels: coordinates of a thread, loops, copies and input window."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tvm import tirx
from tvm.s_tir import Schedule
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.arithmetic import ceil_div, round_up
from tvmconv.target import MAX_BLOCKS_YZ
from tvmconv.workloads import Conv
from tvmconv.workloads.dtypes import get_itemsize

from ...tir_builder import build_schedule, serial_loop, thread_axis, unrolled_loop, vectorized_loop
from ..layout_conversion import build_channels_last_schedule
from ..plane_shape import PlaneShape
from ..tensor_cores.gemm.cta import allow_dependent_launch
from ..transposed_view import TransposedView
from .strip_config import MAX_LOAD_BYTES, StripConfig

ROW_AXIS, COLUMN_AXIS = 1, 2  # of `PlaneShape`
MAX_UNROLLED_COPIES = 32  # copies per thread to shared memory


@dataclass(frozen=True)
class StripThread:
    """A thread: its config, the argument buffers by name, and its coordinates."""

    config: StripConfig
    shape: PlaneShape
    arrays: Mapping[str, Any]
    image: Any  # image of the batch
    plane: Any  # output plane; 0 if there is only one
    block_channel: Any  # first channel of the thread's block
    vector_idx: Any  # index of the thread's channel vector in the whole tensor; it may exceed the last one
    row: Any  # first output row of the thread
    column: Any  # first output column of the thread
    thread_idx: Any  # index of the thread in its block

    @property
    def first_channel(self) -> Any:
        """First channel of the thread; a thread without channels reads the last vector, but never stores."""
        channels = self.config.channels
        vector_idx = self.vector_idx if channels.divides else tirx.min(self.vector_idx, channels.extent - 1)
        return vector_idx * self.config.vector


class StripKernel(Protocol):
    """Emitter of a thread's work."""

    def __init__(self, thread: StripThread) -> None: ...

    def emit(self) -> None:
        """Emit the work."""


def build_mixed_schedule(w: Conv, config: StripConfig, kernel: type[StripKernel]) -> Schedule:
    """Return the schedule of a convolution whose arrays are channels last, or converted by launches of their own."""
    return build_channels_last_schedule(w, functools.partial(_emit_kernel, config, kernel), is_portable=True)


def build_conv_schedule(config: StripConfig, kernel: type[StripKernel]) -> Schedule:
    """Return a convolution, or the gradient whose view the config has, as a scheduled function of its arguments."""
    w = config.w
    if not isinstance(w, TransposedView):
        return build_schedule(w, functools.partial(_emit_kernel, config, kernel))
    roles = w.argument_roles

    def emit(arrays: dict[str, Any]) -> None:
        _emit_kernel(config, kernel, {roles.get(name, name): array for name, array in arrays.items()})

    return build_schedule(w.gradient, emit)


def _emit_kernel(config: StripConfig, kernel: type[StripKernel], arrays: Mapping[str, Any]) -> None:
    with contextlib.ExitStack() as stack:
        kernel(_open_launch_loops(config, arrays, stack)).emit()


def _open_launch_loops(config: StripConfig, arrays: Mapping[str, Any], stack: contextlib.ExitStack) -> StripThread:
    """Open the loops over blocks and threads; the device's compiler unrolls the unrolled loops inside them."""

    def bind(extent: int, thread: str) -> Any:
        return stack.enter_context(thread_axis(extent, thread))

    channels, rows, columns = config.channels, config.rows, config.columns
    channel_blocks, pixel_blocks = channels.block, columns.block * rows.block
    shape = PlaneShape.from_workload(config.w)
    num_images, planes_per_image = shape.num_output_planes, shape.output_size[0]
    if max(pixel_blocks, num_images) > MAX_BLOCKS_YZ:
        block = bind(num_images * pixel_blocks * channel_blocks, "blockIdx.x")
        image, pixel = block // (pixel_blocks * channel_blocks), block // channel_blocks % pixel_blocks
        channel = block % channel_blocks
    else:
        image, pixel = bind(num_images, "blockIdx.z"), bind(pixel_blocks, "blockIdx.y")
        channel = bind(channel_blocks, "blockIdx.x")
    axes = (rows, columns, channels) if config.HAS_INNERMOST_CHANNELS else (channels, rows, columns)
    z, y, x = (bind(tile.thread, f"threadIdx.{axis}") for tile, axis in zip(axes, "zyx", strict=True))
    thread_idx = (z * axes[1].thread + y) * axes[2].thread + x
    row, column, channel_thread = (z, y, x) if config.HAS_INNERMOST_CHANNELS else (y, x, z)
    stack.enter_context(T.attr(0, "pragma_unroll_explicit", 0))
    allow_dependent_launch()
    return StripThread(
        config,
        shape,
        arrays,
        image=image // planes_per_image if planes_per_image > 1 else image,
        plane=image % planes_per_image if planes_per_image > 1 else 0,
        block_channel=channel * channels.thread * config.vector,
        vector_idx=channel * channels.thread + channel_thread,
        row=(pixel // columns.block * rows.thread + row) * rows.local,
        column=(pixel % columns.block * columns.thread + column) * columns.local,
        thread_idx=thread_idx,
    )


def allocate_local(name: str, shape: Sequence[int], dtype: str) -> Any:
    """Allocate an array in registers."""
    return IRBuilder.name(name, T.sblock_alloc_buffer(tuple(shape), dtype, scope="local"))


def emit_guarded(
    conditions: Sequence[Any], emit_then: Callable[[], None], emit_else: Callable[[], None] | None = None
) -> None:
    """Emit `emit_then` under all conditions, and `emit_else` otherwise."""
    if not conditions:
        emit_then()
        return
    with T.If(tirx.all(*conditions)):
        with T.Then():
            emit_then()
        if emit_else:
            with T.Else():
                emit_else()


def emit_vector_copy(
    num_lanes: int, target: Any, target_index: Callable[[Any], Sequence[Any]], value: Callable[[Any], Any]
) -> None:
    """Emit `target[target_index(lane)] = value(lane)` for all lanes, in the widest possible vectors."""
    width = min(num_lanes, MAX_LOAD_BYTES // get_itemsize(str(target.dtype)))
    for first_lane in range(0, num_lanes, width):
        with vectorized_loop(width) as lane:
            T.buffer_store(target, value(lane + first_lane), [*target_index(lane + first_lane)])


def load_filters_to_smem(thread: StripThread) -> Any:
    """Copy a block's filters to shared memory, transposed to (taps and input channels, output channels of the block).

    Neighbouring threads copy neighbouring output channels, whose filters are a filter apart in global memory. They
    store to neighbouring words, and the L1 cache serves the other elements of the sectors that they read. Taps keep
    their order in memory.
    """
    config, shape = thread.config, thread.shape
    w, num_threads, channels_per_group = config.w, config.num_threads, config.channels_per_group
    block_channels, num_rows = config.channels.thread * config.vector, shape.num_taps * config.channels_per_group
    shared = IRBuilder.name("filters", T.sblock_alloc_buffer((num_rows, block_channels), w.storage, scope="shared"))
    num_copies = ceil_div(num_rows * block_channels, num_threads)
    open_loop = unrolled_loop if num_copies <= MAX_UNROLLED_COPIES else serial_loop
    with open_loop(num_copies, "copy") as copy_idx:
        element = (copy_idx * num_threads + thread.thread_idx) // block_channels
        channel = (copy_idx * num_threads + thread.thread_idx) % block_channels
        conditions = [element < num_rows] * (num_rows * block_channels % num_threads > 0)
        conditions += [thread.block_channel + channel < w.O] * (not config.channels.divides)
        tap, channel_in = element // channels_per_group, element % channels_per_group
        index = shape.weight_index(thread.block_channel + channel, tap, channel_in)
        value = thread.arrays["K"][index]
        emit_guarded(conditions, lambda: T.buffer_store(shared, value, [element, channel]))
    return shared


def load_planes_to_smem(thread: StripThread) -> Any:
    """Copy the input planes of a block's channels, which are contiguous, to shared memory."""
    config, shape, dtype = thread.config, thread.shape, thread.config.w.storage
    pixels, width, pitch = math.prod(shape.input_size), config.copied_vector, config.plane_pitch
    num_planes = int(config.channels.thread)
    shared = IRBuilder.name("planes", T.sblock_alloc_buffer((num_planes * pitch,), dtype, scope="shared"))
    num_vectors = num_planes * pixels // width
    with serial_loop(ceil_div(num_vectors, config.num_threads), "copy") as copy_idx:
        first = (copy_idx * config.num_threads + thread.thread_idx) * width

        def read_input(lane: Any) -> Any:
            # Vectors may cross the ends of rows and planes: their index is that of a line.
            column = thread.block_channel * pixels + first + lane
            return thread.arrays["X"][shape.array_index(thread.image, (0, 0, column), 0)]

        emit_guarded(
            [first < num_planes * pixels] * (num_vectors % config.num_threads > 0),
            lambda: emit_vector_copy(
                width, shared, lambda lane: (first + first // pixels * (pitch - pixels) + lane,), read_input
            ),
        )
    return shared


@dataclass(frozen=True)
class RowResidue:
    """Filter rows that meet inputs of the same output rows: those at a distance of `period`, from `first` on.

    The period is 1 unless a gradient has a stride.
    """

    shape: PlaneShape
    first: int
    period: int

    @property
    def num_rows(self) -> int:
        """Number of filter rows."""
        return ceil_div(self.shape.kernel_size[ROW_AXIS] - self.first, self.period)

    def filter_row(self, repetition: Any) -> Any:
        """Return one of the filter rows."""
        return repetition if self.period == 1 else repetition * self.period + self.first

    def input_rows(self, repetition: Any, num_outputs: int) -> dict[int, Any]:
        """Return the offset of the input row below one of the filter rows, by the output rows that have one."""
        step = self.period * self.shape.dilations[ROW_AXIS] // self.shape.upsampling[ROW_AXIS]
        offsets = {i: self.shape.input_offset(ROW_AXIS, i, self.first) for i in range(num_outputs)}
        return {i: offset + repetition * step for i, offset in offsets.items() if offset is not None}


def list_row_residues(shape: PlaneShape) -> list[RowResidue]:
    """Return the residues of the filter rows."""
    upsampling = shape.upsampling[ROW_AXIS]
    period = upsampling // math.gcd(upsampling, shape.dilations[ROW_AXIS])
    return [RowResidue(shape, first, period) for first in range(min(period, shape.kernel_size[ROW_AXIS]))]


class InputWindow:
    """Input rows of a strip in registers, which neighbouring outputs share: `values` (rows, columns, channels)."""

    def __init__(self, thread: StripThread, vector_elements: int, num_rows: int, num_unrolled_taps: int) -> None:
        w, shape = thread.config.w, thread.shape
        self._thread, self._shape, self._vector_elements = thread, shape, vector_elements
        self.planes: Any = None  # input planes of the block in shared memory; None if threads read global memory
        self._has_whole_filter_rows = num_unrolled_taps == shape.kernel_size[-1]
        stride = shape.strides[-1]
        offsets = shape.list_input_offsets(COLUMN_AXIS, thread.config.columns.local, num_unrolled_taps)
        self._is_contiguous = offsets == [*range(len(offsets))]
        if not self._is_contiguous:  # inputs of neighbouring columns are adjacent
            offsets.sort(key=lambda offset: (offset % stride, offset))
        self._column_offsets = offsets
        # Vectors of columns are aligned in memory and in the window, whose first column may lie within a vector.
        has_vectors = thread.config.has_column_vectors and self._is_contiguous and self._has_whole_filter_rows
        self._vector_columns = int(thread.config.input_vector_columns) if has_vectors else 1
        self._first_position = -shape.pad_low[COLUMN_AXIS] % self._vector_columns
        num_positions = round_up(self._first_position + max(1, len(offsets)), self._vector_columns)
        self.values = allocate_local("window", (num_rows, num_positions, vector_elements), w.storage)
        self._first_row, self._first_column = (  # possibly outside the input
            shape.first_input(axis, first_output) for axis, first_output in ((1, thread.row), (2, thread.column))
        )

    @contextlib.contextmanager
    def open_columns(self, filter_column: int) -> Iterator[list[tuple[Any, Any]]]:
        """Open a loop over the output columns, and yield each with the position of its input in a row of the window.

        If some columns have no input below the tap, no loop is opened, and the others are listed.
        """
        num_columns = self._thread.config.columns.local
        offsets = [self._shape.input_offset(COLUMN_AXIS, column, filter_column) for column in range(num_columns)]
        used = [(i, offset) for i, offset in enumerate(offsets) if offset is not None and self._may_be_inside(offset)]
        if self._shape.is_transposed and len(used) < num_columns:
            yield [(column, self._column_offsets.index(offset)) for column, offset in used]
            return
        with unrolled_loop(num_columns, "j") as column:
            first, *others = [self._first_position + self._column_offsets.index(offset) for _, offset in used]
            yield [(column, first + column * (others[0] - first) if others else first)]

    def _may_be_inside(self, offset: int) -> bool:
        """Return whether an input column may be inside of the image, which is known if there is only one tile."""
        is_known = self._shape.is_transposed and self._has_whole_filter_rows and self._thread.config.has_one_column_tile
        if not is_known:
            return True
        return 0 <= self._shape.first_input(COLUMN_AXIS, 0) + offset < self._shape.input_size[COLUMN_AXIS]

    def is_row_inside(self, row_offset: Any) -> Any:
        """Return the condition under which an input row is inside of the image."""
        row = self._first_row + row_offset
        return tirx.all(row >= 0, row < self._shape.input_size[1])

    def load_row(self, window_row: Any, filter_plane: Any, row_offset: Any, channel: Any, column: Any = 0) -> None:
        """Load an input row of the plane that `filter_plane` selects to `window_row`, from a channel on.

        The row and the column are offsets from the first ones of the strip.
        """
        plane_step, filter_step = self._shape.strides[0], self._shape.dilations[0]
        plane = self._thread.plane * plane_step - self._shape.pad_low[0] + filter_plane * filter_step
        row = self._first_row + row_offset

        def load(position: Any, offset: Any) -> None:
            self._load_vector(window_row, position, (plane, row, self._first_column + column + offset), channel)

        if self._vector_columns > 1:
            self._load_column_vectors(window_row, (plane, row, self._first_column + column), channel)
        elif self._is_contiguous:
            with unrolled_loop(len(self._column_offsets), "g") as position:
                load(position, position)
        else:
            for position, offset in enumerate(self._column_offsets):
                load(position, offset)

    def _load_column_vectors(self, window_row: Any, first_coords: tuple[Any, Any, Any], channel: Any) -> None:
        """Load a row of a channels-first input: aligned vectors of columns, and the columns before and behind them.

        Each vector is inside or outside of the image as a whole.
        """
        width, first, num_columns = self._vector_columns, self._first_position, len(self._column_offsets)
        (plane, row, column), position = first_coords, 0
        while position < num_columns:
            is_vector = (first + position) % width == 0 and position + width <= num_columns
            coords = plane, row, column + position
            self._load_vector(window_row, first + position, coords, channel, width if is_vector else 1)
            position += width if is_vector else 1

    def _load_vector(
        self, window_row: Any, position: Any, coords: tuple[Any, Any, Any], channel: Any, num_columns: int = 1
    ) -> None:
        """Load a vector of the input, or zeros outside the image; a plane is given on the grid of the outputs.

        The vector has neighbouring channels, or several neighbouring columns of one channel.
        """
        thread, shape = self._thread, self._thread.shape
        w, (plane, row, column), conditions = thread.config.w, coords, []
        if (step := shape.upsampling[0]) > 1:  # planes are not unrolled: some taps meet zeros between them
            conditions, plane = [tirx.floormod(plane, step) == 0], tirx.floordiv(plane, step)
        coords = plane, row, column

        def fill_vector(get_value: Callable[[Any], Any]) -> None:
            num_lanes = self._vector_elements if num_columns == 1 else num_columns

            def get_target(lane: Any) -> tuple[Any, ...]:
                return (window_row, position, lane) if num_columns == 1 else (window_row, position + lane, 0)

            emit_vector_copy(num_lanes, self.values, get_target, get_value)

        def read_input(lane: Any) -> Any:
            if self.planes is not None:
                pixel = row * shape.input_size[COLUMN_AXIS] + column + (lane if num_columns > 1 else 0)
                return self.planes[(channel - thread.block_channel) * thread.config.plane_pitch + pixel]
            index = shape.array_index(thread.image, coords, channel + lane)
            if num_columns > 1:
                index = shape.array_index(thread.image, (plane, row, column + lane), channel)
            return thread.arrays["X"][index]

        emit_guarded(
            conditions + self._list_bounds_checks(coords),
            lambda: fill_vector(read_input),
            lambda: fill_vector(lambda lane: tirx.const(0, w.storage)),
        )

    def _list_bounds_checks(self, coords: tuple[Any, Any, Any]) -> list[Any]:
        """Return the conditions under which an input coordinate is inside the image, without those that always hold."""
        config, shape = self._thread.config, self._thread.shape
        computed_sizes = (shape.output_size[0], *(tile.block * tile.size for tile in (config.rows, config.columns)))
        conditions = []
        for i, (coord, size, extent) in enumerate(zip(coords, shape.input_size, shape.window_extent, strict=True)):
            last_position = (computed_sizes[i] - 1) * shape.strides[i] + extent - 1 - shape.pad_low[i]
            last_coord = last_position // shape.upsampling[i]
            conditions += [coord >= 0] * (shape.pad_low[i] > 0) + [coord < size] * (last_coord >= size)
        return conditions
