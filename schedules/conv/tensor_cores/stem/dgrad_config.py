"""Configs of `stem` for gradients of inputs: a window of dY in shared memory, and warps along its rows and columns.

The pixels of dX are divided into residue classes, each with taps of its own. All classes of a position read the same
few elements of dY, so their channels together are the columns of one product. A tile has positions of one depth. Its
window has one plane of dY for each tap along the depth, of which `stages` are in shared memory at a time.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from tvmconv.arithmetic import ceil_div, round_up
from tvmconv.target import CLOCKS_PER_MATRIX_MULTIPLY, H200, L2_CLOCKS, SCHEDULERS, WARP_SIZE
from tvmconv.workloads.conv_gradient import InputGradient
from tvmconv.workloads.dtypes import get_itemsize

from ...estimated_config import EstimatedTileConfig
from ...tile_config import Rule, combine_overlapping
from ..gemm.atoms import MmaSyncAtom
from ..gemm.residue_classes import ResidueClasses
from ..implicit_gemm_shape import ACCUMULATOR_BYTES, VECTOR_BYTES
from ..pixel_tiles import count_resident_ctas, list_cta_limits
from .volume_view import view_gradient

ROWS_PER_WARP_CHOICES = (1, 2, 4, 8)
WARPS_CHOICES = (1, 2, 4, 8)
MAX_CTAS_CHOICES = (0, 132, 264, 396, 528)
STAGES_CHOICES = (1, 2)
MAX_WARPS = 16
MAX_COLUMNS = 64  # of all classes
MAX_UNION_TAPS = 64  # elements of dY that the classes of a position read
MAX_ACCUMULATORS = 96
OVERHEAD_REGISTERS = 48
COPY_INSTRUCTIONS = 22  # of a copy, with its address and guards
STORE_INSTRUCTIONS = 14  # of a vector of dX
TILE_CYCLES = 400  # of the barriers and the addresses of a tile
L2_BYTES_PER_CYCLE = 32  # of an SM


@dataclasses.dataclass(frozen=True)
class StemDgradConfig(EstimatedTileConfig):
    """One config, or many configs as columns."""

    TILE_KNOBS = ("rows_per_warp", "warps_x", "warps_y")

    w: InputGradient  # the gradient, or the transposed convolution, of three spatial axes, channels last
    rows_per_warp: Any  # rows of 16 positions that a warp computes
    warps_x: Any  # warps along a row of positions
    warps_y: Any  # warps along the rows
    max_ctas: Any  # maximum number of CTAs, which share all tiles; 0 for one CTA per tile
    stages: Any = 1  # planes of the window in shared memory; a knob only where a window has several planes

    @classmethod
    def list_options(cls, w: InputGradient) -> dict[str, Any]:
        """Return the options of all knobs."""
        depth_axis, *axes = ResidueClasses.from_workload(w.forward).axes
        rows, columns = (axis.positions for axis in axes)
        return {
            "rows_per_warp": [n for n in ROWS_PER_WARP_CHOICES if n < 2 * rows],
            "warps_x": [n for n in WARPS_CHOICES if MmaSyncAtom.m * (n - 1) < columns],
            "warps_y": [n for n in WARPS_CHOICES if n < 2 * rows],
            "max_ctas": MAX_CTAS_CHOICES,
            **({"stages": STAGES_CHOICES} if depth_axis.max_offset > 0 else {}),
        }

    @classmethod
    def list_required(cls, w: InputGradient) -> list[Rule]:
        """Return the conditions on every config."""
        return list_cta_limits(MAX_ACCUMULATORS, MAX_WARPS)

    @classmethod
    def list_pruned(cls, w: InputGradient) -> list[Rule]:
        """Return the conditions on configs that are worth a search."""
        return [("there are fewer CTAs than tiles", lambda t: (t.max_ctas == 0) | (t.max_ctas < t.num_tiles))]

    @property
    def residues(self) -> ResidueClasses:
        """Residue classes of the pixels of dX."""
        return ResidueClasses.from_workload(self.w.forward)

    @property
    def classes_with_taps(self) -> tuple[int, ...]:
        """Classes along each axis that have taps; they come first."""
        return tuple(min(axis.taps, axis.tap_step) for axis in self.residues.axes)

    @property
    def union_taps(self) -> tuple[int, ...]:
        """Elements of dY along each axis that the classes of a position read."""
        return tuple(axis.max_offset + 1 for axis in self.residues.axes)

    @property
    def columns(self) -> int:
        """Channels of dX of all classes with taps."""
        return math.prod(self.classes_with_taps) * self.w.forward.C

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return get_itemsize(self.w.storage)

    @property
    def mmas_n(self) -> int:
        """Instructions along the columns."""
        return ceil_div(self.columns, MmaSyncAtom.n)

    @property
    def k_steps(self) -> int:
        """Instructions along the channels of dY."""
        return ceil_div(self.w.forward.O * self.itemsize, MmaSyncAtom.k_bytes)

    @property
    def pixel_bytes(self) -> int:
        """Bytes from a pixel of dY to the next in shared memory: an odd multiple of 16, against bank conflicts."""
        return self.k_steps * MmaSyncAtom.k_bytes + VECTOR_BYTES

    @property
    def tile_size(self) -> tuple[Any, Any, Any]:
        """Positions of a tile along depth, rows and columns."""
        return 1, self.rows_per_warp * self.warps_y, MmaSyncAtom.m * self.warps_x

    @property
    def window(self) -> tuple[Any, Any, Any]:
        """Planes, rows and columns of dY that a tile reads."""
        planes, rows, columns = (tile + taps - 1 for tile, taps in zip(self.tile_size, self.union_taps, strict=True))
        return planes, rows, columns

    @property
    def plane_bytes(self) -> Any:
        """Bytes of a plane of the window."""
        return self.window[1] * self.window[2] * self.pixel_bytes

    @property
    def window_bytes(self) -> Any:
        """Bytes of the planes of the window that are in shared memory at a time."""
        return self.stages * self.plane_bytes

    @property
    def filter_rows(self) -> int:
        """Rows of the filters in shared memory: columns of all elements of dY, and zeros up to a whole instruction."""
        return (math.prod(self.union_taps) - 1) * self.columns + self.mmas_n * MmaSyncAtom.n

    @property
    def filter_bytes(self) -> int:
        """Bytes of the filters."""
        return self.filter_rows * self.pixel_bytes

    @property
    def result_row_elements(self) -> Any:
        """Elements of a row of the tile of dX."""
        return self.tile_size[2] * self.residues.axes[2].stride * self.w.forward.C

    @property
    def rows_per_result_plane(self) -> Any:
        """Rows of a plane of the tile of dX."""
        return self.tile_size[1] * self.residues.axes[1].stride

    @property
    def result_rows(self) -> Any:
        """Rows of the tile of dX."""
        return self.residues.axes[0].stride * self.rows_per_result_plane

    @property
    def result_bytes(self) -> Any:
        """Bytes of the sums of the tile of dX, which replace the window."""
        return self.result_rows * self.result_row_elements * ACCUMULATOR_BYTES

    @property
    def smem_bytes(self) -> Any:
        """Bytes of shared memory."""
        return self.filter_bytes + round_up(np.maximum(self.window_bytes, self.result_bytes), VECTOR_BYTES)

    @property
    def num_warps(self) -> Any:
        """Warps per CTA."""
        return self.warps_x * self.warps_y

    @property
    def num_accumulators(self) -> Any:
        """Accumulator registers per thread."""
        return self.rows_per_warp * self.mmas_n * MmaSyncAtom.num_accumulators

    @property
    def registers(self) -> Any:
        """Estimated registers per thread."""
        filters = self.union_taps[1] * self.mmas_n * MmaSyncAtom.b_registers
        return self.num_accumulators + filters + 2 * self.mmas_n + OVERHEAD_REGISTERS

    @property
    def pixel_tiles(self) -> tuple[Any, Any, Any]:
        """Numbers of tiles of a volume along depth, rows and columns."""
        axes = zip(self.residues.axes, self.tile_size, strict=True)
        depth, rows, columns = (ceil_div(axis.positions, size) for axis, size in axes)
        return depth, rows, columns

    @property
    def num_tiles(self) -> Any:
        """Tiles of the batch."""
        return self.w.forward.N * math.prod(self.pixel_tiles)

    @property
    def num_blocks(self) -> Any:
        """CTAs of the grid."""
        return np.where(self.max_ctas == 0, self.num_tiles, np.minimum(self.num_tiles, self.max_ctas))

    @property
    def iterations(self) -> Any:
        """Tiles of a CTA."""
        return ceil_div(self.num_tiles, self.num_blocks)

    @property
    def estimated_cycles(self) -> Any:
        """Estimated latency in clock cycles: the bottleneck of an SM, and what does not overlap."""
        resident = count_resident_ctas(self.smem_bytes, self.registers, self.num_warps)
        blocks_per_sm = ceil_div(self.num_blocks, H200.multiprocessors)
        planes, taps_y, taps_x = self.union_taps
        tiles, slices = blocks_per_sm * self.iterations, planes * taps_x * self.k_steps
        rows = self.rows_per_warp + taps_y - 1
        mmas = self.rows_per_warp * taps_y * self.mmas_n
        shared_cycles = 4 * rows + 2 * taps_y * self.mmas_n
        slice_instructions = mmas + rows + taps_y * self.mmas_n + 6
        vectors = self.k_steps * MmaSyncAtom.k_bytes / VECTOR_BYTES
        copies = math.prod(self.window) * vectors * COPY_INSTRUCTIONS / WARP_SIZE
        results = self.result_rows * self.result_row_elements
        stores = results / self.store_vector * STORE_INSTRUCTIONS / WARP_SIZE
        filters = self.filter_bytes / self.itemsize / WARP_SIZE * COPY_INSTRUCTIONS
        overhead = (copies + stores) / self.num_warps + TILE_CYCLES + (2 + planes / self.stages) * L2_CLOCKS
        warp_cycles = overhead + slices * (40 + 1.5 * slice_instructions)
        bytes_per_tile = math.prod(self.window) * vectors * VECTOR_BYTES + results * self.itemsize
        return combine_overlapping(
            tiles * self.num_warps * slices * mmas * 2.0 * CLOCKS_PER_MATRIX_MULTIPLY / SCHEDULERS,
            tiles * self.num_warps * slices * shared_cycles,
            (tiles * (self.num_warps * slices * slice_instructions + copies + stores) + blocks_per_sm * filters)
            / SCHEDULERS,
            tiles * bytes_per_tile / L2_BYTES_PER_CYCLE,
            (self.iterations * warp_cycles + filters / self.num_warps) * ceil_div(blocks_per_sm, resident),
        )

    @property
    def store_vector(self) -> int:
        """Elements of dX that a thread stores at once; arguments per channel are applied to single elements."""
        if any(shape == (self.w.forward.C,) for shape in self.w.argument_shapes[2:-1]):
            return 1
        return math.gcd(self.w.forward.input_size[-1] * self.w.forward.C, VECTOR_BYTES // self.itemsize)


def can_merge_classes(w: InputGradient) -> bool:
    """Whether the channels of all residue classes are few, and filters and a window of dY fit shared memory."""
    w = view_gradient(w)
    config = StemDgradConfig(w, 1, 1, 1, 0)
    is_small = config.columns <= MAX_COLUMNS and math.prod(config.union_taps) <= MAX_UNION_TAPS
    return is_small and StemDgradConfig.has_config(w)
