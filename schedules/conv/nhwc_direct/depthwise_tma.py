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
from ..row_walk import COPY_BYTES, FIRST, RowWalk, load_taps
from ..tensor_cores.gemm.cta import Cta, allocate_smem, allow_dependent_launch, open_cta
from ..tensor_cores.gemm.epilogue_ops import EpilogueOps, apply_to_vector
from ..tensor_cores.gemm.pipelines import PipelineState, TmaPipeline, fence_barrier_init
from ..tensor_cores.gemm.tma import TmaCopy, prefetch_tensor_maps
from .depthwise_tma_config import STAGE_ALIGNMENT_BYTES, DepthwiseTmaConfig

COMPUTE_BARRIER = 1  # named barrier of the threads that compute
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
    smem: Expr  # address of the shared memory
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
        w, config, pipeline = self.config.w, self.config, self.pipeline
        state = PipelineState("loaded", int(config.buffers))
        with serial_loop(int(config.tiles_per_cta), "round") as tile_round:
            index, tile = self.locate(tile_round)
            with if_(index < int(config.pixel_tiles)):
                row = tile.row * w.stride[0] - w.pad_low[0] + int(config.skipped_lines)
                column = tile.column * w.stride[1] - w.pad_low[1]
                with serial_loop(int(config.copies_per_window), "copy") as number:
                    pipeline.producer_acquire(state.index, state.phase)
                    evicts_first = config.input_eviction == FIRST
                    copy = TmaCopy(input_map, pipeline.full_barrier(state.index), evicts_first=evicts_first)
                    line = row + number * int(config.copied_lines)
                    copy.issue(pipeline.stage_address(state.index), (self.channel, column, line, tile.image))
                    state.advance()

    def compute(self) -> None:
        """Compute all tiles; run by all threads but those of a warp that loads windows."""
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
        taps = load_taps(
            config.w,
            self.arguments["K"],
            self.smem + to_uint32(int(config.filter_offset_bytes)),
            first_channel=self.channel,
            lane_channel=lane_channel,
            num_channels=int(config.channels),
            vector=vector,
            thread=thread,
            num_threads=int(config.compute_threads),
            barrier=COMPUTE_BARRIER,
            is_flipped=self.is_flipped,
        )
        pixel = first_column * (config.w.stride[1] * int(config.channels)) + lane_channel
        window_offset = Register("window_offset", value=pixel * itemsize).value
        with serial_loop(int(config.tiles_per_cta), "round") as tile_round:
            index, tile = self.locate(tile_round)
            with if_(index < int(config.pixel_tiles)):
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
        self.kernel, self.tile, self.channel, self.first_column = kernel, tile, channel, first_column
        self.window_offset, self.copied_lines = window_offset, int(config.copied_lines)
        self.skipped_lines = int(config.skipped_lines)
        self.window = Register("window_address", "uint32")
        self.words = allocate("pixels", max(1, self.vector * int(config.itemsize) // 4), "uint32")

    @property
    def lines(self) -> range:
        """Rows of the window that are copied."""
        return range(self.skipped_lines, self.skipped_lines + int(self.kernel.config.window_lines))

    def begin_line(self, line: int) -> None:
        """Wait for the copy that begins with a row."""
        if (line - self.skipped_lines) % self.copied_lines == 0:
            pipeline, state = self.kernel.pipeline, self.kernel.state
            pipeline.consumer_wait(state.index, state.phase)
            self.window.set(pipeline.stage_address(state.index) + to_uint32(self.window_offset))

    def end_line(self, line: int, *, is_last: bool) -> None:
        """Release the stage of the copy that ends with a row."""
        if (line + 1 - self.skipped_lines) % self.copied_lines == 0 or is_last:
            emit_call(T.cuda.warp_sync())
            with if_(self.kernel.cta.thread.lane == 0):
                self.kernel.pipeline.consumer_arrive(self.kernel.state.index)
            self.kernel.state.advance()

    def load_line(self, line: int, first_row: Expr) -> None:
        """Load the needed columns of a row of a copy, widened to float32."""
        config, w = self.kernel.config, self.w
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
        kernel, tile, channel = self.kernel, self.tile, self.channel
        config, w, thread = kernel.config, kernel.config.w, kernel.cta.thread.thread
        strip, vector, (height, width) = self.strip, self.vector, w.output_size
        results, packed = allocate("results", vector, "float32"), allocate("packed", 8, "uint32")
        y, is_exact = tile.row + row, int(config.num_items) == int(config.compute_threads)
        conditions = [] if is_exact else [thread < int(config.num_items)]
        conditions += [y < height] * (height % int(config.rows) > 0)
        conditions += [channel < w.C] * (int(config.channel_blocks * config.channels) > w.C)
        for j in range(strip):
            column = tile.column + self.first_column + j
            inside = conditions + [column < width] * (width % int(config.columns) > 0)
            with if_(logical_and(*inside) if inside else True):
                for e in range(vector):
                    store(results, e, self.sums[(slot * strip + j) * vector + e])
                index = ((tile.image * height + y) * width + column) * w.O + channel
                apply_to_vector(kernel.ops, kernel.arguments, channel, index, vector, results, packed)
                store_global(kernel.arguments["Y"], index, packed, vector)


def emit_kernel(config: DepthwiseTmaConfig, arguments: dict[str, Buffer], *, is_flipped: bool = False) -> None:
    """Emit the kernel; `is_flipped`: the taps of K are in the opposite order."""
    input_map = declare_tensor_map("X_map", arguments["X"], make_input_map(config))
    compute_threads, stages = int(config.compute_threads), int(config.buffers)
    with open_cta(int(config.num_blocks), int(config.num_threads), 1, splits_in_cluster=False) as cta:
        smem = allocate_smem(int(config.smem_bytes), STAGE_ALIGNMENT_BYTES)
        pipeline = TmaPipeline(
            smem,
            int(config.stage_bytes),
            smem + to_uint32(int(config.barrier_offset_bytes)),
            stages,
            int(config.copy_bytes),
            num_consumers=compute_threads // WARP_SIZE,
        )
        loader = compute_threads if config.is_persistent else 0  # the thread that loads windows
        with if_(cta.thread.thread == loader):
            prefetch_tensor_maps([input_map])
        with if_(cta.thread.thread == 0):
            pipeline.init_barriers()
            fence_barrier_init()
        emit_call(T.cuda.cta_sync())
        allow_dependent_launch()
        ops = EpilogueOps.from_workload(config.w).bind_tensor_args(arguments, uses_registers=True)
        state = PipelineState("window", stages)
        kernel = DepthwiseTmaKernel(config, arguments, ops, cta, smem, pipeline, state, is_flipped)
        if config.is_persistent:
            with if_(cta.thread.thread < compute_threads):
                kernel.compute()
            with cta.thread.elect_in_warp(compute_threads // WARP_SIZE):
                kernel.load_windows(input_map)
        else:
            with if_(cta.thread.thread == loader):
                kernel.load_windows(input_map)
            kernel.compute()


def make_input_map(config: DepthwiseTmaConfig) -> maps.TensorMap:
    """Return the tensor map of X: channels, columns, rows, images."""
    w, (height, width) = config.w, config.w.input_size
    extents, strides = (w.C, width, height, w.N), (w.C, width * w.C, height * width * w.C)
    box = int(config.channels), int(config.window_columns), int(config.copied_lines), 1
    return maps.make_tiled_map(w.storage, config.itemsize, extents, strides, box, 0)
