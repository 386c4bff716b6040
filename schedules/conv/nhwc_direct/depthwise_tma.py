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
from dataclasses import dataclass

from tvm.s_tir import Schedule
from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv import tensor_map as maps
from tvmconv.registry import schedule
from tvmconv.requirements import CHANNELS_LAST_LAYOUT, Requirement, all_of
from tvmconv.space import Knobs
from tvmconv.target import WARP_SIZE
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
    emit_call,
    fill_zeros,
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
from ..tensor_cores.gemm.cta import Cta, allocate_smem, allow_dependent_launch, open_cta
from ..tensor_cores.gemm.epilogue_ops import EpilogueOps, apply_to_vector
from ..tensor_cores.gemm.pipelines import PipelineState, TmaPipeline, fence_barrier_init
from ..tensor_cores.gemm.tma import TmaCopy, prefetch_tensor_maps
from .depthwise_tma_config import COPY_BYTES, STAGE_ALIGNMENT_BYTES, DepthwiseTmaConfig

MIN_PROMISING_BYTES = 8 << 20  # of inputs and outputs, below which the latency of a launch decides


def has_depthwise_windows(w: Conv) -> bool:
    """Whether each channel has one filter, TMA can copy the input, and a window fits in shared memory."""
    return (
        w.spatial_ndim == 2
        and w.C == w.O == w.groups > 1
        and not w.returns_stats
        and not w.has_large_tensors
        and not w.cached_frames
        and max(w.upsampling) == 1
        and w.C * get_itemsize(w.storage) % COPY_BYTES == 0
        and DepthwiseTmaConfig.has_config(w)
    )


def is_promising(w: Conv) -> bool:
    """Return whether memory may bound the layer."""
    return bool(w.min_bytes >= MIN_PROMISING_BYTES)


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
    arguments: dict[str, Buffer]
    ops: EpilogueOps
    cta: Cta
    pipeline: TmaPipeline
    state: PipelineState
    is_flipped: bool  # whether taps are in the opposite order, as in a gradient

    @property
    def channel(self) -> Expr:
        """First channel of the CTA."""
        return self.cta.index % int(self.config.channel_blocks) * int(self.config.channels)

    def locate(self, tile_round: Expr) -> tuple[Expr, WindowTile]:
        """Return the index and the place of the CTA's tile in a round."""
        config = self.config
        tiles_y, tiles_x, lines, columns = (
            int(value) for value in (config.tiles_y, config.tiles_x, config.rows, config.columns)
        )
        index = self.cta.index // int(config.channel_blocks) + tile_round * int(config.ctas_per_block)
        row, column = index // tiles_x % tiles_y * lines, index % tiles_x * columns
        return index, WindowTile(index // (tiles_x * tiles_y), row, column)

    def load_windows(self, input_map: Expr) -> None:
        """Load the windows of all tiles; run by one thread."""
        w, config, pipeline, state = self.config.w, self.config, self.pipeline, self.state
        with serial_loop(int(config.tiles_per_cta), "round") as tile_round:
            index, tile = self.locate(tile_round)
            with if_(index < int(config.pixel_tiles)):
                pipeline.producer_acquire(state.index, state.phase)
                row = tile.row * w.stride[0] - w.pad_low[0]
                column = tile.column * w.stride[1] - w.pad_low[1]
                copy = TmaCopy(input_map, pipeline.full_barrier(state.index))
                copy.issue(pipeline.stage_address(state.index), (self.channel, column, row, tile.image))
                state.advance()

    def compute(self) -> None:
        """Compute all tiles; run by all threads but those of the last warp."""
        config, thread = self.config, self.cta.thread.thread
        vectors, vector, strip, itemsize = (
            int(value) for value in (config.vectors, config.vector, config.strip, config.itemsize)
        )
        item = thread
        if int(config.num_items) < int(config.compute_threads):  # a thread without an item computes the first one
            item = Register("item", value=T.Select(thread < int(config.num_items), thread, 0)).value
        lane_channel = Register("lane_channel", value=item % vectors * vector).value
        first_column = Register("first_column", value=item // vectors * strip).value
        channel = Register("channel", value=self.channel + lane_channel).value
        # A thread whose channels do not exist reads the filters of the last ones, and stores nothing.
        existing = channel
        if int(config.channel_blocks * config.channels) > config.w.C:
            existing = Register("existing", value=T.min(channel, config.w.C - vector)).value
        taps = self.load_taps(existing)
        pixel = first_column * (config.w.stride[1] * int(config.channels)) + lane_channel
        window_offset = Register("window_offset", value=pixel * itemsize).value
        with serial_loop(int(config.tiles_per_cta), "round") as tile_round:
            index, tile = self.locate(tile_round)
            with if_(index < int(config.pixel_tiles)):
                self.pipeline.consumer_wait(self.state.index, self.state.phase)
                address = self.pipeline.stage_address(self.state.index) + to_uint32(window_offset)
                window = Register("window_address", "uint32", address).value
                self.walk(tile, taps, window, channel, first_column)
                self.state.advance()

    def load_taps(self, channel: Expr) -> Buffer:
        """Load the taps of a thread's channels, widened to float32: taps × channels."""
        config, num_taps, vector = self.config, math.prod(self.config.w.kernel), int(self.config.vector)
        taps, filters = allocate("taps", num_taps * vector, "float32"), self.arguments["K"]
        height, width = config.w.kernel
        for e, (r, s) in itertools.product(range(vector), itertools.product(range(height), range(width))):
            y, x = (height - 1 - r, width - 1 - s) if self.is_flipped else (r, s)
            store(taps, (r * width + s) * vector + e, T.Cast("float32", filters[channel + e, y, x, 0]))
        return taps

    def walk(self, tile: WindowTile, taps: Buffer, window: Expr, channel: Expr, first_column: Expr) -> None:
        """Add each row of the window to the output rows whose filter covers it, and store those that are complete."""
        config, w = self.config, self.config.w
        lines, strip, vector = int(config.rows), int(config.strip), int(config.vector)
        (height, width), (step, column_step), (dilation, column_dilation) = w.kernel, w.stride, w.dilation
        window_lines, strip_columns = int(config.window_lines), int(config.strip_columns)
        pixel_bytes = int(config.channels) * int(config.itemsize)
        line_bytes = int(config.window_columns) * pixel_bytes
        sums = allocate("sums", lines * strip * vector, "float32")
        words = allocate("pixels", max(1, vector * int(config.itemsize) // 4), "uint32")
        values = allocate("row", strip_columns * vector, "float32")
        needed_columns = sorted(
            {j * column_step + s * column_dilation for j in range(strip) for s in range(width)}
        )  # a stride or a dilation may leave gaps
        users = {
            line: [(y, r) for y in range(lines) for r in range(height) if y * step + r * dilation == line]
            for line in range(window_lines)
        }
        used_lines = [line for line in range(window_lines) if users[line]]
        last_line = {y: y * step + (height - 1) * dilation for y in range(lines)}
        fill_zeros(sums, lines * strip * vector)
        for line in used_lines:
            for column in needed_columns:
                offset = line * line_bytes + column * pixel_bytes
                load_shared(words, window + to_uint32(offset), vector * int(config.itemsize))
                for e, value in enumerate(unpack(words, vector, w.storage)):
                    store(values, column * vector + e, value)
            if line == used_lines[-1]:
                emit_call(T.cuda.warp_sync())
                with if_(self.cta.thread.lane == 0):
                    self.pipeline.consumer_arrive(self.state.index)
            for y, r in users[line]:
                for j, s, e in itertools.product(range(strip), range(width), range(vector)):
                    place, column = (y * strip + j) * vector + e, j * column_step + s * column_dilation
                    product = values[column * vector + e] * taps[(r * width + s) * vector + e]
                    store(sums, place, sums[place] + product)
            for y in [y for y in range(lines) if last_line[y] == line]:
                self.store_row(tile, sums, y, channel, first_column)

    def store_row(self, tile: WindowTile, sums: Buffer, y: int, channel: Expr, first_column: Expr) -> None:
        """Apply the epilogue to a row of a thread's strip, and store it."""
        config, w, thread = self.config, self.config.w, self.cta.thread.thread
        strip, vector, (height, width) = int(config.strip), int(config.vector), w.output_size
        results, packed = allocate("results", vector, "float32"), allocate("packed", 8, "uint32")
        row, is_exact = tile.row + y, int(config.num_items) == int(config.compute_threads)
        conditions = [] if is_exact else [thread < int(config.num_items)]
        conditions += [row < height] * (height % int(config.rows) > 0)
        conditions += [channel < w.C] * (int(config.channel_blocks * config.channels) > w.C)
        for j in range(strip):
            column = tile.column + first_column + j
            inside = conditions + [column < width] * (width % int(config.columns) > 0)
            with if_(logical_and(*inside) if inside else True):
                for e in range(vector):
                    store(results, e, sums[(y * strip + j) * vector + e])
                index = ((tile.image * height + row) * width + column) * w.O + channel
                apply_to_vector(self.ops, self.arguments, channel, index, vector, results, packed)
                store_global(self.arguments["Y"], index, packed, vector)


def emit_kernel(config: DepthwiseTmaConfig, arguments: dict[str, Buffer], *, is_flipped: bool = False) -> None:
    """Emit the kernel; `is_flipped`: the taps of K are in the opposite order."""
    input_map = declare_tensor_map("X_map", arguments["X"], make_input_map(config))
    compute_threads, stages = int(config.compute_threads), int(config.stages)
    with open_cta(int(config.num_blocks), int(config.num_threads), 1, splits_in_cluster=False) as cta:
        smem = allocate_smem(int(config.smem_bytes), STAGE_ALIGNMENT_BYTES)
        pipeline = TmaPipeline(
            smem,
            int(config.stage_bytes),
            smem + to_uint32(int(config.barrier_offset_bytes)),
            stages,
            int(config.window_bytes),
            num_consumers=compute_threads // WARP_SIZE,
        )
        with if_(cta.thread.thread == compute_threads):
            prefetch_tensor_maps([input_map])
        with if_(cta.thread.thread == 0):
            pipeline.init_barriers()
            fence_barrier_init()
        emit_call(T.cuda.cta_sync())
        allow_dependent_launch()
        ops = EpilogueOps.from_workload(config.w).bind_tensor_args(arguments, uses_registers=True)
        state = PipelineState("window", stages)
        kernel = DepthwiseTmaKernel(config, arguments, ops, cta, pipeline, state, is_flipped)
        with if_(cta.thread.thread < compute_threads):
            kernel.compute()
        with if_(cta.thread.is_first_of_warp(compute_threads // WARP_SIZE)):
            kernel.load_windows(input_map)


def make_input_map(config: DepthwiseTmaConfig) -> maps.TensorMap:
    """Return the tensor map of X: channels, columns, rows, images."""
    w, (height, width) = config.w, config.w.input_size
    extents, strides = (w.C, width, height, w.N), (w.C, width * w.C, height * width * w.C)
    box = int(config.channels), int(config.window_columns), int(config.window_lines), 1
    return maps.make_tiled_map(w.storage, config.itemsize, extents, strides, box, 0)
