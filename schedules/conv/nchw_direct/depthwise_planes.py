"""Depthwise convolution, channels first, whose planes are copied whole to shared memory ahead of the computation.

At large batches a depthwise layer is bound by memory, and `depthwise_nchw` by the latency of its loads. Planes of
neighbouring channels are contiguous, so that a warp of a persistent CTA copies those of a tile at once, by a bulk copy
that needs no tensor map, while the other warps compute the tiles before.

A thread computes a strip of neighbouring columns of one channel, and walks down the rows of the plane. It reads each
row from shared memory once, in vectors. Rows outside of the image are left out, and vectors to the left or to the right
of it are zeros. All tiles of a CTA have the same channels, whose taps stay in registers in float32.

Source: PTX ISA, "cp.async.bulk".
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tvm.s_tir import Schedule
from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.registry import schedule
from tvmconv.requirements import CHANNELS_FIRST_LAYOUT, Requirement, all_of
from tvmconv.space import Knobs
from tvmconv.workloads import Conv

from ...primitives import disable_buffer_reuse
from ...tir_builder import (
    Buffer,
    Expr,
    Register,
    allocate,
    build_schedule,
    emit_call,
    if_,
    load_shared,
    logical_and,
    serial_loop,
    store,
    store_global,
    store_shared,
    to_uint32,
    unpack,
)
from ..reduction import FLOAT_DTYPES
from ..row_walk import COMPUTE_BARRIER, RowWalk, RowWalkCta, locate_item, open_row_walk
from ..row_walk_config import (
    COPY_BYTES,
    FIRST,
    can_skip_padding,
    count_period_lines,
    is_plain_depthwise,
    is_promising,
)
from ..tensor_cores.gemm.atoms import named_barrier_sync
from ..tensor_cores.gemm.epilogue_ops import apply_to_pixels
from ..tensor_cores.gemm.pipelines import PipelineState
from ..tensor_cores.gemm.tma import bulk_load, bulk_store, tma_store_fence, tma_store_wait
from .depthwise_planes_config import DepthwisePlanesConfig


def has_depthwise_planes(w: Conv) -> bool:
    """Whether each channel has one filter, and planes fit in shared memory."""
    return (
        is_plain_depthwise(w)
        and all(max(w.pad_low[i], w.pad_high[i]) <= (w.kernel[i] - 1) * w.dilation[i] for i in range(2))
        and DepthwisePlanesConfig.has_config(w)
    )


PLANES = Requirement(
    "depthwise images whose planes fit in shared memory, and padding that is narrower than the filters",
    has_depthwise_planes,
    lambda w: f"filters of {math.prod(w.kernel)} taps for {w.C} to {w.O} channels in {w.groups} groups",
)


@schedule(
    "conv2d",
    dtypes=FLOAT_DTYPES,
    usage=DepthwisePlanesConfig.compute_usage,
    condition=all_of(CHANNELS_FIRST_LAYOUT, PLANES),
    search_if=is_promising,
    starting_configs=DepthwisePlanesConfig.list_starting_configs,
    device_kinds=("cuda",),
    min_arch=90,
)
def depthwise_planes(s: Schedule, w: Conv, k: Knobs) -> Schedule:
    """Copy whole planes ahead, and compute a strip of columns of a channel per thread."""
    config = DepthwisePlanesConfig.declare_knobs(w, k)
    built = build_schedule(w, lambda arguments: emit_kernel(config, arguments))
    disable_buffer_reuse(built)  # TVM does not see the accesses of bulk copies
    return built


def emit_kernel(config: DepthwisePlanesConfig, arguments: dict[str, Buffer]) -> None:
    """Emit the kernel."""
    with open_row_walk(config, arguments, "plane") as cta:
        kernel = DepthwisePlanesKernel(config, cta)
        cta.emit_roles(kernel.load_planes, kernel.compute)


@dataclass(frozen=True)
class DepthwisePlanesKernel:
    """What the warps of a CTA share, whatever their roles."""

    config: DepthwisePlanesConfig
    cta: RowWalkCta

    @contextmanager
    def for_each_image(self) -> Iterator[Expr]:
        """Open the loop over the images of the CTA."""
        with serial_loop(int(self.config.tiles_per_cta), "round") as tile_round:
            image = self.cta.locate_tile(tile_round)
            with if_(image < self.config.w.N):
                yield image

    def load_planes(self) -> None:
        """Copy the planes of all tiles; run by one thread."""
        w, cta, state = self.config.w, self.cta, PipelineState("loaded", int(self.config.buffers))
        with self.for_each_image() as image:
            cta.pipeline.producer_acquire(state.index, state.phase)
            first = (image * w.C + cta.first_channel) * math.prod(w.input_size)
            source = cta.arguments["X"].access_ptr("r", offset=first)
            target, barrier = cta.pipeline.stage_address(state.index), cta.pipeline.full_barrier(state.index)
            evicts_first = self.config.input_eviction == FIRST
            bulk_load(target, source, int(self.config.copy_bytes), barrier, evicts_first=evicts_first)
            state.advance()

    def compute(self) -> None:
        """Compute all tiles; run by all threads but those of a warp that copies planes."""
        config, cta, w = self.config, self.cta, self.config.w
        strips, channels = int(config.strips), int(config.channels)
        item = locate_item(cta.thread, int(config.num_items), int(config.compute_threads))
        lane_channel = Register("lane_channel", value=item // strips % channels).value
        column = Register("first_column", value=item % strips * int(config.strip)).value
        row = 0
        if config.parts > 1:
            row = Register("part_row", value=item // (strips * channels) * int(config.rows)).value
        taps = cta.load_taps(lane_channel, 1)
        pixel = (lane_channel * w.input_size[0] + row * w.stride[0]) * w.input_size[1] + column * w.stride[1]
        offset = Register("strip_offset", value=pixel * config.itemsize).value
        result = Register("result_address", "uint32", cta.smem)
        if config.is_staged:
            line = (lane_channel * w.output_size[0] + row) * w.output_size[1] + column
            result.set(self.results + to_uint32(line * config.itemsize))
        with self.for_each_image() as image:
            if config.is_staged and config.is_persistent:
                self.wait_for_store()
                named_barrier_sync(COMPUTE_BARRIER, int(config.compute_threads))
            cta.pipeline.consumer_wait(cta.state.index, cta.state.phase)
            address = cta.pipeline.stage_address(cta.state.index) + to_uint32(offset)
            plane = Register("strip_address", "uint32", address).value
            index = Register("plane_index", value=image * w.C + cta.first_channel + lane_channel).value
            PlaneWalk(self, taps, plane, index, cta.first_channel + lane_channel, row, column, result.value).run()
            cta.state.advance()
            if config.is_staged:
                self.store_planes(image)
        if config.is_staged:
            self.wait_for_store()

    @property
    def results(self) -> Expr:
        """Address of the staged results."""
        return self.cta.smem + to_uint32(int(self.config.result_offset_bytes))

    def store_planes(self, image: Expr) -> None:
        """Copy the staged results of a tile to Y."""
        config, cta, w = self.config, self.cta, self.config.w
        tma_store_fence()
        named_barrier_sync(COMPUTE_BARRIER, int(config.compute_threads))
        with if_(cta.thread == 0):
            first = (image * w.O + cta.first_channel) * math.prod(w.output_size)
            target = cta.arguments["Y"].access_ptr("w", offset=first)
            bulk_store(target, self.results, int(config.result_bytes))

    def wait_for_store(self) -> None:
        """Wait until the staged results before are stored, and may be overwritten; one thread waits."""
        with if_(self.cta.thread == 0):
            tma_store_wait(0)


class PlaneWalk(RowWalk):
    """A thread's walk down the rows of a plane, or a part of them."""

    def __init__(
        self,
        kernel: DepthwisePlanesKernel,
        taps: Buffer,
        address: Expr,
        plane: Expr,
        channel: Expr,
        first_row: Expr,
        column: Expr,
        result: Expr,
    ) -> None:
        """Bind a walk to a strip.

        Args:
            kernel: The kernel.
            taps: Taps in float32.
            address: Shared-memory address of its first input pixel.
            plane: Index among all planes.
            channel: Its channel.
            first_row: First output row.
            column: First output column.
            result: Shared-memory address of its first result, if results are staged.
        """
        config = kernel.config
        period_lines, periods = count_period_lines(config.w), int(config.num_periods)
        sizes = {"strip": int(config.strip), "rows": int(config.rows), "period_lines": period_lines}
        super().__init__(config.w, taps, vector=1, num_periods=periods, **sizes)
        self.config, self.cta, self.address, self.plane, self.channel = config, kernel.cta, address, plane, channel
        self.first_row, self.column, self.result = first_row, column, result
        self.has_whole_rows = int(config.strips) == 1
        self.words = allocate("pixels", COPY_BYTES // 4, "uint32")

    @property
    def lines(self) -> range:
        """Rows of the window inside of the image; all rows if those outside are not the same for all threads."""
        w, lines = self.w, super().lines
        if int(self.config.parts) > 1 or not can_skip_padding(w):
            return lines
        return range(w.pad_low[0], min(lines.stop, w.pad_low[0] + w.input_size[0]))

    @property
    def columns(self) -> range:
        """Columns of the window inside of the image, if a strip is a whole row."""
        w, columns = self.w, super().columns
        if not self.has_whole_rows:
            return columns
        return range(w.pad_low[1], min(columns.stop, w.pad_low[1] + w.input_size[1]))

    def begin_line(self, line: int) -> None:
        """Keep the compiler from loading rows long before their use, which takes registers: the planes are there."""
        emit_call(T.cuda.warp_sync())

    def end_line(self, line: int, *, is_last: bool) -> None:
        """Release the stage."""
        if is_last:
            self.cta.release_stage()

    def load_line(self, line: int, first_row: Expr) -> None:
        """Load the columns of a row in vectors, with zeros outside of the image."""
        w, itemsize = self.w, self.config.itemsize
        width, step = w.input_size[1], w.stride[0]
        pitch, row = width * itemsize, line - w.pad_low[0]
        address = self.address
        if not isinstance(first_row, int):
            address = address + to_uint32(first_row * (step * pitch))
        elif first_row:
            row += first_row * step
        conditions = self._list_row_conditions(row, first_row)
        last_column = (w.output_size[1] - 1) // self.strip * self.strip * w.stride[1]
        first, columns = -w.pad_low[1], self.columns
        for offset, size in self._list_vectors(first + columns.start, first + columns.stop):
            inside = [self.column * w.stride[1] + offset >= 0] * (offset < 0)
            inside += [self.column * w.stride[1] + offset < width] * (last_column + offset + size > width)
            num_words = max(1, size * itemsize // 4)
            distance = row * pitch + offset * itemsize
            place = address + T.uint32(distance) if distance >= 0 else address - T.uint32(-distance)
            if conditions or inside:
                for i in range(num_words):
                    store(self.words, i, T.uint32(0))
            with if_(logical_and(*conditions, *inside) if conditions or inside else True):
                load_shared(self.words, place, size * itemsize)
            for e, value in enumerate(unpack(self.words, size, w.storage)):
                store(self.values, offset - first + e, value)

    def _list_row_conditions(self, row: int, first_row: Expr) -> list[Expr]:
        """Return the conditions under which a row of X, relative to the thread's part, is inside of the image."""
        w, config = self.w, self.config
        if not isinstance(first_row, int):  # the loop has no other rows
            return []
        last_part = (w.output_size[0] - int(config.rows)) * w.stride[0]
        own = self.first_row * w.stride[0] + row
        if int(config.parts) == 1:
            return [] if 0 <= row < w.input_size[0] else [T.bool(False)]
        return [own >= 0] * (row < 0) + [own < w.input_size[0]] * (last_part + row >= w.input_size[0])

    def _list_vectors(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return offset and size of the aligned vectors of a row that cover some columns from the strip's first on."""
        w, vectors = self.w, []
        steps = () if self.has_whole_rows else (self.strip * w.stride[1],)
        alignment = math.gcd(*steps, w.input_size[1], COPY_BYTES // self.config.itemsize)
        while start < stop:
            size = math.gcd(start, alignment) or alignment
            while size > stop - start:
                size //= 2
            vectors.append((start, size))
            start += size
        return vectors

    def store_row(self, row: Expr, slot: int) -> None:
        """Apply the epilogue to an output row of the strip, and store it."""
        config, cta, w, strip = self.config, self.cta, self.w, self.strip
        height, width = w.output_size
        count = width if self.has_whole_rows else strip
        vector = math.gcd(count, width, COPY_BYTES // config.itemsize)
        results, packed = allocate("results", vector, "float32"), allocate("packed", 8, "uint32")
        exists = [cta.thread < int(config.num_items)] * (config.num_items < config.compute_threads)
        line = (self.plane * height + self.first_row + row) * width + self.column
        for first in range(0, count, vector):
            inside = exists + [self.column + first < width] * (width % count > 0)
            with if_(logical_and(*inside) if inside else True):
                for e in range(vector):
                    store(results, e, self.sums[slot * strip + first + e])
                apply_to_pixels(cta.ops, cta.arguments, self.channel, line + first, vector, results, packed)
                if config.is_staged:
                    place = self.result + to_uint32((row * width + first) * config.itemsize)
                    store_shared(place, packed, vector * config.itemsize)
                else:
                    store_global(cta.arguments["Y"], line + first, packed, vector)
