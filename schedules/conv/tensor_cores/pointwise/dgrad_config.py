"""Configs of `pointwise_mma_sync`: pixels that a warp has in registers, and CTAs that share all pixels."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.arithmetic import ceil_div
from tvmconv.fitted_latency import H200_FIT
from tvmconv.target import CLOCKS_PER_MATRIX_MULTIPLY, H200, L2_CLOCKS, PORTABLE_SHARED_BYTES, SCHEDULERS, WARP_SIZE
from tvmconv.workloads import Conv
from tvmconv.workloads.conv_gradient import InputGradient
from tvmconv.workloads.dtypes import get_itemsize

from ...estimated_config import EstimatedTileConfig
from ...tile_config import Rule, combine_overlapping
from ..implicit_gemm_shape import VECTOR_BYTES, ImplicitGemmShape
from .pixel_operand import compute_pitch_bytes

OCTET = 8  # pixels of an mma, whose columns they are
MMA_M = 16  # channels of dX of an mma
GROUP_BYTES = 64  # bytes of a pixel that four lanes load at once: two steps of the reduction
FRAGMENT_BYTES = 512  # bytes of operand A of an mma
MAX_REGISTERS = 144  # of pixels and sums, per thread
OVERHEAD_REGISTERS = 40
SM_SHARED_BYTES = 227 << 10
STAGES_CHOICES = (0, 2, 3, 4, 6)
BARRIER_CYCLES = 150  # of the wait for a stage
# Instructions besides loads, products and stores: those of a tile, and of a store with its conversion and its guards.
TILE_INSTRUCTIONS, STORE_INSTRUCTIONS = 40, 7


@dataclasses.dataclass(frozen=True)
class PointwiseConfig(EstimatedTileConfig):
    """One config, or many configs as columns."""

    TILE_KNOBS = ("pixel_octets", "warps", "is_staged")
    MISSING_KNOBS: ClassVar[Mapping[str, Any]] = {"stages": 0}

    pixel_octets: Any  # octets of pixels of a warp at a time
    warps: Any  # warps per CTA
    max_ctas: Any  # maximum number of CTAs, which share all pixels
    stages: Any  # tiles of pixels of a CTA in shared memory; 0 if warps load pixels to registers

    @classmethod
    def list_options(cls, w: InputGradient) -> dict[str, Any]:
        """Return the options of all knobs."""
        return {
            "pixel_octets": (1, 2, 3, 4, 5, 6, 8),
            "warps": (2, 4, 8),
            "max_ctas": tuple(H200.multiprocessors * n for n in (1, 2, 3, 4, 6, 8, 12)),
            "stages": STAGES_CHOICES if get_itemsize(w.storage) == 2 else STAGES_CHOICES[:1],
        }

    @classmethod
    def list_required(cls, w: InputGradient) -> list[Rule]:
        """Return the conditions on every config."""
        return [
            (f"at most {MAX_REGISTERS} registers of pixels and sums", lambda t: t.num_registers <= MAX_REGISTERS),
            (
                f"at most {PORTABLE_SHARED_BYTES} bytes of shared memory, or {SM_SHARED_BYTES} with stages",
                lambda t: t.smem_bytes <= np.where(t.is_staged, SM_SHARED_BYTES, PORTABLE_SHARED_BYTES),
            ),
        ]

    @classmethod
    def list_pruned(cls, w: InputGradient) -> list[Rule]:
        """Return the conditions on configs that are worth a search."""
        return [
            (
                "there are pixels for all CTAs",
                lambda t: (t.num_blocks == t.max_ctas) | (t.max_ctas <= H200.multiprocessors),
            ),
            ("all CTAs are resident at a time", lambda t: t.num_blocks <= t.resident_ctas * H200.multiprocessors),
            ("there are at most as many stages as tiles", lambda t: t.stages <= np.maximum(t.rounds, 2)),
        ]

    @property
    def convolution(self) -> Conv:
        """The convolution of dY, of one tap."""
        conv = self.w.direct_convolution
        assert conv
        return conv

    @property
    def shape(self) -> ImplicitGemmShape:
        """Extents of the product: pixels × channels of dX, summed over channels of dY."""
        return ImplicitGemmShape.from_workload(self.convolution)

    @property
    def itemsize(self) -> int:
        """Bytes per element of dY."""
        return get_itemsize(self.w.storage)

    @property
    def k_groups(self) -> int:
        """Loads of a lane of a pixel, each for two steps of the reduction."""
        return ceil_div(self.shape.k * self.itemsize, GROUP_BYTES)

    @property
    def mmas_m(self) -> int:
        """Instructions along the channels of dX."""
        return ceil_div(self.shape.n, MMA_M)

    @property
    def vectors(self) -> list[tuple[int, int]]:
        """Vectors of neighbouring channels of dX of a lane, which it stores at once: the first rows, and the channels.

        Eight lanes have the rows of a half of an mma. The longest vectors come first; the last ones may be too many.
        """
        vector, first, vectors = math.gcd(self.shape.n, VECTOR_BYTES // self.shape.output_itemsize), 0, []
        while first < 2 * self.mmas_m:
            if vector <= 2 * self.mmas_m - first:
                vectors.append((first, vector))
                first += vector
            else:
                vector //= 2
        return vectors

    def channel(self, half: Any, lane_row: Any) -> Any:
        """Return the channel of dX of a row of an mma: `lane_row` in one of the halves of all mmas."""
        (_, length), *others = self.vectors
        previous = length
        for first, vector in others:  # each begins at a multiple of its length
            if isinstance(half, int):
                length = vector if half >= first else length
            elif vector < previous:
                length = T.Select(half >= first, vector, length)
            previous = vector
        return OCTET * half - (OCTET - 1) * (half & (length - 1)) + lane_row * length

    @property
    def num_tiles(self) -> Any:
        """Tiles of pixels of a warp."""
        return ceil_div(self.shape.m, OCTET * self.pixel_octets)

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
        return self.mmas_m * self.pixel_octets * 4

    @property
    def num_registers(self) -> Any:
        """Registers per thread for pixels and sums."""
        return np.where(self.is_staged, 1, self.k_groups) * 4 * self.pixel_octets + self.num_accumulators

    @property
    def smem_bytes(self) -> Any:
        """Bytes of shared memory: the weight, in fragments, and stages of pixels."""
        return self.filter_bytes + self.stages * self.stage_bytes

    @property
    def filter_bytes(self) -> int:
        """Bytes of the weight."""
        return 2 * self.k_groups * self.mmas_m * FRAGMENT_BYTES

    @property
    def block_pixels(self) -> Any:
        """Pixels of the tiles of all warps of a CTA."""
        return OCTET * self.pixel_octets * self.warps

    @property
    def stage_bytes(self) -> Any:
        """Bytes of a stage."""
        return self.block_pixels * compute_pitch_bytes(self.shape.k)

    @property
    def is_staged(self) -> Any:
        """Whether pixels pass through shared memory."""
        return np.greater(self.stages, 0)

    @property
    def resident_ctas(self) -> Any:
        """CTAs per SM at a time."""
        by_registers = 2048 // ((self.num_registers + OVERHEAD_REGISTERS) * self.warps)
        by_threads = H200.architecture.max_threads // (self.warps * WARP_SIZE)
        by_smem = SM_SHARED_BYTES // (self.smem_bytes + 1024)
        return np.maximum(1, np.minimum(np.minimum(by_smem, by_registers), by_threads))

    @property
    def usage_features(self) -> dict[str, Any]:
        """Further features of the usage for cost models, by name."""
        return {**super().usage_features, "live_registers": self.num_registers}

    @property
    def estimated_cycles(self) -> Any:
        """Estimated latency in clock cycles."""
        shape, fit, steps = self.shape, H200_FIT.strips, 2 * self.k_groups * self.mmas_m
        tiles = self.num_tiles / H200.multiprocessors
        bytes_per_sm = shape.m / H200.multiprocessors * (shape.k * self.itemsize + shape.n * shape.output_itemsize)
        stores = self.pixel_octets * 2 * len(self.vectors)
        instructions = (
            TILE_INSTRUCTIONS
            + steps * (1 + self.pixel_octets)
            + self.pixel_octets * self.k_groups * 3
            + stores * STORE_INSTRUCTIONS
        )
        filter_instructions = 12 * self.filter_bytes / 8 / (self.warps * WARP_SIZE)
        staged_bytes = self.is_staged * OCTET * self.pixel_octets * shape.k * self.itemsize  # of a warp's tile
        # A warp that loads pixels to registers waits for them in each round.
        wait_cycles = np.where(self.is_staged, BARRIER_CYCLES, 3 * L2_CLOCKS)
        waves = ceil_div(ceil_div(self.num_blocks, H200.multiprocessors), self.resident_ctas)
        return combine_overlapping(
            tiles * steps * self.pixel_octets * 2 * CLOCKS_PER_MATRIX_MULTIPLY,
            tiles * (steps * FRAGMENT_BYTES + 2 * staged_bytes) / 128,
            tiles * instructions / SCHEDULERS,
            bytes_per_sm / fit.l2_bytes_per_cycle,
            waves * (5 * L2_CLOCKS + filter_instructions + self.rounds * (wait_cycles + instructions)),
        )
