"""Kernels of direct gradients of weights: sums over pixels in registers, then over a CTA, then over parts.

1. A thread walks over its tiles of pixels. It loads a tile of dY and the rows of X around it, and adds their products
   to the float32 sums of its taps and channels.
2. The threads of a CTA with the same taps and channels add their sums in shared memory, in the order of their index.
3. Each CTA stores the sums of its part of the pixels to a workspace. A second kernel adds the parts: interleaved chains
   first, then the chains in order, so that each run returns the same bits. If there is one part, the first kernel
   stores the gradient itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tvm import tirx
from tvm.s_tir import Schedule
from tvm.script.ir_builder import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.arithmetic import ceil_div
from tvmconv.workloads import epilogue
from tvmconv.workloads.dtypes import ACCUMULATOR

from ...tir_builder import (
    Register,
    allocate,
    build_schedule,
    if_,
    serial_loop,
    store,
    thread_axis,
    unrolled_loop,
)
from ..tensor_cores.gemm.cta import allow_dependent_launch
from .strip_thread import allocate_local, emit_guarded, emit_vector_copy
from .sum_of_parts import emit_sum_of_parts
from .wgrad_config import WgradConfig, list_positions


def build_wgrad_schedule(config: WgradConfig) -> Schedule:
    """Return the gradient of the weight as a scheduled function of its arguments."""

    def emit(arguments: dict[str, Any]) -> None:
        layout = SumLayout(config, arguments)
        if config.num_parts == 1:
            WgradKernel(config, arguments, layout, None).emit()
            return
        workspace = allocate("partial_sums", config.num_parts * layout.sums_per_part, ACCUMULATOR, "global")
        WgradKernel(config, arguments, layout, workspace).emit()
        emit_sum_of_parts(config.num_parts, layout.sums_per_part, workspace, layout.store_result_of_number)

    return build_schedule(config.w, emit)


class SumLayout:
    """Order of the sums of a part, (sum of a thread, tile of the filter, unit), and where they belong in dK."""

    def __init__(self, config: WgradConfig, arguments: Mapping[str, Any]) -> None:
        self._config, self._arguments = config, arguments
        self.filter_tiles = config.filter_blocks * config.threads_taps  # with those that do not exist
        self.units = config.unit_blocks * config.threads_c

    @property
    def sums_per_part(self) -> int:
        """Number of sums of a part."""
        return self._config.num_sums * self.filter_tiles * self.units

    def first_channels(self, unit: Any) -> tuple[Any, Any]:
        """Return the first channel of dY of a unit, and its first channel of X within the group."""
        config = self._config
        vectors_in = config.inputs_per_group // config.vector_in
        return unit // vectors_in * config.vector, unit % vectors_in * config.vector_in

    def first_tap(self, filter_tile: Any) -> tuple[Any, Any, Any]:
        """Return plane, row and column of the first tap of a tile of the filter."""
        _, rows, columns = self._config.filter_tiles
        return (
            filter_tile // (rows * columns),
            filter_tile // columns % rows * self._config.taps_y,
            filter_tile % columns * self._config.taps_x,
        )

    def store_result_of_number(self, number: Any, value: Any) -> None:
        """Store a sum by its number in the order of a part."""
        unit, filter_tile = number % self.units, number // self.units % self.filter_tiles
        self.store_result(number // (self.units * self.filter_tiles), filter_tile, unit, value)

    def store_result(self, number: Any, filter_tile: Any, unit: Any, value: Any) -> None:
        """Apply the epilogue to a sum of a thread and store it, if there is such an element of dK."""
        config, shape, arguments = self._config, self._config.shape, self._arguments
        w, (planes, rows, columns) = config.w, shape.kernel_size
        tap, pair = number // config.sums_per_tap, number % config.sums_per_tap
        plane, row, column = self.first_tap(filter_tile)
        row, column = row + tap // config.taps_x, column + tap % config.taps_x
        channel, channel_in = self.first_channels(unit)
        channel, channel_in = channel + pair // config.vector_in, channel_in + pair % config.vector_in
        conditions = [plane < planes] * (self.filter_tiles > config.num_filter_tiles)
        conditions += [row < rows] * (rows % config.taps_y > 0) + [column < columns] * (columns % config.taps_x > 0)
        conditions += [unit < config.num_units] * (self.units > config.num_units)
        index = shape.array_index(channel, (plane, row, column), channel_in)

        def emit_store() -> None:
            result = epilogue.apply_to_expression(
                w.epilogue, value, lambda name: arguments[name][index].astype(ACCUMULATOR)
            )
            T.buffer_store(arguments[w.RESULT], result.astype(w.argument_dtypes[-1]), [*index])

        emit_guarded(conditions, emit_store)


class WindowColumns:
    """Columns of X that a thread loads for a tile of pixels, without those known to be outside of the image."""

    def __init__(self, config: WgradConfig) -> None:
        shape = config.shape
        self._config, self._stride, self._dilation = config, shape.strides[2], shape.dilations[2]
        offsets = list_positions(config.pixels_x, config.taps_x, self._stride, self._dilation)
        if config.has_known_columns:
            offsets = [offset for offset in offsets if 0 <= offset - shape.pad_low[2] < shape.input_size[2]]
        self.is_contiguous = offsets == [*range(offsets[0], offsets[0] + len(offsets))]
        if not self.is_contiguous:  # columns of neighbouring pixels are adjacent
            offsets.sort(key=lambda offset: (offset % self._stride, offset))
        self.offsets = offsets  # from the first column of the window on, in the order of the registers

    def list_pixels(self, tap: int) -> tuple[list[int], int, int]:
        """Return the neighbouring pixels of a row with a column below a tap, the first position, and the step to next.

        The positions are those of the columns in registers.
        """
        positions = {offset: position for position, offset in enumerate(self.offsets)}
        columns = ((pixel, pixel * self._stride + tap * self._dilation) for pixel in range(self._config.pixels_x))
        met = [(pixel, positions[offset]) for pixel, offset in columns if offset in positions]
        pixels, found = [pixel for pixel, _ in met], [position for _, position in met]
        return pixels, found[0] if found else 0, found[1] - found[0] if len(found) > 1 else 0


class WgradKernel:
    """Emitter of the first kernel; the workspace is None if it stores the gradient itself."""

    def __init__(
        self, config: WgradConfig, arguments: Mapping[str, Any], layout: SumLayout, workspace: Any | None
    ) -> None:
        self.config, self.shape, self.layout, self.workspace = config, config.shape, layout, workspace
        self.dy, self.x = (arguments[name] for name in config.w.OPERANDS)
        self.storage = config.w.storage

    def emit(self) -> None:
        """Emit the kernel."""
        config = self.config
        with contextlib.ExitStack() as stack:
            block, self.part = self.open_blocks(stack)
            extents = config.threads_pixels, config.threads_taps, config.threads_c
            self.pixel_thread, tap_thread, unit_thread = (
                stack.enter_context(thread_axis(extent, f"threadIdx.{axis}"))
                for axis, extent in zip("zyx", extents, strict=True)
            )
            stack.enter_context(T.attr(0, "pragma_unroll_explicit", 0))
            allow_dependent_launch()
            # CTAs that read the same pixels are neighbours.
            filter_block, unit_block = block % config.filter_blocks, block // config.filter_blocks % config.unit_blocks
            self.first_filter_tile, self.first_unit = filter_block * config.threads_taps, unit_block * config.threads_c
            self.thread_of_sum = tap_thread * config.threads_c + unit_thread
            self.filter_tile, self.unit = self.first_filter_tile + tap_thread, self.first_unit + unit_thread
            self.sums = allocate_local("sums", (config.num_sums,), ACCUMULATOR)
            with unrolled_loop(config.num_sums, "i") as i:
                T.buffer_store(self.sums, tirx.const(0, ACCUMULATOR), [i])
            self.accumulate_pixels()
            self.store_sums()

    def open_blocks(self, stack: contextlib.ExitStack) -> tuple[Any, Any]:
        """Open the loop over the CTAs; return the index of a CTA within its part or beyond, and that of its part."""
        config = self.config
        block = stack.enter_context(thread_axis(config.num_blocks, "blockIdx.x"))
        return block, block // (config.filter_blocks * config.unit_blocks)

    def store_sums(self) -> None:
        """Store the sums of the CTA's part over its threads."""
        if self.config.threads_pixels > 1:
            self.reduce_over_threads()
            return
        with unrolled_loop(self.config.num_sums, "i") as i:
            self.store_sum(i, self.filter_tile, self.unit, self.sums[i])

    def accumulate_pixels(self) -> None:
        """Walk over the thread's tiles of pixels.

        With `prefetch_tile`, the loads of the next tile overlap with the products of this one. They go to the registers
        of what the thread has just converted to the dtype of the sums, so that only the window of X needs more of them.
        """
        config = self.config
        self.locate_channels()
        self.image, *self.first_pixel = (Register(name) for name in ("image", "plane", "row", "column"))
        self.first_input = [Register(name) for name in ("input_plane", "input_row", "input_column")]
        self.tile = Register("tile")
        self.allocate_tile()
        if config.prefetch_tile:
            self.locate_tile(0)
            self.load_gradient()
            for number in range(len(self.row_offsets)):
                self.load_row(number)
        with serial_loop(config.iterations, "iteration") as iteration:
            if config.prefetch_tile:
                self.locate_tile(iteration + 1)
                self.widen(self.gradient, self.gradient_regs)
                self.load_gradient()
            else:
                self.locate_tile(iteration)
                self.load_gradient()
                self.widen(self.gradient, self.gradient_regs)
            self.accumulate_tile()

    def locate_channels(self) -> None:
        """Compute the thread's first channels of dY and X."""
        config, existing = self.config, self.unit
        if self.layout.units > config.num_units:  # a thread without channels reads others, but never stores
            existing = tirx.min(existing, config.num_units - 1)
        # Coordinates are in registers: TVM would otherwise simplify long indices for each of many loads. Channels are
        # multiples of vectors, so that TVM can prove the alignment of loads.
        vectors_in = config.inputs_per_group // config.vector_in
        self.channel = Register("vector_index", value=existing // vectors_in).value * config.vector
        group = self.channel // config.outputs_per_group
        if config.is_depthwise:
            self.channel_in = group
        else:
            vector_in = Register("input_vector_index", value=existing % vectors_in).value
            self.channel_in = group * config.inputs_per_group + vector_in * config.vector_in

    def allocate_tile(self) -> None:
        """Allocate registers for a tile of dY and for the rows of X around it, as loaded and as multiplied."""
        config, shape = self.config, self.shape
        pixels, self.columns = config.pixels_y * config.pixels_x, WindowColumns(config)
        self.row_offsets = list_positions(config.pixels_y, config.taps_y, shape.strides[1], shape.dilations[1])
        num_columns, num_inputs = len(self.columns.offsets), int(config.loaded_inputs)
        loaded_rows = len(self.row_offsets) if config.prefetch_tile else 1
        self.gradient_regs = allocate_local("gradient", (pixels, config.vector), self.storage)
        self.gradient = allocate_local("wide_gradient", (pixels, config.vector), ACCUMULATOR)
        self.input_regs = allocate_local("inputs", (loaded_rows * num_columns, num_inputs), self.storage)
        self.inputs = allocate_local("wide_inputs", (num_columns, num_inputs), ACCUMULATOR)

    def locate_tile(self, iteration: Any) -> None:
        """Compute the coordinates of a tile of dY, and of the window of X around it."""
        config, shape = self.config, self.shape
        tiles_y, tiles_x = config.pixel_tiles
        planes = shape.output_size[0]
        self.tile.set((self.part * config.iterations + iteration) * config.threads_pixels + self.pixel_thread)
        tile, self.tile_conditions = self.tile.value, []
        if config.num_parts * config.iterations * config.threads_pixels != config.num_pixel_tiles:
            self.tile_conditions.append(tile < config.num_pixel_tiles)
        if config.prefetch_tile:
            self.tile_conditions.append(tile < (self.part + 1) * (config.iterations * config.threads_pixels))
        image_plane = tile // (tiles_x * tiles_y)
        self.image.set(image_plane // planes)
        first_pixel = (
            image_plane % planes,
            tile // tiles_x % tiles_y * config.pixels_y,
            tile % tiles_x * config.pixels_x,
        )
        first_tap = self.layout.first_tap(self.filter_tile)
        for axis, (pixel, tap) in enumerate(zip(first_pixel, first_tap, strict=True)):
            self.first_pixel[axis].set(pixel)
            position = pixel * shape.strides[axis] + tap * shape.dilations[axis] - shape.pad_low[axis]
            self.first_input[axis].set(position)

    def load_gradient(self) -> None:
        """Load a tile of dY, with zeros outside of the image."""
        config, (_, num_rows, num_columns) = self.config, self.shape.output_size
        plane, row, column = (coordinate.value for coordinate in self.first_pixel)
        with unrolled_loop(config.pixels_y, "y") as y, unrolled_loop(config.pixels_x, "x") as x:
            conditions = [*self.tile_conditions]
            conditions += [row + y < num_rows] * (num_rows % config.pixels_y > 0)
            conditions += [column + x < num_columns] * (num_columns % config.pixels_x > 0)
            pixel, coords = y * config.pixels_x + x, (plane, row + y, column + x)
            self.load_vector(self.gradient_regs, pixel, config.vector, self.dy, coords, self.channel, conditions)

    def load_vector(
        self,
        registers: Any,
        position: Any,
        num_lanes: int,
        array: Any,
        coords: tuple[Any, Any, Any],
        channel: Any,
        conditions: Sequence[Any],
    ) -> None:
        """Load a vector of channels of a pixel, or zeros if a condition does not hold."""

        def fill(get_value: Callable[[Any], Any]) -> None:
            emit_vector_copy(num_lanes, registers, lambda lane: (position, lane), get_value)

        emit_guarded(
            conditions,
            lambda: fill(lambda lane: array[self.shape.array_index(self.image.value, coords, channel + lane)]),
            lambda: fill(lambda lane: tirx.const(0, self.storage)),
        )

    def widen(self, target: Any, source: Any, first_vector: int = 0) -> None:
        """Convert vectors in registers, from the first one on, to the dtype of the sums."""
        num_vectors, num_lanes = target.shape
        with unrolled_loop(num_vectors, "i") as i, unrolled_loop(num_lanes, "v") as v:
            T.buffer_store(target, source[first_vector + i, v].astype(ACCUMULATOR), [i, v])

    def list_row_conditions(self, number: int) -> list[Any]:
        """Return the conditions that a row of X of the tile is inside of the image."""
        shape, (planes, rows, _) = self.shape, self.shape.input_size
        plane, row, _ = (coordinate.value for coordinate in self.first_input)
        # Arrays with two axes have a single plane, below the only tap, and no padding around it.
        has_planes = (planes, shape.kernel_size[0], shape.output_size[0], shape.pad_low[0]) != (1, 1, 1, 0)
        plane_conditions = [plane >= 0, plane < planes] if has_planes else []
        y = row + self.row_offsets[number]
        return [*self.tile_conditions, *plane_conditions, y >= 0, y < rows]

    def load_row(self, number: int, is_inside: bool = False) -> None:
        """Load the columns of a row of X, with zeros outside of the image; `is_inside` says that the row is inside."""
        config, num_columns = self.config, self.shape.input_size[2]
        plane, row, column = (coordinate.value for coordinate in self.first_input)
        conditions = [] if is_inside else self.list_row_conditions(number)
        first_vector = number * len(self.columns.offsets) if config.prefetch_tile else 0

        def load(i: Any, offset: Any) -> None:
            x = column + offset
            within = [] if config.has_known_columns else [x >= 0, x < num_columns]
            coords = plane, row + self.row_offsets[number], x
            lanes = int(config.loaded_inputs)
            position = first_vector + i
            self.load_vector(self.input_regs, position, lanes, self.x, coords, self.channel_in, [*conditions, *within])

        if self.columns.is_contiguous:
            with unrolled_loop(len(self.columns.offsets), "j") as j:
                load(j, self.columns.offsets[0] + j)
        else:
            for i, offset in enumerate(self.columns.offsets):
                load(i, offset)

    def accumulate_tile(self) -> None:
        """Multiply the rows of X below the taps by dY, and load them before, or those of the next tile after their use.

        A tile whose only row of X is outside of the image has no products.
        """
        if self.config.prefetch_tile:
            for number in range(len(self.row_offsets)):
                self.widen(self.inputs, self.input_regs, number * len(self.columns.offsets))
                self.load_row(number)
                self.accumulate_products(number)
            return
        has_single_row = len(self.row_offsets) == 1

        def emit_row(number: int) -> None:
            self.load_row(number, is_inside=has_single_row)
            self.widen(self.inputs, self.input_regs)
            self.accumulate_products(number)

        if has_single_row:
            emit_guarded(self.list_row_conditions(0), lambda: emit_row(0))
            return
        for number in range(len(self.row_offsets)):
            emit_row(number)

    def accumulate_products(self, number: int) -> None:
        """Add the products of a row of X with all rows of dY that it meets below a tap."""
        for pixel_row in range(self.config.pixels_y):
            distance = self.row_offsets[number] - pixel_row * self.shape.strides[1]
            tap_row, remainder = divmod(distance, self.shape.dilations[1])
            if not remainder and 0 <= tap_row < self.config.taps_y:
                self.accumulate_row(pixel_row, tap_row)

    def accumulate_row(self, pixel_row: int, tap_row: int) -> None:
        """Add the products of a row of X with a row of dY, for all taps of a row of the filter."""
        config = self.config

        def emit_products(tap: Any, pixel: Any, position: Any) -> None:
            first_sum = (tap_row * config.taps_x + tap) * config.sums_per_tap
            with unrolled_loop(config.sums_per_tap, "pair") as pair:
                v = pair // config.vector_in
                if not config.is_depthwise:
                    input_lane = pair % config.vector_in
                else:
                    input_lane = pair // config.outputs_per_group if config.loaded_inputs > 1 else 0
                product = self.gradient[pixel_row * config.pixels_x + pixel, v] * self.inputs[position, input_lane]
                T.buffer_store(self.sums, self.sums[first_sum + pair] + product, [first_sum + pair])

        if self.columns.is_contiguous and not config.has_known_columns:
            stride, dilation = self.shape.strides[2], self.shape.dilations[2]
            with unrolled_loop(config.taps_x, "s") as tap, unrolled_loop(config.pixels_x, "x") as pixel:
                emit_products(tap, pixel, pixel * stride + tap * dilation)
            return
        for tap in range(config.taps_x):
            pixels, first_position, step = self.columns.list_pixels(tap)
            if pixels:
                with unrolled_loop(len(pixels), "x") as i:
                    emit_products(tap, pixels[0] + i, first_position + i * step)

    def reduce_over_threads(self) -> None:
        """Add the sums of the threads with the same taps and channels in the order of their pixels, and store them."""
        config = self.config
        num_sums, at_a_time, num_threads = config.num_sums, int(config.sums_at_a_time), config.num_threads
        owners = config.threads_taps * config.threads_c  # threads with different taps or channels
        pitch = int(config.sum_pitch)
        shared = allocate("shared_sums", at_a_time * pitch, ACCUMULATOR, "shared")
        total = allocate("total", 1, ACCUMULATOR)
        thread = self.pixel_thread * owners + self.thread_of_sum
        for first_sum in range(0, num_sums, at_a_time):
            count = min(at_a_time, num_sums - first_sum)
            with unrolled_loop(count, "i") as i:
                store(shared, i * pitch + thread, self.sums[first_sum + i])
            steps = ceil_div(count * owners, num_threads)
            with serial_loop(steps, "step") as step, if_(self.is_below(step * num_threads + thread, count * owners)):
                element = step * num_threads + thread
                owner, number = element % owners, element // owners
                store(total, 0, tirx.const(0, ACCUMULATOR))
                with serial_loop(config.threads_pixels, "g") as g:
                    store(total, 0, total[0] + shared[number * pitch + g * owners + owner])
                filter_tile = self.first_filter_tile + owner // config.threads_c
                self.store_sum(first_sum + number, filter_tile, self.first_unit + owner % config.threads_c, total[0])

    def is_below(self, element: Any, count: int) -> Any:
        """Return the condition that a thread's element exists; True if each thread has one in every step."""
        return True if count % self.config.num_threads == 0 else element < count

    def store_sum(self, number: Any, filter_tile: Any, unit: Any, value: Any) -> None:
        """Store a sum of the CTA's part."""
        if self.workspace is None:
            self.layout.store_result(number, filter_tile, unit, value)
            return
        index = (number * self.layout.filter_tiles + filter_tile) * self.layout.units + unit
        store(self.workspace, self.part * self.layout.sums_per_part + index, value)
