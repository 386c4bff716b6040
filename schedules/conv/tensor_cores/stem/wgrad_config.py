"""Configs of `stem` for gradients of weights: tiles of pixels in shared memory, and warps along columns and pixels."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tvmconv.arithmetic import ceil_div, round_up
from tvmconv.target import CLOCKS_PER_MATRIX_MULTIPLY, H200, L2_CLOCKS, SCHEDULERS, WARP_SIZE
from tvmconv.workloads.conv_gradient import WeightGradient

from ...tile_config import Rule, combine_overlapping
from ..gemm.atoms import MmaSyncAtom
from ..implicit_gemm_shape import ACCUMULATOR_BYTES, VECTOR_BYTES
from ..pixel_tiles import REDUCTION_CYCLES, PixelTileConfig, count_resident_ctas, list_cta_limits
from .row_window import RowWindow
from .volume_view import view_gradient

BLOCK_M_CHOICES = (16, 32, 64)
BLOCK_P_CHOICES = (1, 2, 4)
BLOCK_Q_CHOICES = (16, 32, 64, 128)
WARPS_CHOICES = (1, 2, 4, 8)
STAGES_CHOICES = (2, 3, 4)
PARTS_CHOICES = (1, 2, 4, 8, 16, 33, 66, 132, 264, 396)
MAX_WARPS = 16
MAX_ACCUMULATORS = 128
OVERHEAD_REGISTERS = 56
PIXEL_UNIT = 16  # widths of tiles are multiples of it
ITEM_INSTRUCTIONS = 20  # of a copy, with its address and guards
TILE_CYCLES, STEP_CYCLES = 200, 40  # of the barrier and the addresses of a tile, and of the loads of a step
WORKSPACE_BYTES_PER_CYCLE = 1500  # of the second kernel
L2_BYTES_PER_CYCLE = 32  # of an SM


@dataclasses.dataclass(frozen=True)
class StemWgradConfig(PixelTileConfig):
    """One config, or many configs as columns."""

    TILE_KNOBS = ("block_m", "block_p", "block_q", "warps_n")

    block_m: Any  # filters per CTA
    warps_n: Any  # warps along (tap, channel)

    @classmethod
    def list_options(cls, w: WeightGradient) -> dict[str, Any]:
        """Return the options of all knobs."""
        _, rows, columns = w.forward.output_size
        whole_row = [round_up(columns, PIXEL_UNIT)] if columns <= max(BLOCK_Q_CHOICES) else []
        return {
            "block_m": [n for n in BLOCK_M_CHOICES if n < 2 * max(w.O, 16)],
            "block_p": [n for n in BLOCK_P_CHOICES if n < 2 * rows],
            "block_q": sorted({PIXEL_UNIT, *whole_row, *(n for n in BLOCK_Q_CHOICES if n < columns)}),
            "warps_n": WARPS_CHOICES,
            "warps_k": WARPS_CHOICES,
            "stages": STAGES_CHOICES,
            "parts": PARTS_CHOICES,
        }

    @classmethod
    def list_required(cls, w: WeightGradient) -> list[Rule]:
        """Return the conditions on every config."""
        return list_cta_limits(MAX_ACCUMULATORS, MAX_WARPS)

    @classmethod
    def list_pruned(cls, w: WeightGradient) -> list[Rule]:
        """Return the conditions on configs that are worth a search."""
        return [
            ("there are at most as many parts as tiles", lambda t: t.parts <= t.num_tiles),
            ("warps along the pixels have steps of their own", lambda t: t.warps_k * t.mma_pixels <= t.num_pixels),
            ("warps along the columns have columns of their own", lambda t: (t.warps_n - 1) * t.mmas_n * 8 < t.shape.n),
        ]

    @property
    def num_warps(self) -> Any:
        """Warps per CTA."""
        return self.warps_n * self.warps_k

    @property
    def mmas_m(self) -> Any:
        """Instructions along the filters."""
        return self.block_m // MmaSyncAtom.m

    @property
    def mmas_n(self) -> Any:
        """Instructions of a warp along (tap, channel)."""
        return ceil_div(ceil_div(self.shape.n, MmaSyncAtom.n), self.warps_n)

    @property
    def registers(self) -> Any:
        """Estimated registers per thread."""
        return self.num_accumulators + 4 * self.mmas_m + self.mmas_n + OVERHEAD_REGISTERS

    @property
    def num_blocks_m(self) -> Any:
        """CTAs along the filters."""
        return ceil_div(self.shape.m, self.block_m)

    @property
    def window(self) -> RowWindow:
        """Rows of the image below a tile."""
        return RowWindow(self.forward, self.block_p, self.block_q)

    @property
    def gradient_bytes(self) -> Any:
        """Bytes of a tile of dY in shared memory."""
        return self.num_pixels * self.block_m * self.itemsize

    @property
    def stage_bytes(self) -> Any:
        """Bytes of a stage."""
        return self.gradient_bytes + self.window.nbytes

    @property
    def smem_bytes(self) -> Any:
        """Bytes of shared memory: the stages, which the sums of warps along the pixels replace."""
        columns = self.warps_n * self.mmas_n * MmaSyncAtom.n
        sums = self.block_m * columns * ACCUMULATOR_BYTES * (self.warps_k - 1)
        return round_up(np.maximum(self.stages * self.stage_bytes, sums), VECTOR_BYTES)

    @property
    def num_blocks(self) -> Any:
        """CTAs of the grid."""
        return self.num_parts * self.num_blocks_m

    @property
    def estimated_cycles(self) -> Any:
        """Estimated latency in clock cycles of both kernels: the bottleneck of an SM, and what does not overlap."""
        warps, steps = self.num_warps, self.pixel_steps
        blocks_per_sm = ceil_div(self.num_blocks, H200.multiprocessors)
        resident = count_resident_ctas(self.smem_bytes, self.registers, warps)
        tiles = blocks_per_sm * self.iterations
        loads = VECTOR_BYTES // self.itemsize // 2  # of a fragment of B
        mmas, step_loads = self.mmas_m * self.mmas_n, 4 * self.mmas_m + (loads + 0.5) * self.mmas_n
        copies = self.gradient_bytes / VECTOR_BYTES + self.window.num_copies
        step_instructions = mmas + self.mmas_m + self.mmas_n * (1 + 2 * loads) + 12
        instructions = steps * self.warps_n * step_instructions + copies / WARP_SIZE * ITEM_INSTRUCTIONS
        steps_per_warp = ceil_div(steps, self.warps_k)
        warp_cycles = (
            TILE_CYCLES + 2 * L2_CLOCKS / self.stages + steps_per_warp * (STEP_CYCLES + 1.5 * step_instructions)
        )
        cycles = combine_overlapping(
            tiles * steps * self.warps_n * mmas * 2.0 * CLOCKS_PER_MATRIX_MULTIPLY / SCHEDULERS,
            tiles * steps * self.warps_n * step_loads,
            tiles * instructions / SCHEDULERS,
            tiles * self.stage_bytes / L2_BYTES_PER_CYCLE,
            self.iterations * warp_cycles * ceil_div(blocks_per_sm, resident),
        )
        sums = self.num_parts * self.shape.m * self.shape.n
        reduction = REDUCTION_CYCLES + 2 * ACCUMULATOR_BYTES * sums / WORKSPACE_BYTES_PER_CYCLE
        return cycles + reduction


def can_fit_registers(w: WeightGradient) -> bool:
    """Whether the sums of all taps and the rows below a tile fit a CTA."""
    return StemWgradConfig.has_config(view_gradient(w))
