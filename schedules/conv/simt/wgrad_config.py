"""Configs of `simt`: tiles of filters × (tap, channel), and CTAs that share the pixels."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tvmconv.arithmetic import ceil_div
from tvmconv.target import H200, L2_CLOCKS, MAX_REGISTERS_PER_THREAD, SCHEDULERS, WARP_SIZE
from tvmconv.workloads.conv_gradient import WeightGradient

from ..estimated_config import EstimatedTileConfig
from ..tensor_cores.gemm.fma_mainloop import FmaAtom
from ..tensor_cores.implicit_gemm_shape import ACCUMULATOR_BYTES, VECTOR_BYTES, ImplicitGemmShape
from ..tensor_cores.pixel_tiles import REDUCTION_CYCLES, REGISTERS_PER_SM, SM_SHARED_BYTES, count_resident_ctas
from ..tensor_cores.wgrad_sums import make_wgrad_shape
from ..tile_config import Rule, combine_overlapping

FMA_M, FMA_N = FmaAtom.m, FmaAtom.n
BLOCK_CHOICES = (16, 32, 64, 128, 256)
BLOCK_K_CHOICES = (8, 16)
WARPS_CHOICES = (1, 2, 4)
STAGES_CHOICES = (3, 4)
PARTS_CHOICES = (1, 2, 3, 4, 6, 8, 11, 16, 22, 33, 44, 66, 88, 132, 264, 528)
MAX_ACCUMULATORS, OVERHEAD_REGISTERS = 128, 40
COPY_INSTRUCTIONS = 16  # of a copy, with its address and guards
TILE_CYCLES = 120  # of the barrier and the addresses of a tile
WORKSPACE_BYTES_PER_CYCLE = 2500  # of the second kernel, for the whole GPU
L2_BYTES_PER_CYCLE = 26  # of an SM


def has_enough_channels(w: WeightGradient) -> bool:
    """Return whether a group fills the pairs of rows and columns of a warp."""
    return w.O // w.groups >= FMA_M and w.C // w.groups >= FMA_N


@dataclasses.dataclass(frozen=True)
class SimtConfig(EstimatedTileConfig):
    """One config, or many configs as columns."""

    TILE_KNOBS = ("block_m", "block_n", "parts")

    block_m: Any  # filters per CTA
    block_n: Any  # columns per CTA
    block_k: Any  # pixels per stage
    warps_m: Any  # warps along the filters
    warps_n: Any  # warps along the columns
    stages: Any  # stages in shared memory
    parts: Any  # CTAs that share the pixels

    @classmethod
    def list_options(cls, w: WeightGradient) -> dict[str, Any]:
        """Return the options of all knobs."""
        return {
            "block_m": BLOCK_CHOICES,
            "block_n": BLOCK_CHOICES,
            "block_k": BLOCK_K_CHOICES,
            "warps_m": WARPS_CHOICES,
            "warps_n": WARPS_CHOICES,
            "stages": STAGES_CHOICES,
            "parts": PARTS_CHOICES,
        }

    @classmethod
    def list_required(cls, w: WeightGradient) -> list[Rule]:
        """Return the conditions on every config."""
        return [
            (
                f"the rows and columns of a warp are multiples of {FMA_M} and {FMA_N}",
                lambda t: (t.block_m % (t.warps_m * FMA_M) == 0) & (t.block_n % (t.warps_n * FMA_N) == 0),
            ),
            (f"at most {MAX_ACCUMULATORS} accumulators per thread", lambda t: t.num_accumulators <= MAX_ACCUMULATORS),
            (
                "the threads copy whole rows at a time",
                lambda t: t.num_threads * VECTOR_BYTES >= np.maximum(t.block_m, t.block_n) * ACCUMULATOR_BYTES,
            ),
            ("each part of the reduction has a k-tile", lambda t: (t.parts - 1) * t.k_tiles_per_part < t.total_k_tiles),
            (f"at most {SM_SHARED_BYTES} bytes of shared memory", lambda t: t.smem_bytes <= SM_SHARED_BYTES),
            (
                "the registers of all threads fit",
                lambda t: t.registers * t.num_threads <= REGISTERS_PER_SM,
            ),
            ("a thread has at most 255 registers", lambda t: t.registers <= MAX_REGISTERS_PER_THREAD),
        ]

    @classmethod
    def list_pruned(cls, w: WeightGradient) -> list[Rule]:
        """Return the conditions on configs that are worth a search."""
        shape = make_wgrad_shape(w)
        return [
            (
                "tiles are less than twice as large as the product",
                lambda t: (t.block_m < 2 * max(shape.m, FMA_M)) & (t.block_n < 2 * max(shape.n, FMA_N)),
            ),
            ("at least 4 warps", lambda t: t.num_warps >= SCHEDULERS),
        ]

    @property
    def shape(self) -> ImplicitGemmShape:
        """Extents of the product: filters × (tap, channel), summed over pixels."""
        return make_wgrad_shape(self.w)

    @property
    def num_warps(self) -> Any:
        """Warps per CTA."""
        return self.warps_m * self.warps_n

    @property
    def fmas_m(self) -> Any:
        """Groups of rows of a warp."""
        return self.block_m // (self.warps_m * FMA_M)

    @property
    def fmas_n(self) -> Any:
        """Groups of columns of a warp."""
        return self.block_n // (self.warps_n * FMA_N)

    @property
    def num_tiles(self) -> Any:
        """CTAs that compute different sums."""
        shape = self.shape
        return shape.groups * ceil_div(shape.m, self.block_m) * ceil_div(shape.n, self.block_n)

    @property
    def num_parts(self) -> Any:
        """Parts of the reduction."""
        return self.parts

    @property
    def num_blocks(self) -> Any:
        """CTAs of the grid."""
        return self.num_tiles * self.parts

    @property
    def total_k_tiles(self) -> Any:
        """Tiles of pixels of the whole reduction."""
        return ceil_div(self.shape.k, self.block_k)

    @property
    def k_tiles_per_part(self) -> Any:
        """Tiles of pixels of a CTA."""
        return ceil_div(self.total_k_tiles, self.parts)

    @property
    def num_accumulators(self) -> Any:
        """Accumulator registers per thread."""
        return 4 * self.fmas_m * self.fmas_n

    @property
    def registers(self) -> Any:
        """Estimated registers per thread, with two sets of fragments."""
        return self.num_accumulators + 4 * (self.fmas_m + self.fmas_n) + OVERHEAD_REGISTERS

    @property
    def smem_bytes(self) -> Any:
        """Bytes of shared memory."""
        return self.stages * (self.block_m + self.block_n) * self.block_k * ACCUMULATOR_BYTES

    @property
    def usage_features(self) -> dict[str, Any]:
        """Further features of the usage for cost models, by name."""
        return {**super().usage_features, "live_registers": self.registers, "steps": self.k_tiles_per_part}

    @property
    def estimated_cycles(self) -> Any:
        """Estimated latency in clock cycles of both kernels: the bottleneck of an SM, and what does not overlap."""
        blocks_per_sm = ceil_div(self.num_blocks, H200.multiprocessors)
        resident = count_resident_ctas(self.smem_bytes, self.registers, self.num_warps)
        pixels = self.k_tiles_per_part * self.block_k
        fmas, loads = 4 * self.fmas_m * self.fmas_n, self.fmas_m + self.fmas_n
        copies = (self.block_m + self.block_n) * ACCUMULATOR_BYTES / VECTOR_BYTES / WARP_SIZE  # per pixel
        warp_pixels = blocks_per_sm * self.num_warps * pixels
        instructions = warp_pixels * (fmas + loads) + blocks_per_sm * pixels * copies * COPY_INSTRUCTIONS
        # A k-tile of a warp alone, whose next pixels' loads overlap with multiply-adds.
        tile_cycles = TILE_CYCLES + L2_CLOCKS / self.stages + self.block_k * (fmas + 2 * loads)
        cycles = combine_overlapping(
            instructions / SCHEDULERS,
            warp_pixels * loads * 1.5,
            blocks_per_sm * pixels * (self.block_m + self.block_n) * ACCUMULATOR_BYTES / L2_BYTES_PER_CYCLE,
            self.k_tiles_per_part * tile_cycles * ceil_div(blocks_per_sm, resident),
        )
        sums = self.parts * self.shape.groups * self.shape.m * self.shape.n
        return cycles + REDUCTION_CYCLES + 2 * ACCUMULATOR_BYTES * sums / WORKSPACE_BYTES_PER_CYCLE
