"""Configs of `depthwise_planes`: whole planes of images and channels in shared memory, and the pixels of a thread."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from tvmconv.arithmetic import ceil_div, round_up
from tvmconv.target import H200, MAX_REGISTERS_PER_THREAD, REGISTERS_PER_MULTIPROCESSOR, SCHEDULERS, WARP_SIZE
from tvmconv.tensor_map import MAX_BOX_ELEMENTS
from tvmconv.workloads.conv_gradient import WeightGradient
from tvmconv.workloads.dtypes import get_itemsize

from ..estimated_config import EstimatedTileConfig
from ..nhwc_direct.depthwise_tma_config import (
    BARRIER_BYTES,
    COPY_BYTES,
    MAX_SHARED_BYTES,
    OVERLAP,
    SHARED_BYTES_PER_CLOCK,
    STAGE_ALIGNMENT_BYTES,
)
from ..nhwc_direct.wgrad_config import count_positions
from ..plane_shape import PlaneShape
from ..tensor_cores.latency_model import count_ctas_per_sm
from ..tile_config import Rule

WORD_BYTES = 4
MAX_PRODUCTS = 3072  # unrolled products per thread
MAX_SUMS = 64  # of a thread
MAX_THREADS = 512  # that compute
MAX_OVERHANG = 1.2  # ratio of the pixels of all threads to those of dY, of configs worth a search
OVERHEAD_REGISTERS = 30  # besides sums, rows of dY and a row of X
MAX_ROWS, MAX_STRIP = 14, 16  # pixels of a thread
PIECES = (1, 2, 3, 4, 8)  # threads along a row or a column of a plane
IMAGES_CHOICES = (1, 2, 4, 8, 16, 32)
CHANNEL_CHOICES = (1, 2, 4, 8)
STAGES_CHOICES = (1, 2, 3, 4)
WAVES_CHOICES = (1, 2, 3, 4, 6)
# Of a line of a box of TMA, of its bytes, and of an SM's share of the memory; cycles of both launches.
LINE_CYCLES, COPY_BYTES_PER_CYCLE, MEMORY_BYTES_PER_CYCLE = 3, 45, 18
START_CYCLES, REDUCTION_CYCLES = 3000, 2000


@dataclass(frozen=True)
class Lines:
    """Planes of some channels as lines of contiguous elements, which a box of TMA copies."""

    channels: int  # channels whose planes fill whole units of TMA
    elements: int  # of a line
    count: int  # lines of these channels

    @classmethod
    def find(cls, plane: int, itemsize: int) -> Lines:
        """Return the longest lines of planes of a number of elements; 0 lines if a box cannot have them."""
        unit = COPY_BYTES // itemsize
        channels = unit // math.gcd(plane, unit)
        total = channels * plane
        lengths = [n for n in range(unit, MAX_BOX_ELEMENTS + 1, unit) if total % n == 0]
        longest = lengths[-1]
        return cls(channels, longest, total // longest if total // longest <= MAX_BOX_ELEMENTS else 0)


@dataclass(frozen=True)
class PlaneWgradConfig(EstimatedTileConfig):
    """One config, or many configs as columns."""

    TILE_KNOBS: ClassVar[tuple[str, ...]] = ("images", "rows", "strip", "channels")
    SHARED_BYTES: ClassVar[int] = MAX_SHARED_BYTES

    w: WeightGradient
    channels: Any  # channels per tile
    images: Any  # images per tile
    rows: Any  # rows of dY per thread
    strip: Any  # columns of dY per thread
    stages: Any  # tiles in shared memory
    waves: Any  # CTAs per multiprocessor, which divide the tiles

    @classmethod
    def list_options(cls, w: WeightGradient) -> Mapping[str, Sequence[Any]]:
        """Return the options of all knobs."""
        _, height, width = cls.make_shape(w).output_size

        def divide(size: int, limit: int) -> list[int]:
            pieces = {ceil_div(size, n) for n in (*PIECES, ceil_div(size, limit))}
            return sorted(n for n in pieces if n <= limit)

        return {
            "channels": [n for n in CHANNEL_CHOICES if n % cls.count_channels(w) == 0 and w.C % n == 0],
            "images": [n for n in IMAGES_CHOICES if n < 2 * w.N],
            "rows": divide(height, MAX_ROWS),
            "strip": divide(width, MAX_STRIP),
            "stages": STAGES_CHOICES,
            "waves": WAVES_CHOICES,
        }

    @classmethod
    def list_required(cls, w: WeightGradient) -> list[Rule]:
        """Return the conditions on every config."""
        return [
            (f"at most {MAX_PRODUCTS} unrolled products per thread", lambda t: t.num_products <= MAX_PRODUCTS),
            (f"at most {MAX_SUMS} sums per thread", lambda t: t.num_accumulators <= MAX_SUMS),
            (
                f"at most {MAX_THREADS} threads compute, and their registers fit",
                lambda t: (
                    (t.compute_threads <= MAX_THREADS)
                    & (t.registers <= MAX_REGISTERS_PER_THREAD)
                    & (t.registers * t.num_threads <= REGISTERS_PER_MULTIPROCESSOR)
                ),
            ),
            (f"at most {MAX_SHARED_BYTES} bytes of shared memory", lambda t: t.smem_bytes <= MAX_SHARED_BYTES),
        ]

    @classmethod
    def list_pruned(cls, w: WeightGradient) -> list[Rule]:
        """Return the conditions on configs that are worth a search."""
        _, height, width = cls.make_shape(w).output_size
        return [
            (
                "tiles are copied while others are multiplied, and a CTA has as many as stages",
                lambda t: (t.stages > 1) & (t.stages <= t.iterations) | ((t.stages == 1) & (t.iterations == 1)),
            ),
            ("all CTAs run at a time", lambda t: ceil_div(t.num_blocks, H200.multiprocessors) <= t.ctas_per_sm),
            (
                f"threads overhang planes by at most {MAX_OVERHANG - 1:.0%}",
                lambda t: t.row_groups * t.rows * (t.strips * t.strip) <= MAX_OVERHANG * height * width,
            ),
            ("most threads of a warp compute", lambda t: t.pixel_threads >= 0.8 * t.threads_per_channel),
        ]

    @staticmethod
    def make_shape(w: WeightGradient) -> PlaneShape:
        """Return the sizes of the forward convolution over planes, rows and columns."""
        return PlaneShape.from_workload(w.forward)

    @classmethod
    def find_lines(cls, w: WeightGradient) -> tuple[Lines, Lines]:
        """Return the lines of dY and of X."""
        shape, itemsize = cls.make_shape(w), get_itemsize(w.storage)
        sizes = shape.output_size, shape.input_size
        gradient, inputs = (Lines.find(math.prod(size), itemsize) for size in sizes)
        return gradient, inputs

    @classmethod
    def count_channels(cls, w: WeightGradient) -> int:
        """Return the smallest number of channels of a tile."""
        return math.lcm(*(lines.channels for lines in cls.find_lines(w)))

    @property
    def shape(self) -> PlaneShape:
        """Sizes of the forward convolution over planes, rows and columns."""
        return self.make_shape(self.w)

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return get_itemsize(self.w.storage)

    @property
    def input_plane(self) -> int:
        """Elements of a plane of X."""
        return math.prod(self.shape.input_size)

    @property
    def gradient_plane(self) -> int:
        """Elements of a plane of dY."""
        return math.prod(self.shape.output_size)

    @property
    def input_bytes(self) -> Any:
        """Bytes of X of a tile."""
        return self.images * self.channels * self.input_plane * self.itemsize

    @property
    def gradient_bytes(self) -> Any:
        """Bytes of dY of a tile."""
        return self.images * self.channels * self.gradient_plane * self.itemsize

    @property
    def gradient_offset_bytes(self) -> Any:
        """Bytes in front of dY in a stage."""
        return round_up(self.input_bytes, STAGE_ALIGNMENT_BYTES)

    @property
    def stage_bytes(self) -> Any:
        """Bytes from one stage to the next."""
        return round_up(self.gradient_offset_bytes + self.gradient_bytes, STAGE_ALIGNMENT_BYTES)

    @property
    def barrier_offset_bytes(self) -> Any:
        """Shared-memory offset of the barriers; the sums of warps take the place of the stages."""
        sums = WORD_BYTES * self.num_accumulators * (self.compute_threads // WARP_SIZE)
        return round_up(np.maximum(self.stages * self.stage_bytes, sums), BARRIER_BYTES)

    @property
    def smem_bytes(self) -> Any:
        """Dynamic shared memory per CTA in bytes, including the alignment of its start."""
        return STAGE_ALIGNMENT_BYTES + self.barrier_offset_bytes + 2 * self.stages * BARRIER_BYTES

    @property
    def strips(self) -> Any:
        """Threads along a row."""
        return ceil_div(self.shape.output_size[2], self.strip)

    @property
    def row_groups(self) -> Any:
        """Threads along a column."""
        return ceil_div(self.shape.output_size[1], self.rows)

    @property
    def pixel_threads(self) -> Any:
        """Threads with the same channel that have pixels."""
        return self.images * self.row_groups * self.strips

    @property
    def threads_per_channel(self) -> Any:
        """Threads with the same channel, whole warps."""
        return round_up(self.pixel_threads, WARP_SIZE)

    @property
    def compute_threads(self) -> Any:
        """Threads that compute."""
        return self.channels * self.threads_per_channel

    @property
    def num_warps(self) -> Any:
        """Warps per CTA, the last of which copies."""
        return self.compute_threads // WARP_SIZE + 1

    @property
    def num_accumulators(self) -> Any:
        """Sums of a thread: one for each tap."""
        return np.full_like(self.rows, self.shape.num_taps)

    @property
    def num_products(self) -> Any:
        """Unrolled products per thread."""
        return self.rows * self.strip * self.num_accumulators

    @property
    def loads(self) -> Any:
        """Elements that a thread loads of a tile."""
        shape = self.shape
        lines, columns = (
            count_positions(outputs, shape.kernel_size[axis], shape.strides[axis], shape.dilations[axis])
            for axis, outputs in ((1, self.rows), (2, self.strip))
        )
        return lines * columns + self.rows * self.strip

    @property
    def elements_per_load(self) -> Any:
        """Elements of a load from shared memory: a word, if all words lie in a row."""
        shape, n = self.shape, WORD_BYTES // self.itemsize
        is_even = all(size[2] % n == 0 for size in (shape.input_size, shape.output_size))
        return np.where(is_even & (self.strip % n == 0), n, 1)

    @property
    def registers(self) -> Any:
        """Estimated registers per thread: sums, the rows of dY under way, and a row of X with the next."""
        shape = self.shape
        rows = ceil_div((shape.kernel_size[1] - 1) * shape.dilations[1] + 1, shape.strides[1])
        columns = count_positions(self.strip, shape.kernel_size[2], shape.strides[2], shape.dilations[2])
        live = self.num_accumulators + np.minimum(self.rows, rows) * self.strip + 1.5 * columns + OVERHEAD_REGISTERS
        return round_up(np.ceil(live).astype(int), 8)

    @property
    def channel_blocks(self) -> Any:
        """Tiles along the channels."""
        return self.w.C // self.channels

    @property
    def num_tiles(self) -> Any:
        """Tiles along the images."""
        return ceil_div(self.w.N, self.images)

    @property
    def iterations(self) -> Any:
        """Tiles of a CTA."""
        return ceil_div(self.num_tiles, np.maximum(1, self.waves * H200.multiprocessors // self.channel_blocks))

    @property
    def num_parts(self) -> Any:
        """Parts of the images that are not empty."""
        return ceil_div(self.num_tiles, self.iterations)

    @property
    def num_blocks(self) -> Any:
        """CTAs of the grid."""
        return self.num_parts * self.channel_blocks

    @property
    def ctas_per_sm(self) -> Any:
        """Number of CTAs that fit an SM."""
        limits = self.num_blocks, H200.multiprocessors, self.smem_bytes
        return count_ctas_per_sm(*limits, self.registers, self.num_threads)

    @property
    def estimated_cycles(self) -> Any:
        """Estimated latency in clock cycles: instructions, copies, shared memory and memory, which overlap in part."""
        ctas = ceil_div(self.num_blocks, H200.multiprocessors)
        resident = np.maximum(1, np.minimum(ctas, self.ctas_per_sm))
        tiles, warps = self.iterations * ctas, self.compute_threads // WARP_SIZE
        conversions = 1 if self.itemsize == 2 else 0
        loads = self.loads / self.elements_per_load
        instructions = self.num_products + conversions * self.loads + loads + 40
        # Few warps do not hide the latency of their own instructions.
        issue = instructions * warps / SCHEDULERS * np.maximum(1.0, 8 / (resident * warps)) ** 0.5 * 1.15
        shared = loads * warps * WARP_SIZE * WORD_BYTES / SHARED_BYTES_PER_CLOCK
        copied = self.input_bytes + self.gradient_bytes
        copies = copied / COPY_BYTES_PER_CYCLE
        argument_bytes = sum(map(math.prod, self.w.argument_shapes[:2])) * self.itemsize
        memory = argument_bytes / (H200.multiprocessors * MEMORY_BYTES_PER_CYCLE) * np.ones_like(issue)
        work = np.stack(np.broadcast_arrays(tiles * issue, tiles * shared, tiles * copies, memory))
        longest = work.max(axis=0)
        cycles = longest + (1 - OVERLAP) * (work.sum(axis=0) - longest)
        sums = 4 * self.num_accumulators * warps  # over the lanes of warps
        return START_CYCLES + copies + issue + cycles + sums + (self.num_parts > 1) * REDUCTION_CYCLES
