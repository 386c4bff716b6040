"""Configs of the NHWC direct schedules: tiles, resource usage, and an estimate of the latency.

A thread computes a *strip*: a vector of neighbouring output channels at rows × columns of neighbouring pixels of a
plane. The threads of a block are arranged along the channels (x), the columns (y) and the rows (z), so that each access
of a warp consists of one or several contiguous runs.

The estimate in clock cycles counts instructions, loads and bytes, but not how they overlap; a search improves on it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from tvmconv.arithmetic import ceil_div, round_up
from tvmconv.fitted_latency import H200_FIT
from tvmconv.space import Columns, Tile
from tvmconv.space.factors import list_divisors
from tvmconv.space.search_space import ResourceUsage
from tvmconv.target import (
    H200,
    LINE_BYTES,
    MAX_THREADS_Z,
    NUM_BANKS,
    SCHEDULERS,
    SECTOR_BYTES,
    STATIC_SHARED_BYTES,
    WARP_SIZE,
)
from tvmconv.workloads import Conv
from tvmconv.workloads.dtypes import get_itemsize
from tvmconv.workloads.layout import CHANNELS_FIRST

from ..plane_shape import PlaneShape
from ..tile_config import Rule, combine_overlapping
from ..transposed_view import TransposedView

WORD_BYTES = 4
MAX_LOAD_BYTES = 16  # maximum bytes per load or store instruction

LEVELS = ("block", "thread", "local")
VECTOR_CHOICES = (8, 4, 2, 1)  # channels per thread
THREADS_C_CHOICES = (1, 2, 4, 8, 16, 32, 64)
SHARED_ROW_WAVEFRONTS = 1.5  # wavefronts of a load of rows that lie in shared memory as in global memory, counted
MAX_PRODUCTS = 2048  # unrolled products per thread, for which NVRTC takes two seconds
MAX_DEFAULT_LIVE_REGISTERS = 128  # some kernels spill registers beyond this


class OperandTraffic(NamedTuple):
    """Work of a thread with its operands, from which the latency is estimated."""

    filter_vectors: Any  # filter vectors that a thread reads
    widened_elements: Any  # elements that a thread converts to float32 if they have 16 bits
    operand_registers: Any  # estimated registers per thread for inputs and filters
    # Vectors that a thread reads at addresses far from those of its neighbours along the channels.
    scattered_vectors: Any
    scattered_instructions: Any = 0  # instructions per thread with scattered vectors, besides their loads
    reads_per_filter_byte: int = 1  # bytes that a block reads for each byte of its filters


@dataclass(frozen=True)
class StripConfig(ABC):
    """One config, or many configs as columns."""

    WEIGHT_SCOPES: ClassVar[tuple[str, ...]]
    UNROLL_SCOPES: ClassVar[tuple[str, ...]]
    INPUT_ROW_SCOPE: ClassVar[str] = "input_row"  # unrolled part of the filter of gradients: a row for each input row
    # Conditions besides those of `declare_knobs`, by their description.
    REQUIREMENTS: ClassVar[Mapping[str, Callable[[StripConfig], Any]]] = {}
    MAX_DEFAULT_PRODUCTS: ClassVar[int] = MAX_PRODUCTS
    HAS_INNERMOST_CHANNELS: ClassVar[bool] = True  # whether neighbouring threads compute neighbouring channels
    HAS_VECTORS_OF_CHANNELS: ClassVar[bool] = False  # whether a thread computes several channels if they come first
    LIMIT_OF_THREADS_Z: ClassVar[Rule] = (
        f"at most {MAX_THREADS_Z} threads along the rows",
        lambda t: t.rows.thread <= MAX_THREADS_Z,
    )

    w: Conv | TransposedView
    vector: Any  # output channels per thread
    channels: Tile  # tile (block, thread) of the channel vectors
    rows: Tile  # tile of the output rows, with `LEVELS`
    columns: Tile  # tile of the output columns, with `LEVELS`
    # Unrolled part of the filter: all of it ("filter"), one row ("row", or "input_row" in a loop over input rows), or
    # nothing ("tap").
    unroll_scope: Any
    # Memory from which threads read the filters: transposed in shared memory, in registers, or in global memory.
    weight_scope: Any
    block_k: Any = 1  # input channels per k-tile
    input_scope: Any = "global"  # Memory from which threads read the input; a block copies whole planes to "shared".

    @classmethod
    def from_columns(cls, w: Conv | TransposedView, columns: Columns) -> StripConfig:
        """Return the config of the knobs' values, or the configs of many."""
        shape = PlaneShape.from_workload(w)
        rows, columns_tile = (
            scale_tile(Tile.from_column(extent, LEVELS, columns[name]), extent, step)
            for name, extent, step in zip(
                ("tile_y", "tile_x"), shape.output_size[1:], shape.upsampling[1:], strict=True
            )
        )
        return cls.from_tiles(w, columns, rows, columns_tile)

    @classmethod
    def from_tiles(cls, w: Conv | TransposedView, values: Mapping[str, Any], rows: Tile, columns: Tile) -> StripConfig:
        """Return the config of these tiles and of the values of the other knobs."""
        num_vectors = w.O // values["vector"]
        threads = values["threads_c"]
        channels = Tile(num_vectors, {"block": ceil_div(num_vectors, threads), "thread": threads})
        own_values = {name: values[name] for name in cls.list_own_choices(w)}
        return cls(w, values["vector"], channels, rows, columns, **own_values)

    @classmethod
    def list_own_choices(cls, w: Conv | TransposedView) -> dict[str, Sequence[Any]]:
        """Return the options of the knobs besides those of the strip."""
        return {"unroll_scope": cls.UNROLL_SCOPES, "weight_scope": cls.WEIGHT_SCOPES}

    @classmethod
    @abstractmethod
    def is_vector_allowed(cls, w: Conv | TransposedView, vector: int) -> bool:
        """Return whether a thread can compute a number of channels."""

    @property
    @abstractmethod
    def traffic(self) -> OperandTraffic:
        """Work of a thread with its operands."""

    @property
    def shape(self) -> PlaneShape:
        """Sizes of the convolution over planes, rows and columns."""
        return PlaneShape.from_workload(self.w)

    @property
    def has_one_column_tile(self) -> Any:
        """Whether each thread computes whole rows, so that its columns are known to the compiler."""
        return (self.columns.block == 1) & (self.columns.thread == 1)

    @classmethod
    def list_vector_choices(cls, w: Conv | TransposedView) -> tuple[int, ...]:
        """Return the options for channels per thread: divisors of all channels that one store can write."""
        return tuple(
            vector
            for vector in VECTOR_CHOICES
            if vector * get_itemsize(w.storage) <= MAX_LOAD_BYTES
            and (vector == 1 or w.layout != CHANNELS_FIRST or cls.HAS_VECTORS_OF_CHANNELS)
            and w.O % vector == 0
            and cls.is_vector_allowed(w, vector)
        )

    @classmethod
    def list_threads_c_choices(cls, w: Conv | TransposedView) -> tuple[int, ...]:
        """Return the options for threads per block along the channels: powers of two, and divisors of the channels.

        If channels come first, neighbouring threads compute neighbouring columns.
        """
        if w.layout == CHANNELS_FIRST:
            return (1,)
        return tuple(sorted({*THREADS_C_CHOICES, *(n for n in list_divisors(w.O) if n <= THREADS_C_CHOICES[-1])}))

    @property
    def num_threads(self) -> Any:
        """Threads per block."""
        return self.channels.thread * self.rows.thread * self.columns.thread

    @property
    def num_accumulators(self) -> Any:
        """Accumulators per thread, one for each of its outputs."""
        return self.vector * self.rows.local * self.columns.local

    @property
    def num_blocks(self) -> Any:
        """Blocks in the grid."""
        return self.shape.num_output_planes * self.channels.block * self.rows.block * self.columns.block

    @property
    def channels_per_group(self) -> int:
        """Input channels of a group."""
        return self.w.C // self.w.groups

    @property
    def num_taps(self) -> int:
        """Taps of a filter."""
        return math.prod(self.w.kernel)

    @property
    def num_taps_per_output(self) -> Any:
        """Mean number of taps that meet an input, as far as a gradient omits zeros; otherwise all taps."""
        shape = self.shape
        planes = shape.kernel_size[0] / shape.upsampling[0]
        rows: Any = shape.kernel_size[1] / shape.upsampling[1]
        if shape.is_transposed:
            rows = np.where(np.equal(self.unroll_scope, self.INPUT_ROW_SCOPE), shape.count_inside_taps(1), rows)
        return planes * rows * self.taps_per_row

    @property
    def taps_per_row(self) -> Any:
        """Mean number of taps of a filter row that meet an input; known columns outside of the image are omitted."""
        shape = self.shape
        taps = shape.kernel_size[2] / shape.upsampling[2]
        return np.where(self.has_one_column_tile, shape.count_inside_taps(2), taps) if shape.is_transposed else taps

    @property
    def num_products(self) -> Any:
        """Multiplications per thread in the kernel's source."""
        unrolled_taps = self._select_by_unroll_scope(self.num_taps_per_output, self.taps_per_row, 1)
        return self.num_accumulators * self.block_k * unrolled_taps

    @property
    def window_vectors(self) -> Any:
        """Vectors of an input row that a thread loads at a time."""
        columns = self.columns.local
        distinct_inputs = self.shape.count_distinct_inputs(2, columns)
        if self.shape.is_transposed:
            inside = np.minimum(distinct_inputs, self.shape.input_size[2])
            distinct_inputs = np.where(self.has_one_column_tile, inside, distinct_inputs)
        return self._select_by_unroll_scope(distinct_inputs, distinct_inputs, columns)

    @property
    def has_column_vectors(self) -> bool:
        """Whether a thread loads and stores vectors of columns: in channels-first convolutions, but no gradients."""
        return self.w.layout == CHANNELS_FIRST and not self.shape.is_transposed

    @property
    def input_vector_columns(self) -> Any:
        """Columns of an aligned vector of the input, which neither crosses a row nor contains columns of two strips."""
        return self._count_vector_columns(self.shape.input_size[2], self.columns.local * self.shape.strides[2])

    @property
    def output_vector_columns(self) -> Any:
        """Columns of an aligned vector of the output."""
        return self._count_vector_columns(self.shape.output_size[2], self.columns.local)

    def _count_vector_columns(self, row_columns: int, strip_columns: Any) -> Any:
        return np.gcd(math.gcd(row_columns, MAX_LOAD_BYTES // get_itemsize(self.w.storage)), strip_columns)

    @property
    def loads_per_row(self) -> Any:
        """Load instructions for an input row of a thread's window: vectors of columns, and single ones around them."""
        if not self.has_column_vectors:
            return self.window_vectors
        vector, num_columns = self.input_vector_columns, self.window_vectors
        first = np.minimum(self.shape.pad_low[2] % vector, num_columns)
        is_whole_row = np.not_equal(self.unroll_scope, "tap")
        extent = (self.columns.local - 1) * self.shape.strides[2] + self.shape.window_extent[2]
        num_vectors = np.where(is_whole_row & (extent == num_columns), (num_columns - first) // vector, 0)
        return num_columns - num_vectors * (vector - 1)

    @property
    def unrolled_loads(self) -> Any:
        """Input vector loads per thread in the kernel's source."""
        rows = self.rows.local
        num_distinct_rows = self.shape.kernel_size[0] * self.shape.count_distinct_inputs(1, rows)
        return self.loads_per_row * self._select_by_unroll_scope(num_distinct_rows, rows, rows, 1)

    @property
    def loaded_vectors(self) -> Any:
        """Input vectors that a thread loads."""
        filter_rows = math.prod(self.shape.kernel_size[:-1])
        input_rows = self.shape.kernel_size[0] * self.shape.count_distinct_inputs(1, self.rows.local)
        num_repetitions = self._select_by_unroll_scope(
            1, filter_rows / self.shape.upsampling[1], self.num_taps_per_output, input_rows
        )
        return self.unrolled_loads * num_repetitions * (self.channels_per_group // self.block_k)

    def count_issued_instructions(self, traffic: OperandTraffic) -> Any:
        """Return the estimated instructions per thread: products, conversions, guarded loads, stores."""
        is_16_bit = get_itemsize(self.w.storage) < WORD_BYTES
        return (
            self.num_accumulators * self.num_taps_per_output * self.channels_per_group
            + is_16_bit * traffic.widened_elements
            + 3 * self.loaded_vectors
            + traffic.filter_vectors
            + 4 * self.rows.local * self.columns.local * (1 + self.vector / 4)
        )

    @property
    def live_registers(self) -> Any:
        """Estimated registers per thread for accumulators, inputs and filters."""
        return self.num_accumulators + self.traffic.operand_registers

    @property
    def is_weight_shared(self) -> Any:
        """Whether the filters are in shared memory."""
        return np.equal(self.weight_scope, "shared")

    @property
    def shared_bytes(self) -> Any:
        """Bytes of a block's filters."""
        block_channels = self.channels.thread * self.vector
        return self.num_taps * self.channels_per_group * block_channels * get_itemsize(self.w.storage)

    @property
    def is_input_shared(self) -> Any:
        """Whether the input planes of a block are in shared memory."""
        return np.equal(self.input_scope, "shared")

    @property
    def block_input_bytes(self) -> Any:
        """Bytes in shared memory of the input planes of a block's channels, each of which has a plane of its own."""
        return self.channels.thread * self.plane_pitch * get_itemsize(self.w.storage)

    @property
    def copied_vector(self) -> int:
        """Elements of a vector of planes that a thread copies to shared memory: of one plane, or at most a word."""
        max_elements = MAX_LOAD_BYTES // get_itemsize(self.w.storage)
        vector = math.gcd(math.prod(self.shape.input_size), max_elements)
        return vector if vector * get_itemsize(self.w.storage) >= WORD_BYTES else max_elements

    @property
    def plane_pitch(self) -> int:
        """Elements from a plane in shared memory to the next, so that their first rows are in distinct banks."""
        pixels, vector, itemsize = math.prod(self.shape.input_size), self.copied_vector, get_itemsize(self.w.storage)
        period, row = NUM_BANKS * WORD_BYTES // itemsize, round_up(self.shape.input_size[-1], vector)
        return pixels + (row - pixels) % period if pixels % vector == 0 else pixels

    @property
    def allocated_bytes(self) -> Any:
        """Bytes of shared memory per block."""
        filter_bytes = np.where(self.is_weight_shared, self.shared_bytes, 0)
        return filter_bytes + np.where(self.is_input_shared, self.block_input_bytes, 0)

    @property
    def fits_shared_memory(self) -> Any:
        """Whether what a block has in shared memory fits."""
        return self.allocated_bytes <= STATIC_SHARED_BYTES

    @property
    def halo_ratio(self) -> Any:
        """Ratio of the inputs that a block reads to those that it would read without overlapping windows."""
        strides, extents = self.shape.strides[1:], self.shape.window_extent[1:]
        return math.prod(
            ((tile.size - 1) * stride + extent) / (tile.size * stride)
            for tile, stride, extent in zip((self.rows, self.columns), strides, extents, strict=True)
        )

    @property
    def estimated_cycles(self) -> Any:
        """Estimated latency in clock cycles of the SM with the most blocks.

        An SM issues instructions (each warp needs a minimum time for its own), reads through the L1 cache and shared
        memory, and transfers the tiles of its blocks. The estimate is the longest of these times, plus a fraction of
        the others.
        """
        traffic, fit = self.traffic, H200_FIT.strips
        blocks_per_sm = ceil_div(self.num_blocks, H200.multiprocessors)
        warps = ceil_div(self.num_threads, WARP_SIZE) * blocks_per_sm
        shared_elements = self.shared_bytes / get_itemsize(self.w.storage)
        issued_instructions = self.count_issued_instructions(traffic) + np.where(
            self.is_weight_shared, 3 * shared_elements / self.num_threads, traffic.scattered_instructions
        )
        issue_cycles = (issued_instructions + fit.overhead_instructions) * (np.maximum(1, warps / SCHEDULERS) + 0.5)
        copied_lines = np.where(self.is_input_shared, 2 * self.block_input_bytes / LINE_BYTES, 0)  # loaded and stored
        read_cycles = warps * self._count_read_cycles(traffic) + blocks_per_sm * copied_lines
        memory_cycles = blocks_per_sm * self._count_block_bytes(traffic) / fit.l2_bytes_per_cycle
        return combine_overlapping(issue_cycles, read_cycles, memory_cycles)

    def _count_read_cycles(self, traffic: OperandTraffic) -> Any:
        """Return the clock cycles in which the L1 cache and shared memory serve the loads of a warp."""
        itemsize, lines_per_cycle = get_itemsize(self.w.storage), H200_FIT.strips.l1_lines_per_cycle
        lanes = np.minimum(WARP_SIZE, self.channels.thread)
        wavefronts = np.maximum(1, self.vector * itemsize * WARP_SIZE / LINE_BYTES)
        l1_lines = np.maximum(wavefronts, WARP_SIZE / lanes / lines_per_cycle)
        if self.w.layout == CHANNELS_FIRST:  # the lanes of a warp read columns of a row
            l1_lines = np.maximum(1, self.columns.local * self.shape.strides[2] * itemsize * WARP_SIZE / LINE_BYTES)
        if self.has_column_vectors:
            shared_wavefronts = SHARED_ROW_WAVEFRONTS * np.maximum(
                1, self.columns.local * itemsize * WARP_SIZE / LINE_BYTES
            )
            l1_lines = np.where(self.is_input_shared, shared_wavefronts, self._count_lines_of_columns(itemsize))
        return (
            self.loaded_vectors * l1_lines
            + np.where(self.is_weight_shared, traffic.filter_vectors, 0) * wavefronts
            + np.where(self.is_weight_shared, 0, traffic.scattered_vectors)
            * np.maximum(wavefronts, lanes / lines_per_cycle)
        )

    def _count_block_bytes(self, traffic: OperandTraffic) -> Any:
        """Return the bytes that a block transfers: inputs, outputs and filters."""
        itemsize, shape = get_itemsize(self.w.storage), self.shape
        contiguous_bytes = np.maximum(self.channels.thread * self.vector * itemsize, SECTOR_BYTES)
        if self.w.layout == CHANNELS_FIRST:
            contiguous_bytes = itemsize
        if self.has_column_vectors:  # a tile reads whole sectors, and whole rows are contiguous
            row_bytes = self.columns.size * itemsize
            contiguous_bytes = itemsize * (1 + np.where(self.columns.block > 1, SECTOR_BYTES / row_bytes, 0))
        input_spacing, planes = math.prod(shape.upsampling), shape.kernel_size[0]
        num_elements = (
            self.rows.size
            * self.columns.size
            * (1 + self.halo_ratio * planes * math.prod(shape.strides[1:]) * self.w.C / self.w.O / input_spacing)
        )
        return num_elements * contiguous_bytes + traffic.reads_per_filter_byte * self.shared_bytes

    def _count_lines_of_columns(self, itemsize: int) -> Any:
        """Return the lines of the L1 cache that a load of a warp touches, whose lanes are columns and then rows."""
        lanes = np.minimum(WARP_SIZE, self.columns.thread)
        run_bytes = lanes * self.columns.local * self.shape.strides[2] * itemsize
        return WARP_SIZE / lanes * np.maximum(1, run_bytes / LINE_BYTES)

    @property
    def is_default_allowed(self) -> Any:
        """Whether the config may be a default."""
        is_allowed = (self.num_products <= self.MAX_DEFAULT_PRODUCTS) & self.fits_shared_memory
        is_allowed &= self.live_registers <= MAX_DEFAULT_LIVE_REGISTERS
        for predicate in self.REQUIREMENTS.values():
            is_allowed = is_allowed & predicate(self)
        return is_allowed

    @classmethod
    def compute_usage(cls, w: Conv | TransposedView, columns: Columns) -> ResourceUsage:
        """Return the resources that configs use; instructions are estimated numbers per output."""
        config = cls.from_columns(w, columns)
        return ResourceUsage(
            threads=config.num_threads,
            shared_bytes=config.allocated_bytes,
            accumulators=config.num_accumulators,
            blocks=config.num_blocks,
            all_threads=config.num_blocks * config.num_threads,
            live_registers=config.live_registers,
            issued_instructions=config.count_issued_instructions(config.traffic) / config.num_accumulators,
            halo_read_ratio=config.halo_ratio,
            estimate=config.estimated_cycles,
        )

    def _select_by_unroll_scope(
        self, filter_value: Any, row_value: Any, tap_value: Any, input_row_value: Any = None
    ) -> Any:
        """Return one of the values, depending on the unrolled part of the filter; a row's also for input rows."""
        scopes = [np.equal(self.unroll_scope, name) for name in ("filter", "row", self.INPUT_ROW_SCOPE)]
        values = [filter_value, row_value, row_value if input_row_value is None else input_row_value]
        return np.select(scopes, values, tap_value)


def scale_tile(tile: Tile, extent: int, step: int) -> Tile:
    """Return a tile of steps as a tile of an axis of `extent` elements."""
    return Tile(extent, {**tile.factors, "local": tile.local * step})
