"""Tiles of pixels that CTAs share in a wgrad: their config, and the loop of a CTA over its tiles.

The reduction of a wgrad runs over pixels. `parts` CTAs share the tiles of dY, and multiply each by the window of X
below it. The warps of a CTA may also share the pixels of a tile; their sums are added in shared memory at the end.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from tvmconv.arithmetic import ceil_div
from tvmconv.target import WARP_SIZE
from tvmconv.workloads import Conv
from tvmconv.workloads.conv_gradient import WeightGradient
from tvmconv.workloads.dtypes import ACCUMULATOR, get_itemsize

from ...tir_builder import Buffer, Expr, Register, allocate, fill_zeros, if_, serial_loop, to_uint32
from ..estimated_config import EstimatedTileConfig
from ..tile_config import Rule
from .gemm.atoms import MmaSyncAtom
from .gemm.mma_sync_mainloop import WarpTiling, reduce_sliced_k
from .gemm.pipelines import CpAsyncPipeline
from .implicit_gemm_shape import ImplicitGemmShape
from .wgrad_sums import make_wgrad_shape

REGISTERS_PER_SM = 65536
SM_SHARED_BYTES = 227 << 10
REDUCTION_CYCLES = 2500  # of the second kernel


def count_resident_ctas(smem_bytes: Any, registers: Any, num_warps: Any) -> Any:
    """Return the number of CTAs that an SM of an H100 holds at a time, at least 1."""
    resident = np.minimum(
        SM_SHARED_BYTES // (smem_bytes + 1024), REGISTERS_PER_SM // (registers * WARP_SIZE * num_warps)
    )
    return np.clip(np.minimum(resident, 64 // num_warps), 1, None)


def list_cta_limits(max_accumulators: int, max_warps: int) -> list[Rule]:
    """Return the conditions under which the registers and the shared memory of a CTA fit an SM."""
    return [
        (f"at most {max_accumulators} accumulators per thread", lambda t: t.num_accumulators <= max_accumulators),
        (f"at most {max_warps} warps", lambda t: t.num_warps <= max_warps),
        (f"at most {SM_SHARED_BYTES} bytes of shared memory", lambda t: t.smem_bytes <= SM_SHARED_BYTES),
        ("the registers of all threads fit", lambda t: t.registers * t.num_threads <= REGISTERS_PER_SM),
    ]


@dataclass(frozen=True)
class PixelTileConfig(EstimatedTileConfig):
    """One config, or many configs as columns."""

    w: WeightGradient
    warps_k: Any  # warps along the pixels of a tile
    block_p: Any  # output rows per tile
    block_q: Any  # output columns per tile
    stages: Any  # tiles in shared memory
    parts: Any  # CTAs that share the pixels

    @property
    @abstractmethod
    def mmas_m(self) -> Any:
        """Instructions of a warp along the filters."""

    @property
    @abstractmethod
    def mmas_n(self) -> Any:
        """Instructions of a warp along (tap, channel)."""

    @property
    @abstractmethod
    def stage_bytes(self) -> Any:
        """Bytes of a tile of dY and of the window of X in shared memory."""

    @property
    def forward(self) -> Conv:
        """The forward convolution."""
        return self.w.forward

    @property
    def shape(self) -> ImplicitGemmShape:
        """The product."""
        return make_wgrad_shape(self.w)

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return get_itemsize(self.w.storage)

    @property
    def mma_pixels(self) -> int:
        """Pixels of an mma."""
        return MmaSyncAtom.k_bytes // self.itemsize

    @property
    def num_accumulators(self) -> Any:
        """Accumulator registers per thread."""
        return self.mmas_m * self.mmas_n * MmaSyncAtom.num_accumulators

    @property
    def num_pixels(self) -> Any:
        """Pixels per tile."""
        return self.block_p * self.block_q

    @property
    def pixel_steps(self) -> Any:
        """Steps of the reduction over a tile."""
        return ceil_div(self.num_pixels, self.mma_pixels)

    @property
    def pixel_tiles(self) -> tuple[Any, Any]:
        """Numbers of tiles of an output plane along rows and columns."""
        rows, columns = self.forward.output_size[-2:]
        return ceil_div(rows, self.block_p), ceil_div(columns, self.block_q)

    @property
    def num_tiles(self) -> Any:
        """Tiles of the batch."""
        return self.forward.N * math.prod(self.forward.output_size[:-2]) * math.prod(self.pixel_tiles)

    @property
    def iterations(self) -> Any:
        """Tiles of a CTA."""
        return ceil_div(self.num_tiles, self.parts)

    @property
    def num_parts(self) -> Any:
        """Parts of the pixels that are not empty."""
        return ceil_div(self.num_tiles, self.iterations)


@dataclass(frozen=True)
class PixelTiles:
    """The tiles of a CTA, which pass through stages in shared memory, and the sums of a thread."""

    config: PixelTileConfig
    part: Expr  # part of the pixels
    smem: Expr  # shared-memory address of the first stage
    tiling: WarpTiling
    pipeline: CpAsyncPipeline
    accumulators: Buffer

    @classmethod
    def allocate(cls, config: PixelTileConfig, part: Expr, smem: Expr, tiling: WarpTiling) -> PixelTiles:
        """Return the tiles of a part, with registers for the sums."""
        pipeline = CpAsyncPipeline(config.stages)
        return cls(config, part, smem, tiling, pipeline, allocate("accumulators", tiling.num_accumulators, ACCUMULATOR))

    def is_valid(self, iteration: Expr) -> Expr:
        """Return whether the CTA has a tile in an iteration."""
        iterations, num_tiles = int(self.config.iterations), int(self.config.num_tiles)
        is_exact = int(self.config.num_parts) * iterations == num_tiles
        return True if is_exact else self.part * iterations + iteration < num_tiles

    def stage(self, index: Expr) -> Expr:
        """Return the shared-memory address of a stage."""
        return self.smem + to_uint32(index * int(self.config.stage_bytes))

    def locate(self, iteration: Expr) -> tuple[Expr, Expr, Expr]:
        """Return the output plane, counted over all images, and the first row and column of a tile of the CTA."""
        tiles_p, tiles_q = map(int, self.config.pixel_tiles)
        number = Register("tile", value=self.part * int(self.config.iterations) + iteration).value
        row, column = number // tiles_q % tiles_p * self.config.block_p, number % tiles_q * self.config.block_q
        return number // (tiles_q * tiles_p), row, column

    def multiply(self, copy: Callable[[Expr, Expr], None], multiply: Callable[[Expr], None]) -> None:
        """Multiply all tiles, and add up the sums of the warps along the pixels.

        `copy` starts the copies of the tile of an iteration to a stage, and `multiply` multiplies the tile in a stage.
        """
        iterations = int(self.config.iterations)
        self.pipeline.fill(iterations, copy)
        fill_zeros(self.accumulators, self.tiling.num_accumulators)
        self.pipeline.run(iterations, copy, multiply, self.is_valid)
        if self.tiling.warps_k > 1:
            reduce_sliced_k(self.accumulators, self.tiling, self.smem)

    @contextmanager
    def steps_loop(self) -> Iterator[Expr]:
        """Open the loop of a warp over its steps of a tile."""
        steps, warps = int(self.config.pixel_steps), self.config.warps_k
        rounds = ceil_div(steps, warps)
        with serial_loop(rounds, "step") as i:
            step = i * warps + self.tiling.warp_k
            with if_(True if rounds * warps == steps else step < steps):
                yield step
