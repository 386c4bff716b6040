"""1×1 layers of few filters, channels last: lanes of a warp share the channels of a pixel, and add up their sums.

With one to four filters, a tile of tensor cores is empty but for these, and memory bounds the layer: its pixels are
read once, and hardly anything is written. Here a warp reads pixels that follow one another in memory in vectors of 16
bytes, several for each lane before any is used. Each lane has the weights of its channels in registers, and the lanes
of a pixel add up their sums by shuffles. Each of them then stores another pixel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from tvm.s_tir import Schedule
from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.arithmetic import ceil_div
from tvmconv.registry import schedule
from tvmconv.requirements import CHANNELS_LAST_LAYOUT, Requirement, all_of
from tvmconv.space import Knobs
from tvmconv.target import H200, WARP_SIZE
from tvmconv.workloads import Conv
from tvmconv.workloads.dtypes import get_itemsize

from ...tir_builder import (
    Buffer,
    Expr,
    Register,
    allocate,
    build_schedule,
    fill_zeros,
    if_,
    load_global,
    logical_and,
    serial_loop,
    store,
    store_global,
    unpack,
)
from ..estimated_config import EstimatedTileConfig
from ..reduction import FLOAT_DTYPES
from ..tensor_cores.gemm.atoms import ThreadPosition, add_across_lanes
from ..tensor_cores.gemm.cta import allow_dependent_launch, open_cta
from ..tensor_cores.gemm.epilogue_ops import EpilogueOps, apply_to_vector
from ..tensor_cores.hopper.tma_requirements import is_pixel_matrix
from ..tensor_cores.implicit_gemm_shape import VECTOR_BYTES
from ..tile_config import Rule

NUM_FILTERS = (1, 2, 4)  # whose outputs of a pixel are one vector
MAX_LANE_WEIGHTS, MAX_LANE_VECTORS = 64, 16  # registers of weights, and vectors of pixels that a lane loads at a time
OVERHEAD_REGISTERS, MAX_REGISTERS = 40, 168
# Rates of an SM per clock, approximately: its share of the memory's bytes, and of the instructions of its schedulers.
MEMORY_BYTES_PER_CLOCK, INSTRUCTIONS_PER_CLOCK, START_CYCLES = 16, 3, 2500
MIN_PROMISING_PIXELS = 1 << 13  # output pixels of layers that a search tries


@dataclass(frozen=True)
class DotConfig(EstimatedTileConfig):
    """One config, or many configs as columns."""

    TILE_KNOBS: ClassVar[tuple[str, ...]] = ("lane_pixels", "warps")

    w: Conv
    lane_pixels: Any  # pixels that the lanes of a pixel read at a time
    warps: Any  # warps per CTA
    max_ctas: Any  # maximum number of CTAs, which share all pixels

    @classmethod
    def list_options(cls, w: Conv) -> Mapping[str, Sequence[Any]]:
        """Return the options of all knobs."""
        return {
            "lane_pixels": (1, 2, 4, 8, 16),
            "warps": (2, 4, 8),
            "max_ctas": tuple(H200.multiprocessors * n for n in (1, 2, 4, 8, 16, 64)),
        }

    @classmethod
    def list_required(cls, w: Conv) -> list[Rule]:
        """Return the conditions on every config."""
        return [
            (
                f"a lane loads at most {MAX_LANE_VECTORS} vectors at a time",
                lambda t: t.lane_pixels * t.lane_vectors <= MAX_LANE_VECTORS,
            ),
            (
                "each lane of a pixel stores equally many pixels, or one",
                lambda t: (t.lane_pixels % t.lanes == 0) | (t.lanes % t.lane_pixels == 0),
            ),
            (f"at most {MAX_REGISTERS} registers", lambda t: t.num_registers <= MAX_REGISTERS),
        ]

    @classmethod
    def list_pruned(cls, w: Conv) -> list[Rule]:
        """Return the conditions on configs that are worth a search."""
        return [
            (
                "there are pixels for all CTAs",
                lambda t: (t.num_blocks == t.max_ctas) | (t.max_ctas <= H200.multiprocessors),
            )
        ]

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return get_itemsize(self.w.storage)

    @property
    def vector(self) -> int:
        """Channels of a vector."""
        return VECTOR_BYTES // self.itemsize

    @property
    def vectors(self) -> int:
        """Vectors of a pixel."""
        return self.w.C // self.vector

    @property
    def lanes(self) -> int:
        """Lanes that share a pixel."""
        return min(WARP_SIZE, 1 << (self.vectors - 1).bit_length())

    @property
    def lane_vectors(self) -> int:
        """Vectors of a pixel that a lane reads."""
        return ceil_div(self.vectors, self.lanes)

    @property
    def pixels(self) -> int:
        """Pixels of the batch."""
        return self.w.N * math.prod(self.w.output_size)

    @property
    def warp_pixels(self) -> Any:
        """Pixels of a warp at a time."""
        return WARP_SIZE // self.lanes * self.lane_pixels

    @property
    def num_tiles(self) -> Any:
        """Tiles of pixels, one for a warp at a time."""
        return ceil_div(self.pixels, self.warp_pixels)

    @property
    def num_warps(self) -> Any:
        """Warps per CTA."""
        return self.warps

    @property
    def num_blocks(self) -> Any:
        """CTAs of the grid."""
        return np.minimum(self.max_ctas, ceil_div(self.num_tiles, self.warps))

    @property
    def rounds(self) -> Any:
        """Tiles that a warp computes one after another."""
        return ceil_div(self.num_tiles, self.num_blocks * self.warps)

    @property
    def num_accumulators(self) -> Any:
        """Accumulator registers per thread."""
        return self.lane_pixels * self.w.O

    @property
    def lane_weights(self) -> int:
        """Weights of a lane."""
        return self.lane_vectors * self.vector * self.w.O

    @property
    def num_registers(self) -> Any:
        """Estimated registers per thread."""
        pixel_registers = self.lane_pixels * self.lane_vectors * (VECTOR_BYTES // 4)
        return OVERHEAD_REGISTERS + self.lane_weights + self.num_accumulators + pixel_registers

    @property
    def smem_bytes(self) -> Any:
        """Bytes of shared memory."""
        return np.zeros_like(self.warps)

    @property
    def estimated_cycles(self) -> Any:
        """Estimated latency in clock cycles: the longer of memory and instructions, and what does not overlap."""
        memory_cycles = self.w.min_bytes / (H200.multiprocessors * MEMORY_BYTES_PER_CLOCK)
        vector_instructions = 1 + self.vector * (1.5 + self.w.O)
        sums_instructions = self.w.O * (2 * math.log2(self.lanes) + 4)
        tile_instructions = 30 + self.lane_pixels * (self.lane_vectors * vector_instructions + sums_instructions)
        sms = np.minimum(self.num_blocks, H200.multiprocessors)
        warps_per_sm = ceil_div(self.num_blocks, sms) * self.warps
        instruction_cycles = self.rounds * warps_per_sm * tile_instructions / INSTRUCTIONS_PER_CLOCK
        loads_in_flight = np.minimum(warps_per_sm, 48) * WARP_SIZE * self.lane_pixels * self.lane_vectors * VECTOR_BYTES
        exposed = 1 + 24_000 / loads_in_flight  # some bytes have to be under way on an SM
        return np.maximum(memory_cycles * exposed, instruction_cycles) + START_CYCLES


def has_few_filters(w: Conv) -> bool:
    """Whether the convolution is a product of all pixels with a few filters, and channels fill vectors of 16 bytes."""
    return (
        w.groups == 1
        and w.reads_x_only
        and is_pixel_matrix(w)
        and not w.has_large_tensors
        and not w.returns_stats
        and w.argument_dtypes[-1] == w.storage
        and w.O in NUM_FILTERS
        and w.C * get_itemsize(w.storage) % VECTOR_BYTES == 0
        and DotConfig(w, 1, 1, 1).lane_weights <= MAX_LANE_WEIGHTS
    )


FEW_FILTERS = Requirement(
    "1, 2 or 4 filters of one tap without a stride, and channels that are multiples of 16 bytes",
    has_few_filters,
    lambda w: f"filters of {math.prod(w.kernel)} taps × {w.C} × {w.O} channels",
)


@schedule(
    *("conv1d", "conv2d", "conv3d"),
    dtypes=FLOAT_DTYPES,
    usage=DotConfig.compute_usage,
    condition=all_of(CHANNELS_LAST_LAYOUT, FEW_FILTERS),
    search_if=lambda w: w.N * math.prod(w.output_size) >= MIN_PROMISING_PIXELS,
    starting_configs=DotConfig.list_starting_configs,
    device_kinds=("cuda",),
    min_arch=80,
)
def pixel_dots(s: Schedule, w: Conv, k: Knobs) -> Schedule:
    """Multiply pixels by few filters, whose weights lanes keep in registers, and add up the sums of lanes."""
    config = DotConfig.declare_knobs(w, k)
    return build_schedule(w, lambda arguments: emit_kernel(config, arguments))


def emit_kernel(config: DotConfig, arguments: dict[str, Buffer]) -> None:
    """Emit the kernel."""
    num_ctas, warps = int(config.num_blocks), int(config.warps)
    with open_cta(num_ctas, int(config.num_threads), 1, splits_in_cluster=False) as cta:
        allow_dependent_launch()
        lanes = PixelLanes.allocate(config, arguments, cta.thread)
        lanes.load_weights()
        tile = Register("tile", value=cta.index * warps + cta.thread.warp)
        with serial_loop(int(config.rounds), "round"), if_(tile.value < int(config.num_tiles)):
            lanes.load_pixels(tile.value)
            lanes.multiply()
            lanes.store_sums(tile.value)
            tile.set(tile.value + num_ctas * warps)


@dataclass(frozen=True)
class PixelLanes:
    """The lanes of a warp: their weights, and the vectors and sums of their pixels."""

    config: DotConfig
    arguments: dict[str, Buffer]
    thread: ThreadPosition
    weights: Buffer  # (filter, vector of the lane, channel)
    words: list[Buffer]  # vectors of pixels: (pixel, vector of the lane)
    sums: Buffer  # (pixel, filter)

    @classmethod
    def allocate(cls, config: DotConfig, arguments: dict[str, Buffer], thread: ThreadPosition) -> PixelLanes:
        """Allocate the registers."""
        num_vectors = int(config.lane_pixels * config.lane_vectors)
        words = [allocate(f"pixels_{i}", VECTOR_BYTES // 4, "uint32") for i in range(num_vectors)]
        weights = allocate("weights", config.lane_weights, "float32")
        return cls(config, arguments, thread, weights, words, allocate("sums", int(config.num_accumulators), "float32"))

    @property
    def pixel_lane(self) -> Expr:
        """Index of this lane among those of its pixel."""
        return self.thread.lane % self.config.lanes

    def locate_vector(self, index: int) -> tuple[Expr, Expr]:
        """Return the first channel of a vector of this lane, and whether a pixel has it."""
        config = self.config
        number = self.pixel_lane + index * config.lanes
        is_exact = config.vectors % config.lanes == 0
        return number * config.vector, True if is_exact else number < config.vectors

    def load_weights(self) -> None:
        """Load the weights of this lane's channels; those beyond the pixel are zeros."""
        config, loaded = self.config, allocate("loaded", VECTOR_BYTES // 4, "uint32")
        fill_zeros(self.weights, config.lane_weights)
        for index in range(config.lane_vectors):
            channel, exists = self.locate_vector(index)
            with if_(exists):
                for o in range(config.w.O):
                    load_global(loaded, self.arguments["K"], channel + o * config.w.C, config.vector)
                    first = (o * config.lane_vectors + index) * config.vector
                    for e, value in enumerate(unpack(loaded, config.vector, config.w.storage)):
                        store(self.weights, first + e, value)

    def locate_pixel(self, tile: Expr, step: Expr) -> Expr:
        """Return one of the pixels of this lane in a tile."""
        config = self.config
        return tile * int(config.warp_pixels) + step * (WARP_SIZE // config.lanes) + self.thread.lane // config.lanes

    def load_pixels(self, tile: Expr) -> None:
        """Load the vectors of all pixels of a tile; those beyond the last pixel are zeros, and are not stored."""
        config = self.config
        is_exact = config.pixels % config.warp_pixels == 0
        for step in range(int(config.lane_pixels)):
            pixel = self.locate_pixel(tile, step)
            for index in range(config.lane_vectors):
                channel, exists = self.locate_vector(index)
                words, is_inside = self.words[step * config.lane_vectors + index], is_exact or pixel < config.pixels
                if exists is not True or is_inside is not True:
                    for e in range(VECTOR_BYTES // 4):
                        store(words, e, T.uint32(0))
                with if_(is_inside), if_(exists):
                    load_global(words, self.arguments["X"], pixel * config.w.C + channel, config.vector)

    def multiply(self) -> None:
        """Compute the sums of all pixels over this lane's channels, and then over the lanes of a pixel."""
        config, vector = self.config, self.config.vector
        for step in range(int(config.lane_pixels)):
            for index in range(config.lane_vectors):
                values = unpack(self.words[step * config.lane_vectors + index], vector, config.w.storage)
                inputs = [Register(f"input_{e}", "float32", value).value for e, value in enumerate(values)]
                for o in range(config.w.O):
                    first = (o * config.lane_vectors + index) * vector
                    total = step * config.w.O + o
                    for e, value in enumerate(inputs):
                        product = value * self.weights[first + e]
                        store(self.sums, total, product if index + e == 0 else self.sums[total] + product)
            for o in range(config.w.O):
                total, distance = step * config.w.O + o, 1
                while distance < config.lanes:
                    store(self.sums, total, add_across_lanes(self.sums[total], distance))
                    distance *= 2

    def store_sums(self, tile: Expr) -> None:
        """Apply the epilogue, and store the pixels of a tile, each by another one of the lanes that have its sums."""
        config, ops = self.config, EpilogueOps.from_workload(self.config.w)
        ops = ops.bind_tensor_args(self.arguments, uses_registers=False)
        outputs, packed = allocate("outputs", config.w.O, "float32"), allocate("packed", 8, "uint32")
        storing_lanes = min(config.lanes, int(config.lane_pixels))  # lanes of a pixel that store one each
        for first in range(0, int(config.lane_pixels), storing_lanes):
            step = first + self.pixel_lane % storing_lanes
            for o in range(config.w.O):
                value = self.sums[first * config.w.O + o]
                for lane in range(1, storing_lanes):
                    own = self.sums[(first + lane) * config.w.O + o]
                    value = T.Select(self.pixel_lane % storing_lanes == lane, own, value)
                store(outputs, o, value)
            pixel = self.locate_pixel(tile, step)
            stores = True if storing_lanes == config.lanes else self.pixel_lane < storing_lanes
            with if_(logical_and(pixel < config.pixels, stores)):
                apply_to_vector(ops, self.arguments, 0, pixel * config.w.O, config.w.O, outputs, packed)
                store_global(self.arguments["Y"], pixel * config.w.O, packed, config.w.O)
