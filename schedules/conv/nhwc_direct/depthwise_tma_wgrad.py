"""Gradients of the weights of depthwise convolutions, whose tiles of dY and windows of X TMA copies ahead.

`depthwise_nhwc` waits for its loads, and `depthwise_diagonal` multiplies eight times as much as it uses. Here a warp
of a CTA copies tiles of dY and the windows of X below them by TMA, with zeros outside of the images, while other warps
compute the tiles before. These read shared memory without guards.

A thread has a vector of channels, and a strip of neighbouring columns of dY. It walks down the rows of the window, and
adds the products of a row of X with all rows of dY that it meets below a tap to float32 sums in registers, over all
tiles of the CTA. If a tile has whole images, products outside of them are left out. The threads of a CTA then add their
sums in shared memory. A second kernel adds those of all CTAs, or the CTAs of a cluster add them (`cluster_sums`). The
order of all sums is fixed, so that each run returns the same bits.

Source: PTX ISA, "cp.async.bulk.tensor".
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Sequence

from tvm.s_tir import Schedule
from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv import tensor_map as maps
from tvmconv.registry import schedule
from tvmconv.requirements import CHANNELS_LAST_LAYOUT, Requirement, all_of
from tvmconv.space import Knobs
from tvmconv.target import WARP_SIZE
from tvmconv.workloads.conv_gradient import WeightGradient
from tvmconv.workloads.dtypes import ACCUMULATOR, get_itemsize

from ...tir_builder import (
    Buffer,
    Expr,
    Register,
    allocate,
    declare_tensor_map,
    emit_call,
    emit_ptx,
    fill_zeros,
    if_,
    is_below,
    items_loop,
    load_shared,
    logical_and,
    serial_loop,
    store,
    thread_axis,
    to_uint32,
)
from ..reduction import FLOAT_DTYPES
from ..row_walk import locate_item
from ..row_walk_config import COPY_BYTES, STAGE_ALIGNMENT_BYTES
from ..tensor_cores.gemm.atoms import ThreadPosition
from ..tensor_cores.gemm.cta import allocate_smem
from ..tensor_cores.gemm.pipelines import PipelineState, TmaPipeline
from ..tensor_cores.gemm.prologue import emit_prologue
from ..tensor_cores.gemm.tma import TmaCopy
from .cluster_sums import ClusterSums
from .depthwise_sums import StoreResult, build_depthwise_sums, part_tiles
from .window_wgrad_config import WindowWgradConfig
from .window_wgrad_walk import WindowWgradWalk


def has_tiles(w: WeightGradient) -> bool:
    """Whether each channel has one filter, TMA can copy the pixels, and tiles fit in shared memory."""
    return bool(
        w.C == w.O == w.groups > 1
        and w.C * get_itemsize(w.storage) % COPY_BYTES == 0
        and WindowWgradConfig.has_config(w)
    )


TILES = Requirement(
    f"depthwise layers whose channels fill whole {COPY_BYTES} bytes, and small filters",
    has_tiles,
    lambda w: f"filters of {math.prod(w.kernel)} taps for {w.C} to {w.O} channels in {w.groups} groups",
)


@schedule(
    "conv1d_wgrad",
    "conv2d_wgrad",
    dtypes=FLOAT_DTYPES,
    usage=WindowWgradConfig.compute_usage,
    condition=all_of(CHANNELS_LAST_LAYOUT, TILES),
    search_if=has_tiles,
    starting_configs=WindowWgradConfig.list_starting_configs,
    device_kinds=("cuda",),
    min_arch=90,
)
def depthwise_tma(s: Schedule, w: WeightGradient, k: Knobs) -> Schedule:
    """Copy tiles of dY and X by TMA ahead, and sum products of a vector of channels and a strip per thread."""
    config = WindowWgradConfig.declare_knobs(w, k)
    has_workspace = int(config.num_parts) > 1 and int(config.parts_in_cluster) == 0
    return build_depthwise_sums(
        w,
        int(config.num_parts) if has_workspace else None,
        functools.partial(emit_products, config),
        lambda number: (number // w.C, number % w.C),
    )


def emit_products(
    config: WindowWgradConfig, arguments: dict[str, Buffer], workspace: Buffer | None, store_result: StoreResult
) -> None:
    """Emit the first kernel, which stores sums (parts, taps, channels), or the gradient if there is no workspace."""
    dy, x = config.w.OPERANDS
    gradient_map, input_map = (
        declare_tensor_map(f"{name}_map", arguments[name], tensor_map)
        for name, tensor_map in zip((dy, x), make_maps(config), strict=True)
    )
    compute_threads, stages, num_parts = (
        int(value) for value in (config.compute_threads, config.stages, config.num_parts)
    )
    with contextlib.ExitStack() as axes:
        part = axes.enter_context(thread_axis(num_parts, "blockIdx.y"))
        if int(config.parts_in_cluster) == 1:
            axes.enter_context(thread_axis(num_parts, "clusterCtaIdx.y"))
        block = axes.enter_context(thread_axis(int(config.channel_blocks), "blockIdx.x"))
        thread = axes.enter_context(thread_axis(int(config.num_threads), "threadIdx.x"))
        smem = allocate_smem(int(config.smem_bytes), STAGE_ALIGNMENT_BYTES)
        pipeline = TmaPipeline(
            smem,
            int(config.stage_bytes),
            smem + to_uint32(int(config.barrier_offset_bytes)),
            stages,
            int(config.window_bytes) + int(config.gradient_bytes),
            num_consumers=compute_threads // WARP_SIZE,
        )
        position = ThreadPosition(thread)
        emit_prologue(position, [pipeline], [gradient_map, input_map], first_loader=compute_threads)
        kernel = WindowWgradKernel(config, workspace, store_result, pipeline, smem, part, block, position)
        kernel.emit(gradient_map, input_map)


def make_maps(config: WindowWgradConfig) -> tuple[maps.TensorMap, maps.TensorMap]:
    """Return the tensor maps of dY and X: channels, columns, rows and images, or lines of whole rows."""
    w, shape, images = config.w, config.shape, int(config.images)

    def make_map(size: Sequence[int], line: tuple[int, int], columns: int, rows: int) -> maps.TensorMap:
        _, height, width = size
        elements, lines = line if config.whole_rows else (w.C, width)
        strides = elements, width * w.C, height * width * w.C
        box = (elements, lines, rows, images) if config.whole_rows else (int(config.channels), columns, rows, images)
        return maps.make_tiled_map(w.storage, config.itemsize, (elements, lines, height, w.N), strides, box, 0)

    gradient_line, input_line = config.find_lines(w)
    return (
        make_map(shape.output_size, gradient_line, int(config.columns), int(config.rows)),
        make_map(shape.input_size, input_line, int(config.window_columns), int(config.window_lines)),
    )


class WindowWgradKernel:
    """What the warps of a CTA share, whatever their roles."""

    def __init__(
        self,
        config: WindowWgradConfig,
        workspace: Buffer | None,
        store_result: StoreResult,
        pipeline: TmaPipeline,
        smem: Expr,
        part: Expr,
        block: Expr,
        position: ThreadPosition,
    ) -> None:
        self.config, self.shape, self.workspace, self.store_result = config, config.shape, workspace, store_result
        self.pipeline, self.smem, self.part = pipeline, smem, part
        self.position, self.thread = position, position.thread
        self.state = PipelineState("tile", int(config.stages))
        self.first_channel = block * int(config.channels)
        self.owners = int(config.tap_groups * config.vectors)  # threads with different taps or channels
        self.cluster_sums: ClusterSums | None = None
        if int(config.parts_in_cluster) == 1:
            sizes = int(config.num_parts), int(config.sums_per_cta), int(config.sums_per_rank)
            self.cluster_sums = ClusterSums(smem + to_uint32(int(config.cluster_offset_bytes)), part, *sizes)

    def emit(self, gradient_map: Expr, input_map: Expr) -> None:
        """Emit the kernel after its barriers are initialized."""
        config, cluster_sums = self.config, self.cluster_sums
        compute_threads = int(config.compute_threads)
        if cluster_sums:
            cluster_sums.announce()
        self.sums = allocate("sums", int(config.num_accumulators), ACCUMULATOR)
        with if_(self.thread < compute_threads):
            self.compute()
        with self.position.elect_in_warp(compute_threads // WARP_SIZE):
            self.copy_tiles(gradient_map, input_map)
        if cluster_sums:
            cluster_sums.begin()
        self.add_threads()
        if cluster_sums:
            cluster_sums.add_up(
                self.thread,
                int(config.num_threads),
                lambda index, value: self.store_sum(index // self.owners, index % self.owners, value),
            )

    def open_tiles(self) -> contextlib.AbstractContextManager[Expr]:
        """Open the loop over the tiles of the CTA."""
        return part_tiles(self.part, int(self.config.iterations), int(self.config.num_tiles))

    def copy_tiles(self, gradient_map: Expr, input_map: Expr) -> None:
        """Copy the tiles of dY and the windows of X below them, with zeros outside of the images; run by one thread."""
        config, shape, pipeline, state = self.config, self.shape, self.pipeline, self.state
        _, step_y, step_x = shape.strides
        pad_y = 0 if config.has_known_lines else shape.pad_low[1]
        pad_x = 0 if config.has_known_columns else shape.pad_low[2]
        tiles_y, tiles_x = int(config.tiles_y), int(config.tiles_x)
        with self.open_tiles() as tile:
            pipeline.producer_acquire(state.index, state.phase)
            stage, barrier = pipeline.stage_address(state.index), pipeline.full_barrier(state.index)
            image = tile // (tiles_x * tiles_y) * int(config.images)
            row, column = tile // tiles_x % tiles_y * int(config.rows), tile % tiles_x * int(config.columns)
            # Lines of whole rows begin with the first channel of the first column.
            first_column = 0 if config.whole_rows else column * step_x - pad_x
            window = self.first_channel, first_column, row * step_y - pad_y, image
            TmaCopy(input_map, barrier).issue(stage, window)
            destination = stage + to_uint32(int(config.gradient_offset_bytes))
            TmaCopy(gradient_map, barrier).issue(destination, (self.first_channel, column, row, image))
            state.advance()

    def compute(self) -> None:
        """Add up the products of all tiles; run by all threads but those of the last warp."""
        config, shape, pipeline, state = self.config, self.shape, self.pipeline, self.state
        vectors, images, groups = int(config.vectors), int(config.images), int(config.tap_groups)
        strips = int(config.columns // config.strip)
        fill_zeros(self.sums, int(config.num_accumulators))
        item = locate_item(self.thread, int(config.num_items), int(config.compute_threads))
        column = Register("first_column", value=item // vectors % strips * int(config.strip)).value
        image, group = item // (vectors * strips) % images, item // (vectors * strips * images)
        line = group * (int(config.taps_y) * shape.dilations[1]) if groups > 1 else 0
        lane_channel = item % vectors * int(config.vector)
        window_line = image * int(config.window_lines) + line
        window_pixel = window_line * int(config.window_columns) + column * shape.strides[2]
        gradient_pixel = image * (int(config.rows) * int(config.gradient_columns)) + column
        window_offset, gradient_offset = (
            Register(name, "uint32", to_uint32((pixel * int(config.channels) + lane_channel) * config.itemsize)).value
            for name, pixel in (("window_offset", window_pixel), ("gradient_offset", gradient_pixel))
        )
        with self.open_tiles():
            pipeline.consumer_wait(state.index, state.phase)
            stage = pipeline.stage_address(state.index)
            window = Register("window_address", "uint32", stage + window_offset).value
            offset = to_uint32(int(config.gradient_offset_bytes))
            gradient = Register("gradient_address", "uint32", stage + offset + gradient_offset).value
            walk = WindowWgradWalk(config, self.sums, column, window, gradient)
            walk.run(lambda: pipeline.warp_release(state.index, self.position))
            state.advance()

    def add_threads(self) -> None:
        """Add the sums of the threads with the same taps and channels in order, and pass them on."""
        config = self.config
        num_sums, at_a_time = int(config.num_accumulators), int(config.sums_at_a_time)
        pitch, vectors, pixel_threads = int(config.sum_pitch), int(config.vectors), int(config.pixel_threads)
        total, value = allocate("total", 1, ACCUMULATOR), allocate("sum", 1, "uint32")
        place = Register("sum_address", "uint32", self.smem + to_uint32(self.thread * 4)).value
        for first in range(0, num_sums, at_a_time):
            count = min(at_a_time, num_sums - first)
            emit_call(T.cuda.cta_sync())  # all warps have read the stages, or the sums before
            with if_(self.thread < int(config.compute_threads)):
                for i in range(count):
                    store(value, 0, T.reinterpret("uint32", self.sums[first + i]))
                    emit_ptx("st.shared.b32", place + to_uint32(i * pitch * 4), value[0])
            emit_call(T.cuda.cta_sync())
            with items_loop(count * self.owners, self.thread, int(config.num_threads)) as item:
                owner, number = item % self.owners, item // self.owners
                first_thread = owner // vectors * (pixel_threads * vectors) + owner % vectors
                store(total, 0, T.float32(0))
                address = self.smem + to_uint32((number * pitch + first_thread) * 4)
                start = Register("first_sum_address", "uint32", address).value
                with serial_loop(pixel_threads, "g") as g:
                    load_shared(value, start + to_uint32(g * (vectors * 4)), 4)
                    store(total, 0, total[0] + T.reinterpret(ACCUMULATOR, value[0]))
                self.pass_on(first + number, owner, total[0])

    def pass_on(self, number: Expr, owner: Expr, value: Expr) -> None:
        """Send a sum of the CTA to the CTA of the cluster that adds it up, or store it."""
        if self.cluster_sums:
            self.cluster_sums.send(number * self.owners + owner, value)
        else:
            self.store_sum(number, owner, value)

    def store_sum(self, number: Expr, owner: Expr, value: Expr) -> None:
        """Store a sum if there is such an element of dK."""
        config, (_, rows, columns) = self.config, self.shape.kernel_size
        vector, vectors, taps_y = int(config.vector), int(config.vectors), int(config.taps_y)
        row = owner // vectors * taps_y + number // (columns * vector)
        channel = self.first_channel + owner % vectors * vector + number % vector
        exists = [is_below(row, rows, taps_y), is_below(channel, config.w.C, int(config.channels))]
        tap = row * columns + number // vector % columns
        with if_(logical_and(*exists)):
            if self.workspace is None:
                self.store_result(tap, channel, value)
            else:
                store(self.workspace, (self.part * self.shape.num_taps + tap) * config.w.C + channel, value)
