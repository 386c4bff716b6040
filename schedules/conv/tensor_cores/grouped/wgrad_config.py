"""Configs of `grouped_mma_sync`: channels in octets, tiles of pixels in shared memory, and warps.

Channels come in octets of 16 bytes, the rows of the matrices of ldmatrix. A *unit* has the fewest whole groups whose
channels of X and of dY are octets. If it has several groups, products between them are computed and not stored.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from tvmconv.arithmetic import ceil_div, round_up
from tvmconv.fitted_latency import H200_FIT
from tvmconv.space import Columns, Knobs
from tvmconv.space.factors import list_divisors
from tvmconv.space.search_space import ResourceUsage
from tvmconv.target import (
    CLOCKS_PER_MATRIX_MULTIPLY,
    H200,
    L2_CLOCKS,
    PORTABLE_SHARED_BYTES,
    SCHEDULERS,
    SECTOR_BYTES,
    WARP_SIZE,
)
from tvmconv.workloads.conv_gradient import WeightGradient

from ...plane_shape import PlaneShape
from ...tile_config import Rule, TileConfig, add_rules, declare_choices, prune_by_estimate, select_cheapest
from .pixel_copies import ITEM_BYTES, OCTET, pad_pixel

MMA_PIXELS = 16  # reduction of an mma
MAX_UNIT_CHANNELS = 48  # sums of more channels do not fit registers
MAX_UNIT_GROUPS = 4
MAX_ACCUMULATORS = 128
MAX_WARPS = 16
MAX_SHARED_BYTES = PORTABLE_SHARED_BYTES
SM_SHARED_BYTES = 227 << 10
UNITS_CHOICES = (1, 2, 3, 4, 6, 8)
PIXELS_Y_CHOICES = (1, 2, 4, 7, 8)
PIXELS_X_CHOICES = (16, 28, 32, 56, 64)
WARPS_PIXELS_CHOICES = (1, 2, 4, 8)
PARTS_CHOICES = (1, 2, 3, 4, 6, 8, 11, 16, 22, 29, 33, 44, 66, 88, 132, 198, 264)
LDMATRIX_CYCLES = 4  # of shared memory: four matrices of 128 bytes
MMA_LATENCY = 33  # clock cycles: HMMA in `tvmconv.target.INSTRUCTION_CLOCKS`
COPY_INSTRUCTIONS = 25  # of the copy of an octet, with its address and guards
ADDRESS_INSTRUCTIONS = 30  # of a step of 16 pixels, with the stores of its sums
REDUCTION_CYCLES, WORKSPACE_BYTES_PER_CYCLE = 2500, 1500  # of the second kernel


@dataclasses.dataclass(frozen=True)
class GroupedWgradConfig(TileConfig):
    """One config, or many configs as columns; `declare_knobs` has the meaning of the knobs."""

    w: WeightGradient
    units: Any
    pixels_y: Any
    pixels_x: Any
    warps_taps: Any
    warps_pixels: Any
    parts: Any

    @property
    def shape(self) -> PlaneShape:
        """Sizes of the forward convolution over planes, rows and columns."""
        return PlaneShape.from_workload(self.w.forward)

    @property
    def groups_per_unit(self) -> int:
        """Groups of a unit."""
        return count_unit_groups(self.w)

    @property
    def inputs_per_unit(self) -> int:
        """Channels of X of a unit."""
        return self.groups_per_unit * self.w.C // self.w.groups

    @property
    def outputs_per_unit(self) -> int:
        """Channels of dY of a unit."""
        return self.groups_per_unit * self.w.O // self.w.groups

    @property
    def unit_blocks(self) -> Any:
        """CTAs along the units."""
        return ceil_div(self.w.groups // self.groups_per_unit, self.units)

    @property
    def taps_per_warp(self) -> Any:
        """Taps whose sums a warp keeps."""
        return ceil_div(self.shape.num_taps, self.warps_taps)

    @property
    def octets_of_rows(self) -> Any:
        """Octets of rows of a warp's product: (tap, octet of X)."""
        return self.taps_per_warp * (self.inputs_per_unit // OCTET)

    @property
    def mmas_m(self) -> Any:
        """Instructions along the rows, of two octets each."""
        return ceil_div(self.octets_of_rows, 2)

    @property
    def mmas_n(self) -> int:
        """Instructions along the columns, of an octet of dY each."""
        return self.outputs_per_unit // OCTET

    @property
    def num_accumulators(self) -> Any:
        """Accumulator registers per thread."""
        return self.mmas_m * self.mmas_n * 4

    @property
    def window(self) -> tuple[Any, Any]:
        """Rows and columns of X below the taps of a tile of pixels."""
        strides, extents = self.shape.strides, self.shape.window_extent
        rows, columns = (
            (pixels - 1) * strides[axis] + extents[axis] for axis, pixels in ((1, self.pixels_y), (2, self.pixels_x))
        )
        return rows, columns

    @property
    def num_pixels(self) -> Any:
        """Pixels of a tile."""
        return self.pixels_y * self.pixels_x

    @property
    def pixel_steps(self) -> Any:
        """Steps of the reduction over a tile, of 16 pixels each."""
        return ceil_div(self.num_pixels, MMA_PIXELS)

    @property
    def input_pitch(self) -> Any:
        """Elements from a pixel of X to the next in shared memory."""
        return pad_pixel(self.units * self.inputs_per_unit)

    @property
    def output_pitch(self) -> Any:
        """Elements from a pixel of dY to the next in shared memory."""
        return pad_pixel(self.units * self.outputs_per_unit)

    @property
    def input_bytes(self) -> Any:
        """Bytes of a tile of X in shared memory."""
        return self.window[0] * self.window[1] * self.input_pitch * ITEM_BYTES

    @property
    def smem_bytes(self) -> Any:
        """Bytes of shared memory."""
        return self.input_bytes + self.pixel_steps * MMA_PIXELS * self.output_pitch * ITEM_BYTES

    @property
    def num_warps(self) -> Any:
        """Warps per CTA."""
        return self.units * self.warps_taps * self.warps_pixels

    @property
    def num_threads(self) -> Any:
        """Threads per CTA."""
        return self.num_warps * WARP_SIZE

    @property
    def pixel_tiles(self) -> tuple[Any, Any]:
        """Numbers of tiles of an image along rows and columns."""
        _, rows, columns = self.shape.output_size
        return ceil_div(rows, self.pixels_y), ceil_div(columns, self.pixels_x)

    @property
    def num_tiles(self) -> Any:
        """Tiles of pixels of the batch."""
        return self.shape.num_output_planes * self.pixel_tiles[0] * self.pixel_tiles[1]

    @property
    def iterations(self) -> Any:
        """Tiles of a CTA."""
        return ceil_div(self.num_tiles, self.parts)

    @property
    def num_parts(self) -> Any:
        """Parts of the pixels that are not empty."""
        return ceil_div(self.num_tiles, self.iterations)

    @property
    def num_blocks(self) -> Any:
        """CTAs of the grid."""
        return self.num_parts * self.unit_blocks

    @property
    def num_partial_sums(self) -> Any:
        """Partial sums of an element of dK: one for each warp along the pixels of each part."""
        return self.num_parts * self.warps_pixels

    @property
    def estimated_cycles(self) -> Any:
        """Estimated latency in clock cycles of both kernels."""
        fit = H200_FIT.strips
        blocks_per_sm = ceil_div(self.num_blocks, H200.multiprocessors)
        resident = np.minimum(SM_SHARED_BYTES // (self.smem_bytes + 1024), 64 // self.num_warps)
        resident = np.maximum(1, np.minimum(resident, 480 // ((self.num_accumulators + 48) * self.num_warps // 4 + 1)))
        tiles, steps = blocks_per_sm * self.iterations, self.pixel_steps
        steps_per_warp = ceil_div(steps, self.warps_pixels)
        input_bytes, gradient_bytes = (
            round_up(ITEM_BYTES * self.units * channels, SECTOR_BYTES)
            for channels in (self.inputs_per_unit, self.outputs_per_unit)
        )
        num_inputs = math.prod(self.window)
        octets = self.units * (num_inputs * self.inputs_per_unit + self.num_pixels * self.outputs_per_unit) / OCTET
        copy_instructions = COPY_INSTRUCTIONS * octets / self.num_threads
        mma_cycles = self.mmas_m * (self.mmas_n * 2 * CLOCKS_PER_MATRIX_MULTIPLY + LDMATRIX_CYCLES)
        step_instructions = ADDRESS_INSTRUCTIONS + self.mmas_m * (2 + self.mmas_n)
        instructions = copy_instructions + steps_per_warp * step_instructions
        # Products of a step are independent of each other.
        warp_cycles = 5 * L2_CLOCKS + copy_instructions + steps_per_warp * (2 * MMA_LATENCY + 2 * step_instructions)
        terms = np.stack(
            np.broadcast_arrays(
                tiles * steps * self.units * self.warps_taps * mma_cycles,
                tiles * self.num_warps * instructions / SCHEDULERS,
                tiles * (num_inputs * input_bytes + self.num_pixels * gradient_bytes) / fit.l2_bytes_per_cycle,
                self.iterations * warp_cycles * ceil_div(blocks_per_sm, resident),
            )
        )
        sums = self.num_partial_sums * math.prod(self.w.argument_shapes[-1])
        reduction = REDUCTION_CYCLES + 8 * sums / WORKSPACE_BYTES_PER_CYCLE
        return 0.75 * terms.max(axis=0) + 0.25 * terms.sum(axis=0) + reduction


@functools.lru_cache(maxsize=64)
def count_unit_groups(w: Any) -> int:
    """Return the fewest groups whose channels of both images are octets."""
    inputs, outputs = w.C // w.groups, w.O // w.groups
    return math.lcm(OCTET // math.gcd(inputs, OCTET), OCTET // math.gcd(outputs, OCTET))


def can_form_units(w: WeightGradient) -> bool:
    """Whether groups are units of at most 48 channels in octets, and filters have one plane."""
    groups, shape = count_unit_groups(w), PlaneShape.from_workload(w.forward)
    channels = groups * max(w.C, w.O) // w.groups
    return (
        1 < w.groups < min(w.C, w.O)
        and shape.kernel_size[0] == shape.strides[0] == 1
        and shape.pad_low[0] == 0
        and shape.input_size[0] == shape.output_size[0]
        and w.groups % groups == 0
        and groups <= MAX_UNIT_GROUPS
        and channels <= MAX_UNIT_CHANNELS
        and bool(np.any(_list_legal(w)[1]))
    )


@functools.lru_cache(maxsize=64)
def list_options(w: WeightGradient) -> dict[str, Any]:
    """Return the options of all knobs."""
    shape = PlaneShape.from_workload(w.forward)
    _, rows, columns = shape.output_size
    num_units, row_taps = w.groups // count_unit_groups(w), shape.kernel_size[2]
    whole_row = [round_up(columns, 2) if columns > 1 else 1]
    return {
        "units": sorted({*(n for n in UNITS_CHOICES if num_units % n == 0), 1}),
        "pixels_y": [n for n in PIXELS_Y_CHOICES if n < 2 * rows],
        "pixels_x": sorted({*(whole_row if columns <= 128 else []), *(n for n in PIXELS_X_CHOICES if n < columns), 16}),
        "warps_taps": sorted({1, *(n for n in list_divisors(shape.num_taps) if n <= 9), min(row_taps, 9)}),
        "warps_pixels": WARPS_PIXELS_CHOICES,
        "parts": PARTS_CHOICES,
    }


def list_required(w: WeightGradient) -> list[Rule]:
    """Return the conditions on every config."""
    return [
        (f"at most {MAX_ACCUMULATORS} accumulators per thread", lambda t: t.num_accumulators <= MAX_ACCUMULATORS),
        (f"at most {MAX_WARPS} warps", lambda t: t.num_warps <= MAX_WARPS),
        (f"at most {MAX_SHARED_BYTES} bytes of shared memory", lambda t: t.smem_bytes <= MAX_SHARED_BYTES),
    ]


def list_pruned(w: WeightGradient) -> list[Rule]:
    """Return the conditions on configs that are worth a search."""
    return [
        ("each warp along the pixels has a step of 16 pixels", lambda t: t.warps_pixels <= t.pixel_steps),
        ("there are at most as many parts as tiles", lambda t: t.parts <= t.num_tiles),
    ]


@functools.lru_cache(maxsize=64)
def _list_legal(w: WeightGradient) -> tuple[GroupedWgradConfig, Any]:
    configs = GroupedWgradConfig.from_options(list_options(w), w=w)
    return configs, functools.reduce(np.logical_and, (predicate(configs) for _, predicate in list_required(w)))


@functools.lru_cache(maxsize=64)
def select_default(w: WeightGradient) -> GroupedWgradConfig:
    """Return the config with the lowest estimate."""
    configs, is_legal = _list_legal(w)
    return select_cheapest(configs, is_legal, list_pruned(w), configs.estimated_cycles)


def compute_usage(w: WeightGradient, columns: Columns) -> ResourceUsage:
    """Return the resources that configs use."""
    config = make_config(w, columns)
    return ResourceUsage(
        threads=config.num_threads,
        shared_bytes=np.zeros_like(config.smem_bytes),
        accumulators=config.num_accumulators,
        blocks=config.num_blocks,
        dynamic_shared_bytes=config.smem_bytes,
        all_threads=config.num_blocks * config.num_threads,
        estimate=config.estimated_cycles,
    )


def make_config(w: WeightGradient, values: Mapping[str, Any]) -> GroupedWgradConfig:
    """Return the config of the knobs' values, or the configs of many."""
    return GroupedWgradConfig(w=w, **values)


def declare_knobs(w: WeightGradient, k: Knobs) -> GroupedWgradConfig:
    """Declare the knobs, with the defaults of the lowest estimate, and return their values."""
    declare_choices(k, list_options(w), select_default(w))
    add_rules(k, functools.partial(make_config, w), list_required(w), list_pruned(w))
    prune_by_estimate(k, functools.partial(make_config, w), float(select_default(w).estimated_cycles))
    return make_config(w, k.values)
