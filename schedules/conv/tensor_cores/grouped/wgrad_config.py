"""Configs of `grouped_mma_sync` for gradients of weights: tiles of pixels in shared memory, and warps along taps."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from tvmconv.arithmetic import ceil_div, round_up
from tvmconv.fitted_latency import H200_FIT
from tvmconv.space.factors import list_divisors
from tvmconv.target import CLOCKS_PER_MATRIX_MULTIPLY, H200, L2_CLOCKS, SCHEDULERS, SECTOR_BYTES
from tvmconv.workloads import Conv
from tvmconv.workloads.conv_gradient import WeightGradient

from ...plane_shape import PlaneShape
from ...tile_config import Rule, combine_overlapping
from .pixel_copies import ITEM_BYTES, OCTET
from .tile_config import (
    ADDRESS_INSTRUCTIONS,
    COPY_INSTRUCTIONS,
    LDMATRIX_CYCLES,
    MMA_LATENCY,
    MMA_PIXELS,
    PIXELS_X_CHOICES,
    PIXELS_Y_CHOICES,
    SM_SHARED_BYTES,
    UNITS_CHOICES,
    WARPS_PIXELS_CHOICES,
    GroupedTileConfig,
    can_divide_into_units,
    count_unit_groups,
)

MAX_UNIT_CHANNELS = 48  # sums of more channels do not fit registers
MAX_ACCUMULATORS = 128
PARTS_CHOICES = (1, 2, 3, 4, 6, 8, 11, 16, 22, 29, 33, 44, 66, 88, 132, 198, 264)
REDUCTION_CYCLES, WORKSPACE_BYTES_PER_CYCLE = 2500, 1500  # of the second kernel


@dataclasses.dataclass(frozen=True)
class GroupedWgradConfig(GroupedTileConfig):
    """One config, or many configs as columns."""

    w: WeightGradient
    warps_taps: Any
    parts: Any

    @classmethod
    def list_options(cls, w: WeightGradient) -> dict[str, Any]:
        """Return the options of all knobs."""
        shape = PlaneShape.from_workload(w.forward)
        _, rows, columns = shape.output_size
        num_units, row_taps = w.groups // count_unit_groups(w.forward), shape.kernel_size[2]
        whole_row = [round_up(columns, 2) if columns > 1 else 1]
        return {
            "units": sorted({*(n for n in UNITS_CHOICES if num_units % n == 0), 1}),
            "pixels_y": [n for n in PIXELS_Y_CHOICES if n < 2 * rows],
            "pixels_x": sorted(
                {*(whole_row if columns <= 128 else []), *(n for n in PIXELS_X_CHOICES if n < columns), 16}
            ),
            "warps_taps": sorted({1, *(n for n in list_divisors(shape.num_taps) if n <= 9), min(row_taps, 9)}),
            "warps_pixels": WARPS_PIXELS_CHOICES,
            "parts": PARTS_CHOICES,
        }

    @classmethod
    def list_required(cls, w: WeightGradient) -> list[Rule]:
        """Return the conditions on every config."""
        return [
            (f"at most {MAX_ACCUMULATORS} accumulators per thread", lambda t: t.num_accumulators <= MAX_ACCUMULATORS),
            *super().list_required(w),
        ]

    @classmethod
    def list_pruned(cls, w: WeightGradient) -> list[Rule]:
        """Return the conditions on configs that are worth a search."""
        return [
            ("each warp along the pixels has a step of 16 pixels", lambda t: t.warps_pixels <= t.pixel_steps),
            ("there are at most as many parts as tiles", lambda t: t.parts <= t.num_tiles),
        ]

    @property
    def convolution(self) -> Conv:
        """The forward convolution."""
        return self.w.forward

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
    def pixel_steps(self) -> Any:
        """Steps of the reduction over a tile, of 16 pixels each."""
        return ceil_div(self.num_pixels, MMA_PIXELS)

    @property
    def smem_bytes(self) -> Any:
        """Bytes of shared memory."""
        return self.input_bytes + self.pixel_steps * MMA_PIXELS * self.output_pitch * ITEM_BYTES

    @property
    def num_warps(self) -> Any:
        """Warps per CTA."""
        return self.units * self.warps_taps * self.warps_pixels

    @property
    def iterations(self) -> Any:
        """Tiles of a CTA."""
        return ceil_div(self.num_tiles, self.parts)

    @property
    def num_partial_sums(self) -> Any:
        """Partial sums of an element of dK: one for each warp along the pixels of each part."""
        return self.pixel_blocks * self.warps_pixels

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
        cycles = combine_overlapping(
            tiles * steps * self.units * self.warps_taps * mma_cycles,
            tiles * self.num_warps * instructions / SCHEDULERS,
            tiles * (num_inputs * input_bytes + self.num_pixels * gradient_bytes) / fit.l2_bytes_per_cycle,
            self.iterations * warp_cycles * ceil_div(blocks_per_sm, resident),
        )
        sums = self.num_partial_sums * math.prod(self.w.argument_shapes[-1])
        reduction = REDUCTION_CYCLES + 8 * sums / WORKSPACE_BYTES_PER_CYCLE
        return cycles + reduction


def can_form_units(w: WeightGradient) -> bool:
    """Whether groups are units of at most 48 channels in octets, and filters have one plane."""
    return can_divide_into_units(w.forward, MAX_UNIT_CHANNELS) and GroupedWgradConfig.has_config(w)
