"""Configs of `halo_mma_sync`: tiles of pixels with the window of X below them, and warps along all axes of the product.

Each pixel of X is in shared memory once for all taps of the filter. `mma_sync` copies it once for each tap instead, and
is bound by these copies where the filter has many taps and elements have 32 bits.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from tvmconv.arithmetic import ceil_div, round_up
from tvmconv.space.factors import list_divisors
from tvmconv.target import (
    CLOCKS_PER_MATRIX_MULTIPLY,
    H200,
    L2_CLOCKS,
    MAX_REGISTERS_PER_THREAD,
    NUM_BANKS,
    SCHEDULERS,
    WARP_SIZE,
)
from tvmconv.workloads.conv_gradient import WeightGradient

from ...tile_config import Rule, combine_overlapping
from ..gemm.atoms import MmaSyncAtom
from ..gemm.padded_pixels import compute_pitch_bytes
from ..implicit_gemm_shape import ACCUMULATOR_BYTES, VECTOR_BYTES
from ..pixel_tiles import REDUCTION_CYCLES, REGISTERS_PER_SM, SM_SHARED_BYTES, PixelTileConfig, count_resident_ctas

COLUMN_UNIT = 16  # columns of two instructions, whose channels have one tap
BLOCK_M_CHOICES = (16, 32, 64, 128)
BLOCK_C_CHOICES = (16, 32, 64)
BLOCK_P_CHOICES = (1, 2, 4)
BLOCK_Q_CHOICES = (8, 16, 32, 64)
MAX_BLOCK_Q = 128
WARPS_M_CHOICES, WARPS_N_CHOICES, WARPS_K_CHOICES = (1, 2, 4), (1, 2, 3, 4, 6, 8, 9, 12), (1, 2, 4)
STAGES_CHOICES = (2, 3)
PARTS_CHOICES = (1, 2, 4, 8, 16, 33, 66, 132, 264)
MIN_WARPS, MAX_WARPS = 4, 16
MAX_ACCUMULATORS = 160
OVERHEAD_REGISTERS, DIVISION_REGISTERS = 40, 24  # the latter where the pixels of a step may lie in two rows
BANK_BYTES = NUM_BANKS * 4  # of shared memory per cycle
COPY_INSTRUCTIONS = 20  # of a copy, with its address and guards
TILE_CYCLES = 200  # of the barrier and the addresses of a tile
WORKSPACE_BYTES_PER_CYCLE = 2500  # of the second kernel, for the whole GPU
L2_BYTES_PER_CYCLE = 26  # of an SM


@dataclasses.dataclass(frozen=True)
class HaloWgradConfig(PixelTileConfig):
    """One config, or many configs as columns."""

    TILE_KNOBS = ("block_m", "block_c", "block_p", "warps_n")

    block_m: Any  # filters per CTA
    block_c: Any  # channels of X per CTA
    taps_y: Any  # rows of the filter per CTA
    warps_m: Any  # warps along the filters
    warps_n: Any  # warps along (tap, channel)

    @classmethod
    def list_options(cls, w: WeightGradient) -> dict[str, Any]:
        """Return the options of all knobs."""
        rows, columns = w.forward.output_size[-2:]
        num_columns = ceil_div(columns, MAX_BLOCK_Q)
        taps = w.kernel[-2]
        return {
            "block_m": [n for n in BLOCK_M_CHOICES if n < 2 * max(w.O // w.groups, BLOCK_M_CHOICES[0])],
            "block_c": [n for n in BLOCK_C_CHOICES if n < 2 * max(w.C // w.groups, BLOCK_C_CHOICES[0])],
            "taps_y": sorted({1, taps, *(n for n in list_divisors(taps) if n <= 4)}),
            "warps_m": WARPS_M_CHOICES,
            "warps_n": WARPS_N_CHOICES,
            "warps_k": WARPS_K_CHOICES,
            "block_p": [n for n in BLOCK_P_CHOICES if n < 2 * rows],
            "block_q": sorted({ceil_div(columns, num_columns), *(n for n in BLOCK_Q_CHOICES if n < columns)}),
            "stages": STAGES_CHOICES,
            "parts": PARTS_CHOICES,
        }

    @classmethod
    def list_required(cls, w: WeightGradient) -> list[Rule]:
        """Return the conditions on every config."""
        return [
            ("the filters of a warp are whole mma tiles", lambda t: t.block_m % (t.warps_m * MmaSyncAtom.m) == 0),
            (f"at most {MAX_ACCUMULATORS} accumulators per thread", lambda t: t.num_accumulators <= MAX_ACCUMULATORS),
            (f"at most {MAX_WARPS} warps", lambda t: t.num_warps <= MAX_WARPS),
            (f"at most {SM_SHARED_BYTES} bytes of shared memory", lambda t: t.smem_bytes <= SM_SHARED_BYTES),
            ("the registers of all threads fit", lambda t: t.registers <= count_registers_per_thread(t.num_warps)),
        ]

    @classmethod
    def list_pruned(cls, w: WeightGradient) -> list[Rule]:
        """Return the conditions on configs that are worth a search."""
        return [
            ("there are at most as many parts as tiles", lambda t: t.parts <= t.num_tiles),
            ("warps along the pixels have steps of their own", lambda t: t.warps_k <= t.pixel_steps),
            (
                "warps along the columns have columns of their own",
                lambda t: (t.warps_n - 1) * t.mmas_n * MmaSyncAtom.n < t.num_columns,
            ),
            (f"at least {MIN_WARPS} warps", lambda t: t.num_warps >= MIN_WARPS),
        ]

    @property
    def channels(self) -> int:
        """Channels of X of a group."""
        return self.w.C // self.w.groups

    @property
    def num_warps(self) -> Any:
        """Warps per CTA."""
        return self.warps_m * self.warps_n * self.warps_k

    @property
    def mmas_m(self) -> Any:
        """Instructions of a warp along the filters."""
        return ceil_div(self.block_m, MmaSyncAtom.m * self.warps_m)

    @property
    def num_columns(self) -> Any:
        """Columns (tap, channel) of a CTA."""
        return self.taps_y * self.w.kernel[-1] * self.block_c

    @property
    def mmas_n(self) -> Any:
        """Instructions of a warp along the columns."""
        num_units = self.num_columns // (self.unit_mmas * MmaSyncAtom.n)
        return self.unit_mmas * ceil_div(num_units, self.warps_n)

    @property
    def unit_mmas(self) -> int:
        """Instructions along the columns whose operands B a lane loads at once: an `ldmatrix` has those of two."""
        return 1 if self.itemsize == ACCUMULATOR_BYTES else 2

    @property
    def registers(self) -> Any:
        """Estimated registers per thread."""
        fragments = MmaSyncAtom.a_registers * self.mmas_m + 2 * MmaSyncAtom.b_registers
        overhead = OVERHEAD_REGISTERS + (self.block_q % self.mma_pixels > 0) * DIVISION_REGISTERS
        return self.num_accumulators + fragments + self.mmas_n // self.unit_mmas + overhead

    @property
    def blocks_m(self) -> Any:
        """CTAs along the filters of a group."""
        return ceil_div(self.shape.m, self.block_m)

    @property
    def blocks_c(self) -> Any:
        """CTAs along the channels of a group."""
        return ceil_div(self.channels, self.block_c)

    @property
    def row_blocks(self) -> Any:
        """CTAs along the rows of the filter."""
        return ceil_div(self.w.kernel[-2], self.taps_y)

    @property
    def blocks_taps(self) -> Any:
        """CTAs along planes and rows of the filter."""
        return math.prod(self.w.kernel[:-2]) * self.row_blocks

    @property
    def num_products(self) -> Any:
        """CTAs that compute different sums."""
        return self.w.groups * self.blocks_m * self.blocks_c * self.blocks_taps

    @property
    def num_blocks(self) -> Any:
        """CTAs of the grid."""
        return self.num_parts * self.num_products

    @property
    def window(self) -> tuple[Any, Any]:
        """Rows and columns of X below the taps of a tile."""
        (stride_y, stride_x), (dilation_y, _) = self.forward.stride[-2:], self.forward.dilation[-2:]
        rows = (self.block_p - 1) * stride_y + (self.taps_y - 1) * dilation_y + 1
        return rows, (self.block_q - 1) * stride_x + self.forward.window[-1]

    @property
    def gradient_bytes(self) -> Any:
        """Bytes of a tile of dY in shared memory, with zeros behind its last pixel."""
        return self.pixel_steps * self.mma_pixels * compute_pitch_bytes(self.block_m, self.itemsize)

    @property
    def input_bytes(self) -> Any:
        """Bytes of a window of X in shared memory."""
        return math.prod(self.window) * compute_pitch_bytes(self.block_c, self.itemsize)

    @property
    def stage_bytes(self) -> Any:
        """Bytes of a stage."""
        return self.gradient_bytes + self.input_bytes

    @property
    def smem_bytes(self) -> Any:
        """Bytes of shared memory: the stages, which the sums of warps along the pixels replace."""
        threads = self.warps_m * self.warps_n * WARP_SIZE
        sums = threads * self.num_accumulators * ACCUMULATOR_BYTES * (self.warps_k - 1)
        return round_up(np.maximum(self.stages * self.stage_bytes, sums), VECTOR_BYTES)

    @property
    def estimated_cycles(self) -> Any:
        """Estimated latency in clock cycles of both kernels: the bottleneck of an SM, and what does not overlap."""
        warps, steps = self.num_warps, self.pixel_steps
        blocks_per_sm = ceil_div(self.num_blocks, H200.multiprocessors)
        resident = count_resident_ctas(self.smem_bytes, self.registers, warps)
        tiles, mmas, output_warps = blocks_per_sm * self.iterations, self.mmas_m * self.mmas_n, warps // self.warps_k
        conflicts = 1 + (self.itemsize == ACCUMULATOR_BYTES and self.forward.stride[-1] % 2 == 0)
        loads = MmaSyncAtom.a_registers * self.mmas_m + conflicts * MmaSyncAtom.b_registers * self.mmas_n
        step_instructions = mmas + 2 * self.mmas_m + 1.5 * self.mmas_n + 24
        copies = self.stage_bytes / VECTOR_BYTES / WARP_SIZE * COPY_INSTRUCTIONS
        steps_per_warp = ceil_div(steps, self.warps_k)
        warp_cycles = TILE_CYCLES + 2 * L2_CLOCKS / self.stages + steps_per_warp * (40 + 1.5 * step_instructions)
        cycles = combine_overlapping(
            tiles * steps_per_warp * warps * mmas * 2.0 * CLOCKS_PER_MATRIX_MULTIPLY / SCHEDULERS,
            tiles * (steps * output_warps * loads + self.stage_bytes / BANK_BYTES),
            tiles * (steps * output_warps * step_instructions + copies) / SCHEDULERS,
            tiles * self.stage_bytes / L2_BYTES_PER_CYCLE,
            self.iterations * warp_cycles * ceil_div(blocks_per_sm, resident),
        )
        sums = self.num_parts * self.shape.groups * self.shape.m * self.shape.n
        return cycles + REDUCTION_CYCLES + 2 * ACCUMULATOR_BYTES * sums / WORKSPACE_BYTES_PER_CYCLE


def count_registers_per_thread(num_warps: Any) -> Any:
    """Return the maximum number of registers per thread of a CTA, whose warps the partitions of an SM divide."""
    warps_per_partition = ceil_div(num_warps, SCHEDULERS)
    registers = REGISTERS_PER_SM // (SCHEDULERS * WARP_SIZE) // warps_per_partition // 8 * 8
    return np.minimum(MAX_REGISTERS_PER_THREAD, registers)
