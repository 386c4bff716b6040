"""Depthwise convolution, channels last, whose windows TMA copies to shared memory ahead of the threads that compute.

At large batches a depthwise layer is bound by memory, and `depthwise_nhwc` by the latency of its loads: each thread has
few of them under way. Here a warp of a persistent CTA copies the window of a tile of output pixels and channels by TMA,
with zeros outside of the image, while other warps compute the tiles before. They need no guards and no addresses in
global memory for their inputs, each of which is read from shared memory once per strip.

A thread computes a vector of channels for a strip of neighbouring columns, and walks down the rows of the window. All
tiles of a CTA have the same channels, whose taps stay in registers in float32.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tvm.s_tir import Schedule

from tvmconv import tensor_map as maps
from tvmconv.registry import schedule
from tvmconv.requirements import CHANNELS_LAST_LAYOUT, Requirement, all_of
from tvmconv.space import Knobs
from tvmconv.workloads import Conv
from tvmconv.workloads.dtypes import get_itemsize

from ...primitives import disable_buffer_reuse
from ...tir_builder import (
    Buffer,
    Expr,
    Register,
    allocate,
    build_schedule,
    declare_tensor_map,
    if_,
    load_shared,
    logical_and,
    serial_loop,
    store,
    store_global,
    to_uint32,
    unpack,
)
from ..reduction import FLOAT_DTYPES
from ..row_walk import RowWalk, RowWalkCta, locate_item, open_row_walk
from ..row_walk_config import COPY_BYTES, FIRST, is_plain_depthwise, is_promising
from ..tensor_cores.gemm.epilogue_ops import apply_to_vector
from ..tensor_cores.gemm.pipelines import PipelineState
from ..tensor_cores.gemm.tma import TmaCopy
from .depthwise_tma_config import DepthwiseTmaConfig


def has_depthwise_windows(w: Conv) -> bool:
    """Whether each channel has one filter, TMA can copy the input, and a window fits in shared memory."""
    return (
        is_plain_depthwise(w) and w.C * get_itemsize(w.storage) % COPY_BYTES == 0 and DepthwiseTmaConfig.has_config(w)
    )


WINDOWS = Requirement(
    f"depthwise images whose channels fill whole {COPY_BYTES} bytes, and small filters",
    has_depthwise_windows,
    lambda w: f"filters of {math.prod(w.kernel)} taps for {w.C} to {w.O} channels in {w.groups} groups",
)


@schedule(
    "conv2d",
    dtypes=FLOAT_DTYPES,
    usage=DepthwiseTmaConfig.compute_usage,
    condition=all_of(CHANNELS_LAST_LAYOUT, WINDOWS),
    search_if=is_promising,
    starting_configs=DepthwiseTmaConfig.list_starting_configs,
    device_kinds=("cuda",),
    min_arch=90,
)
def depthwise_tma(s: Schedule, w: Conv, k: Knobs) -> Schedule:
    """Copy windows by TMA ahead, and compute a vector of channels for a strip of pixels per thread."""
    config = DepthwiseTmaConfig.declare_knobs(w, k)
    built = build_schedule(w, lambda arguments: emit_kernel(config, arguments))
    disable_buffer_reuse(built)  # TVM does not see the accesses of TMA
    return built


@dataclass(frozen=True)
class WindowTile:
    """A tile of output pixels, whose window of input pixels TMA copies."""

    image: Expr
    row: Expr  # first output row
    column: Expr  # first output column


@dataclass(frozen=True)
class DepthwiseTmaKernel:
    """What the warps of a CTA share, whatever their roles."""

    config: DepthwiseTmaConfig
    cta: RowWalkCta
    is_flipped: bool  # whether taps are in the opposite order, as in a gradient

    @contextmanager
    def for_each_tile(self) -> Iterator[WindowTile]:
        """Open the loop over the tiles of the CTA."""
        config = self.config
        tiles_y, tiles_x, rows, columns = (
            int(value) for value in (config.tiles_y, config.tiles_x, config.rows, config.columns)
        )
        with serial_loop(int(config.tiles_per_cta), "round") as tile_round:
            index = self.cta.locate_tile(tile_round)
            with if_(index < int(config.pixel_tiles)):
                row, column = index // tiles_x % tiles_y * rows, index % tiles_x * columns
                yield WindowTile(index // (tiles_x * tiles_y), row, column)

    def load_windows(self, input_map: Expr) -> None:
        """Load the windows of all tiles; run by one thread."""
        w, config, pipeline = self.config.w, self.config, self.cta.pipeline
        state = PipelineState("loaded", int(config.buffers))
        with self.for_each_tile() as tile:
            row = tile.row * w.stride[0] - w.pad_low[0] + int(config.skipped_lines)
            column = tile.column * w.stride[1] - w.pad_low[1]
            with serial_loop(int(config.copies_per_window), "copy") as number:
                pipeline.producer_acquire(state.index, state.phase)
                evicts_first = config.input_eviction == FIRST
                copy = TmaCopy(input_map, pipeline.full_barrier(state.index), evicts_first=evicts_first)
                line = row + number * int(config.copied_lines)
                copy.issue(pipeline.stage_address(state.index), (self.cta.first_channel, column, line, tile.image))
                state.advance()

    def compute(self) -> None:
        """Compute all tiles; run by all threads but those of a warp that loads windows."""
        config, cta = self.config, self.cta
        vectors, vector, strip = (int(value) for value in (config.vectors, config.vector, config.strip))
        item = locate_item(cta.thread, int(config.num_items), int(config.compute_threads))
        lane_channel = Register("lane_channel", value=item % vectors * vector).value
        first_column = Register("first_column", value=item // vectors * strip).value
        channel = Register("channel", value=cta.first_channel + lane_channel).value
        taps = cta.load_taps(lane_channel, vector, is_flipped=self.is_flipped)
        pixel = first_column * (config.w.stride[1] * int(config.channels)) + lane_channel
        window_offset = Register("window_offset", value=pixel * config.itemsize).value
        with self.for_each_tile() as tile:
            WindowWalk(self, tile, taps, window_offset, channel, first_column).run()


class WindowWalk(RowWalk):
    """A thread's walk down a window, whose rows arrive by one copy or several."""

    def __init__(
        self,
        kernel: DepthwiseTmaKernel,
        tile: WindowTile,
        taps: Buffer,
        window_offset: Expr,
        channel: Expr,
        first_column: Expr,
    ) -> None:
        config = kernel.config
        strip, vector, rows, period_lines = (
            int(value) for value in (config.strip, config.vector, config.rows, config.copied_lines)
        )
        sizes = {"strip": strip, "vector": vector, "rows": rows, "period_lines": period_lines}
        super().__init__(config.w, taps, **sizes, num_periods=int(config.num_periods))
        self.config, self.cta, self.tile = config, kernel.cta, tile
        self.channel, self.first_column = channel, first_column
        self.window_offset, self.copied_lines = window_offset, int(config.copied_lines)
        self.skipped_lines = int(config.skipped_lines)
        self.window = Register("window_address", "uint32")
        self.words = allocate("pixels", max(1, self.vector * int(config.itemsize) // 4), "uint32")

    @property
    def lines(self) -> range:
        """Rows of the window that are copied."""
        return range(self.skipped_lines, self.skipped_lines + int(self.config.window_lines))

    def begin_line(self, line: int) -> None:
        """Wait for the copy that begins with a row."""
        if (line - self.skipped_lines) % self.copied_lines == 0:
            pipeline, state = self.cta.pipeline, self.cta.state
            pipeline.consumer_wait(state.index, state.phase)
            self.window.set(pipeline.stage_address(state.index) + to_uint32(self.window_offset))

    def end_line(self, line: int, *, is_last: bool) -> None:
        """Release the stage of the copy that ends with a row."""
        if (line + 1 - self.skipped_lines) % self.copied_lines == 0 or is_last:
            self.cta.release_stage()
            self.cta.state.advance()

    def load_line(self, line: int, first_row: Expr) -> None:
        """Load the needed columns of a row of a copy, widened to float32."""
        config, w = self.config, self.w
        pixel_bytes = int(config.channels) * int(config.itemsize)
        copied_line = (line - self.skipped_lines) % self.copied_lines
        strip_taps = itertools.product(range(self.strip), range(w.kernel[1]))
        # A stride or a dilation may leave gaps.
        for column in sorted({j * w.stride[1] + s * w.dilation[1] for j, s in strip_taps}):
            offset = (copied_line * int(config.window_columns) + column) * pixel_bytes
            load_shared(self.words, self.window.value + to_uint32(offset), self.vector * int(config.itemsize))
            for e, value in enumerate(unpack(self.words, self.vector, w.storage)):
                store(self.values, column * self.vector + e, value)

    def store_row(self, row: Expr, slot: int) -> None:
        """Apply the epilogue to an output row of the strip, and store it."""
        config, w, cta, tile, channel = self.config, self.w, self.cta, self.tile, self.channel
        strip, vector, (height, width) = self.strip, self.vector, w.output_size
        results, packed = allocate("results", vector, "float32"), allocate("packed", 8, "uint32")
        y = tile.row + row
        conditions = [cta.thread < int(config.num_items)] * (int(config.num_items) < int(config.compute_threads))
        conditions += [y < height] * (height % int(config.rows) > 0)
        conditions += [channel < w.C] * (int(config.channel_blocks * config.channels) > w.C)
        for j in range(strip):
            column = tile.column + self.first_column + j
            inside = conditions + [column < width] * (width % int(config.columns) > 0)
            with if_(logical_and(*inside) if inside else True):
                for e in range(vector):
                    store(results, e, self.sums[(slot * strip + j) * vector + e])
                index = ((tile.image * height + y) * width + column) * w.O + channel
                apply_to_vector(cta.ops, cta.arguments, channel, index, vector, results, packed)
                store_global(cta.arguments["Y"], index, packed, vector)


def emit_kernel(config: DepthwiseTmaConfig, arguments: dict[str, Buffer], *, is_flipped: bool = False) -> None:
    """Emit the kernel; `is_flipped`: the taps of K are in the opposite order."""
    input_map = declare_tensor_map("X_map", arguments["X"], make_input_map(config))
    with open_row_walk(config, arguments, "window", [input_map]) as cta:
        kernel = DepthwiseTmaKernel(config, cta, is_flipped)
        cta.emit_roles(lambda: kernel.load_windows(input_map), kernel.compute)


def make_input_map(config: DepthwiseTmaConfig) -> maps.TensorMap:
    """Return the tensor map of X: channels, columns, rows, images."""
    w, (height, width) = config.w, config.w.input_size
    extents, strides = (w.C, width, height, w.N), (w.C, width * w.C, height * width * w.C)
    box = int(config.channels), int(config.window_columns), int(config.copied_lines), 1
    return maps.make_tiled_map(w.storage, config.itemsize, extents, strides, box, 0)
