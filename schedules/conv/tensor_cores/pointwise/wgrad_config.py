"""Configs of `pointwise_mma_sync` for gradients of weights: warps that divide all sums, CTAs that share the pixels."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tvmconv.arithmetic import ceil_div, round_up
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

from ...estimated_config import EstimatedTileConfig
from ...tile_config import Rule, combine_overlapping
from ..gemm.atoms import MmaSyncAtom
from ..implicit_gemm_shape import ACCUMULATOR_BYTES, VECTOR_BYTES, ImplicitGemmShape
from ..pixel_tiles import REDUCTION_CYCLES, count_resident_ctas, list_cta_limits
from ..wgrad_sums import make_wgrad_shape
from .pixel_operand import OCTET, compute_pitch_bytes

MMA_PIXELS = 16  # pixels of an mma
BLOCKS_CHOICES = (1, 2, 3, 4)
BLOCK_K_CHOICES = (16, 32, 64, 128)
WARPS_CHOICES = (1, 2, 3, 4, 5, 6, 8)
WARPS_K_CHOICES = (1, 2, 4, 8)
STAGES_CHOICES = (2, 3, 4, 6, 8)
PARTS_CHOICES = (16, 33, 44, 66, 88, 132, 264, 396, 528)
MAX_ACCUMULATORS, MAX_WARPS = 192, 16
OVERHEAD_REGISTERS = 36  # per thread, besides sums and fragments
BANK_BYTES = NUM_BANKS * 4  # of shared memory per cycle
COPY_INSTRUCTIONS = 8  # of the copy of 16 bytes, with its address
TILE_CYCLES = 120  # of the barrier and the addresses of a tile
MEMORY_CYCLES = 1500  # from the start of a copy to its end, while the memory is busy
MEMORY_BYTES_PER_CYCLE, L2_BYTES_PER_CYCLE = 20, 26  # of an SM
WORKSPACE_BYTES_PER_CYCLE = 1450  # of both kernels, for the whole GPU


@dataclasses.dataclass(frozen=True)
class PointwiseWgradConfig(EstimatedTileConfig):
    """One config, or many configs as columns."""

    TILE_KNOBS = ("blocks_m", "blocks_n")

    w: WeightGradient
    blocks_m: Any  # CTAs that divide the filters
    blocks_n: Any  # CTAs that divide the channels
    block_k: Any  # pixels of a stage
    warps_m: Any  # warps along the filters
    warps_n: Any  # warps along the channels
    warps_k: Any  # warps along the pixels of a stage
    stages: Any  # stages in shared memory
    parts: Any  # CTAs that share the pixels

    @classmethod
    def list_options(cls, w: WeightGradient) -> dict[str, Any]:
        """Return the options of all knobs."""
        rows, columns = (ceil_div(extent, size) for extent, size in ((w.O, MmaSyncAtom.m), (w.C, MmaSyncAtom.n)))
        return {
            "blocks_m": [n for n in BLOCKS_CHOICES if n <= rows],
            "blocks_n": [n for n in BLOCKS_CHOICES if n <= columns],
            "block_k": BLOCK_K_CHOICES,
            "warps_m": [n for n in WARPS_CHOICES if n <= rows],
            "warps_n": [n for n in WARPS_CHOICES if n <= columns],
            "warps_k": WARPS_K_CHOICES,
            "stages": STAGES_CHOICES,
            "parts": PARTS_CHOICES,
        }

    @classmethod
    def list_required(cls, w: WeightGradient) -> list[Rule]:
        """Return the conditions on every config."""
        return [
            (
                "each CTA has sums that exist",
                lambda t: ((t.blocks_m - 1) * t.block_m < w.O) & ((t.blocks_n - 1) * t.block_n < w.C),
            ),
            ("warps along the pixels have pixels of their own", lambda t: t.block_k % (t.warps_k * MMA_PIXELS) == 0),
            ("a thread has at most 255 registers", lambda t: t.registers <= MAX_REGISTERS_PER_THREAD),
            *list_cta_limits(MAX_ACCUMULATORS, MAX_WARPS),
        ]

    @classmethod
    def list_pruned(cls, w: WeightGradient) -> list[Rule]:
        """Return the conditions on configs that are worth a search."""
        fewest, max_tiles = PARTS_CHOICES[0], ceil_div(make_wgrad_shape(w).k, BLOCK_K_CHOICES[0])
        return [
            (
                "there are at most as many parts as tiles of pixels",
                lambda t: (t.parts <= t.num_tiles) | ((max_tiles < fewest) & (t.parts == fewest)),
            ),
            (
                "each warp has sums that exist",
                lambda t: (
                    ((t.warps_m - 1) * t.mmas_m * MmaSyncAtom.m < t.block_m)
                    & ((t.warps_n - 1) * t.mmas_n * MmaSyncAtom.n < t.block_n)
                ),
            ),
            (f"at least {SCHEDULERS} warps", lambda t: t.num_warps >= SCHEDULERS),
            ("all CTAs are resident at a time", lambda t: t.num_blocks <= t.resident_ctas * H200.multiprocessors),
        ]

    @property
    def shape(self) -> ImplicitGemmShape:
        """Extents of the product: filters × channels, summed over pixels."""
        return make_wgrad_shape(self.w)

    @property
    def block_m(self) -> Any:
        """Filters of a CTA."""
        return ceil_div(self.shape.m // OCTET, self.blocks_m) * OCTET

    @property
    def block_n(self) -> Any:
        """Channels of a CTA."""
        return ceil_div(self.shape.n // OCTET, self.blocks_n) * OCTET

    @property
    def mmas_m(self) -> Any:
        """Instructions of a warp along the filters."""
        return ceil_div(ceil_div(self.block_m, MmaSyncAtom.m), self.warps_m)

    @property
    def mmas_n(self) -> Any:
        """Instructions of a warp along the channels."""
        return ceil_div(ceil_div(self.block_n, MmaSyncAtom.n), self.warps_n)

    @property
    def num_warps(self) -> Any:
        """Warps per CTA."""
        return self.warps_m * self.warps_n * self.warps_k

    @property
    def num_tiles(self) -> Any:
        """Tiles of pixels of the batch."""
        return ceil_div(self.shape.k, self.block_k)

    @property
    def num_parts(self) -> Any:
        """CTAs that share the pixels and have a tile."""
        return np.minimum(self.parts, self.num_tiles)

    @property
    def num_blocks(self) -> Any:
        """CTAs of the grid."""
        return self.num_parts * self.blocks_m * self.blocks_n

    @property
    def iterations(self) -> Any:
        """Tiles of a CTA."""
        return ceil_div(self.num_tiles, self.num_parts)

    @property
    def steps(self) -> Any:
        """Steps of a warp in a tile, of 16 pixels each."""
        return self.block_k // (self.warps_k * MMA_PIXELS)

    @property
    def num_accumulators(self) -> Any:
        """Accumulator registers per thread."""
        return self.mmas_m * self.mmas_n * MmaSyncAtom.num_accumulators

    @property
    def registers(self) -> Any:
        """Estimated registers per thread."""
        fragments = MmaSyncAtom.a_registers * self.mmas_m + 4 * MmaSyncAtom.b_registers
        return self.num_accumulators + fragments + OVERHEAD_REGISTERS

    @property
    def gradient_bytes(self) -> Any:
        """Bytes of dY of a stage."""
        return self.block_k * compute_pitch_bytes(self.block_m)

    @property
    def stage_bytes(self) -> Any:
        """Bytes of dY and X of a stage."""
        return self.gradient_bytes + self.block_k * compute_pitch_bytes(self.block_n)

    @property
    def smem_bytes(self) -> Any:
        """Bytes of shared memory: the stages, which the sums of warps along the pixels replace."""
        sums = (self.warps_k > 1) * self.num_warps * WARP_SIZE * self.num_accumulators * ACCUMULATOR_BYTES
        return round_up(np.maximum(self.stages * self.stage_bytes, sums), VECTOR_BYTES)

    @property
    def resident_ctas(self) -> Any:
        """CTAs per SM at a time."""
        return count_resident_ctas(self.smem_bytes, self.registers, self.num_warps)

    @property
    def usage_features(self) -> dict[str, Any]:
        """Further features of the usage for cost models, by name."""
        return {**super().usage_features, "live_registers": self.registers, "steps": self.iterations}

    @property
    def estimated_cycles(self) -> Any:
        """Estimated latency in clock cycles of both kernels."""
        shape, warps = self.shape, self.num_warps
        blocks_per_sm = ceil_div(self.num_blocks, H200.multiprocessors)
        tiles, mmas = blocks_per_sm * self.iterations, self.mmas_m * self.mmas_n
        copied_bytes = self.block_k * (self.block_m + self.block_n) * shape.itemsize
        pixel_steps = self.block_k // MMA_PIXELS * self.warps_m * self.warps_n  # of all warps in a tile
        loads = self.mmas_m + ceil_div(self.mmas_n, 2)
        copies = copied_bytes / VECTOR_BYTES / WARP_SIZE * COPY_INSTRUCTIONS
        in_flight = np.minimum(blocks_per_sm, self.resident_ctas) * (self.stages - 1.5) * self.stage_bytes
        waves = ceil_div(blocks_per_sm, self.resident_ctas)
        resident_warps = np.minimum(blocks_per_sm, self.resident_ctas) * warps
        imbalance = ceil_div(resident_warps, SCHEDULERS) * SCHEDULERS / resident_warps
        cycles = combine_overlapping(
            tiles * pixel_steps * mmas * CLOCKS_PER_MATRIX_MULTIPLY * imbalance,
            tiles * (pixel_steps * loads * 4 + copied_bytes / BANK_BYTES),
            tiles * (pixel_steps * (mmas + loads + 8) + copies) / SCHEDULERS,
            shape.k * (shape.m + shape.n) * shape.itemsize / H200.multiprocessors / MEMORY_BYTES_PER_CYCLE,
            tiles * copied_bytes / np.minimum(L2_BYTES_PER_CYCLE, in_flight / MEMORY_CYCLES),
            waves * self.iterations * (TILE_CYCLES + self.steps * (40 + 4 * mmas)),
        )
        slices = (self.warps_k > 1) * 2 * blocks_per_sm * warps * self.num_accumulators  # through shared memory
        sums = self.num_parts * shape.m * shape.n
        reduction = REDUCTION_CYCLES + 2 * ACCUMULATOR_BYTES * sums / WORKSPACE_BYTES_PER_CYCLE
        return cycles + slices + waves * 4 * L2_CLOCKS + reduction
