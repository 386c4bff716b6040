"""Configs of `grouped_mma_sync` for gradients of inputs: tiles of pixels in shared memory, and warps.

A strided gradient consists of stride × stride *classes* of pixels of dX: those of a class meet elements of dY below the
same taps, and others than those of the other classes. Each class is a convolution of stride 1.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Any, NamedTuple

import numpy as np

from tvmconv.arithmetic import ceil_div, round_up
from tvmconv.fitted_latency import H200_FIT
from tvmconv.target import CLOCKS_PER_MATRIX_MULTIPLY, H200, L2_CLOCKS, SCHEDULERS, SECTOR_BYTES
from tvmconv.workloads.conv_gradient import InputGradient

from ...plane_shape import PlaneShape
from ...tile_config import Rule, combine_overlapping
from ...transposed_view import TransposedView
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

MAX_UNIT_CHANNELS = 64
MAX_REGISTERS = 144  # of filters and sums, per thread
MAX_STRIDE = 4
FILTER_INSTRUCTIONS = 14  # of the load of a fragment's register, two elements with their addresses
MAX_CTAS_CHOICES = (0, 132, 264, 396, 528, 792)


class Tap(NamedTuple):
    """A tap that connects the pixels of a class with elements of dY."""

    number: int  # index of its weight in memory
    row: int  # first row of dY in the window of a tile
    column: int  # first column of dY


@dataclasses.dataclass(frozen=True)
class GroupedDgradConfig(GroupedTileConfig):
    """One config, or many configs as columns."""

    w: Any  # an InputGradient
    warps_n: Any
    max_ctas: Any

    @classmethod
    def list_options(cls, w: InputGradient) -> dict[str, Any]:
        """Return the options of all knobs."""
        view = cls.view_as_convolution(w)
        shape, groups = PlaneShape.from_workload(view), count_unit_groups(view)
        rows, columns = (ceil_div(shape.output_size[axis], shape.upsampling[axis]) for axis in (1, 2))
        num_units, octets = view.groups // groups, groups * view.O // view.groups // OCTET
        whole_row = [columns] if columns <= 128 else []
        return {
            "units": [n for n in UNITS_CHOICES if num_units % n == 0],
            "pixels_y": [n for n in PIXELS_Y_CHOICES if n < 2 * rows],
            "pixels_x": sorted({*whole_row, *(n for n in PIXELS_X_CHOICES if n < columns), min(16, columns)}),
            "warps_n": [n for n in (1, 2, 3, 4, 6, 8) if octets % n == 0],
            "warps_pixels": WARPS_PIXELS_CHOICES,
            "max_ctas": MAX_CTAS_CHOICES,
        }

    @classmethod
    def list_required(cls, w: InputGradient) -> list[Rule]:
        """Return the conditions on every config."""
        return [
            (f"at most {MAX_REGISTERS} registers of filters and sums", lambda t: t.num_registers <= MAX_REGISTERS),
            *super().list_required(w),
        ]

    @classmethod
    def list_pruned(cls, w: InputGradient) -> list[Rule]:
        """Return the conditions on configs that are worth a search."""
        return [
            (
                "each warp along the pixels has 16 pixels",
                lambda t: t.warps_pixels <= ceil_div(t.num_pixels, MMA_PIXELS),
            ),
            ("several CTAs share the tiles", lambda t: t.max_ctas < t.num_tiles * t.unit_blocks),
        ]

    @classmethod
    def view_as_convolution(cls, w: Any) -> Any:
        """Return the gradient as a direct convolution."""
        return TransposedView.from_workload(w)

    @property
    def convolution(self) -> Any:
        """The gradient as a direct convolution."""
        return self.view_as_convolution(self.w)

    @property
    def argument_roles(self) -> dict[str, str]:
        """Names of the arguments in a direct convolution."""
        return dict(self.convolution.argument_roles)

    @property
    def mmas_n(self) -> Any:
        """Instructions of a warp along the channels of dX."""
        return self.outputs_per_unit // OCTET // self.warps_n

    @property
    def k_octets(self) -> list[int]:
        """Octets of the reduction of each class, (tap, octet of dY); an instruction has two of them."""
        return [
            round_up(len(taps) * (self.inputs_per_unit // OCTET), 2) for taps in list_class_taps(self.shape).values()
        ]

    @property
    def num_filter_registers(self) -> Any:
        """Registers per thread for the fragments of the filters of all classes."""
        return sum(self.k_octets) * self.mmas_n

    @property
    def num_accumulators(self) -> Any:
        """Accumulator registers per thread."""
        return self.mmas_n * 4

    @property
    def num_registers(self) -> Any:
        """Registers per thread for filters and sums."""
        return self.num_filter_registers + self.num_accumulators

    @property
    def window(self) -> tuple[Any, Any]:
        """Rows and columns of dY that a tile reads."""
        taps = [tap for class_taps in list_class_taps(self.shape).values() for tap in class_taps]
        rows, columns = (max((tap[axis] for tap in taps), default=0) for axis in (1, 2))
        _, stride_y, stride_x = self.shape.strides
        return (self.pixels_y - 1) * stride_y + 1 + rows, (self.pixels_x - 1) * stride_x + 1 + columns

    @property
    def smem_bytes(self) -> Any:
        """Bytes of shared memory: the window of dY and the tile of dX."""
        pixels = self.tile_size[0] * self.tile_size[1]
        return self.input_bytes + pixels * self.output_pitch * ITEM_BYTES

    @property
    def num_warps(self) -> Any:
        """Warps per CTA."""
        return self.units * self.warps_n * self.warps_pixels

    @property
    def iterations(self) -> Any:
        """Tiles of a CTA."""
        ctas = np.maximum(1, self.max_ctas // self.unit_blocks)
        return np.where(np.equal(self.max_ctas, 0), 1, ceil_div(self.num_tiles, ctas))

    @property
    def usage_features(self) -> dict[str, Any]:
        """Further features of the usage for cost models, by name."""
        return {**super().usage_features, "live_registers": self.num_registers}

    @property
    def estimated_cycles(self) -> Any:
        """Estimated latency in clock cycles."""
        fit = H200_FIT.strips
        blocks_per_sm = ceil_div(self.num_blocks, H200.multiprocessors)
        resident = np.minimum(SM_SHARED_BYTES // (self.smem_bytes + 1024), 64 // self.num_warps)
        resident = np.maximum(1, np.minimum(resident, 2048 // ((self.num_registers + 40) * self.num_warps)))
        tiles, steps = blocks_per_sm * self.iterations, ceil_div(self.num_pixels, MMA_PIXELS)
        steps_per_warp, k_steps = ceil_div(steps, self.warps_pixels), sum(self.k_octets) / 2
        input_bytes, output_bytes = (
            round_up(ITEM_BYTES * self.units * channels, SECTOR_BYTES)
            for channels in (self.inputs_per_unit, self.outputs_per_unit)
        )
        num_inputs, num_outputs = math.prod(self.window), math.prod(self.tile_size)
        octets = self.units * (num_inputs * self.inputs_per_unit + num_outputs * self.outputs_per_unit) / OCTET
        copy_instructions = COPY_INSTRUCTIONS * octets / self.num_threads
        addresses = ADDRESS_INSTRUCTIONS * len(self.k_octets)
        mma_cycles = k_steps * (self.mmas_n * 2 * CLOCKS_PER_MATRIX_MULTIPLY + LDMATRIX_CYCLES)
        instructions = copy_instructions + steps_per_warp * (k_steps * (2 + self.mmas_n) + addresses)
        filter_instructions = FILTER_INSTRUCTIONS * self.num_filter_registers
        all_instructions = blocks_per_sm * filter_instructions + tiles * instructions
        warp_cycles = 5 * L2_CLOCKS + copy_instructions + steps_per_warp * (k_steps * MMA_LATENCY + addresses)
        return combine_overlapping(
            tiles * steps * self.units * self.warps_n * mma_cycles,
            self.num_warps * all_instructions / SCHEDULERS,
            tiles * (num_inputs * input_bytes + num_outputs * output_bytes) / fit.l2_bytes_per_cycle,
            (self.iterations * warp_cycles + filter_instructions + 4 * L2_CLOCKS) * ceil_div(blocks_per_sm, resident),
        )


@functools.lru_cache(maxsize=64)
def list_class_taps(shape: PlaneShape) -> dict[tuple[int, int], list[Tap]]:
    """Return the taps of each class, which is named by its first row and column."""
    _, step_y, step_x = shape.upsampling
    _, rows, columns = shape.kernel_size
    classes: dict[tuple[int, int], list[Tap]] = {}
    for first in itertools.product(range(step_y), range(step_x)):
        taps = classes.setdefault(first, [])
        for row, column in itertools.product(range(rows), range(columns)):
            y, x = (shape.input_offset(axis, first[axis - 1], tap) for axis, tap in ((1, row), (2, column)))
            if y is not None and x is not None:
                taps.append(Tap(shape.weight_tap(row * columns + column), y, x))
    return classes


def can_form_gradient_units(w: InputGradient) -> bool:
    """Whether groups are units of at most 64 channels in octets, filters have one plane, and there is no epilogue."""
    is_simple = not w.epilogue and max(w.stride) <= MAX_STRIDE
    can_divide = can_divide_into_units(TransposedView.from_workload(w), MAX_UNIT_CHANNELS)
    return is_simple and can_divide and GroupedDgradConfig.has_config(w)
