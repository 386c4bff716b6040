"""Configs of `halo_hopper`: tiles of halo rows × filters, and the stages of both in shared memory."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from tvmconv.arithmetic import ceil_div, round_up
from tvmconv.target import (
    H200,
    MAX_REGISTERS_PER_THREAD,
    REGISTERS_PER_MULTIPROCESSOR,
    WARP_SIZE,
    WARPGROUP_SIZE,
)
from tvmconv.tensor_map import MAX_PIXELS
from tvmconv.workloads import Conv, epilogue
from tvmconv.workloads.dtypes import get_itemsize

from ...estimated_config import EstimatedTileConfig
from ...tile_config import Rule
from ..gemm.halo_pixels import HaloPixels
from ..implicit_gemm_shape import ACCUMULATOR_BYTES
from ..latency_model import count_ctas_per_sm
from .constraints import MAX_ACCUMULATORS, MAX_SHARED_BYTES
from .tile_config import (
    BARRIER_BYTES,
    MAX_ACTIVE_CTAS,
    MAX_EPILOGUE_ROW_BYTES,
    MIN_SWIZZLE_BYTES,
    OVERHEAD_REGISTERS,
    SWIZZLE_ALIGNMENT_BYTES,
    WGMMA_M,
)

if TYPE_CHECKING:
    from typing_extensions import Self

NUM_LOADER_WARPS = 2  # the first loads filters, the second one pixels
# Rates of an SM per clock, approximately, of an H200: multiply-adds of 16 bits, shared-memory bytes that wgmma reads,
# bytes that TMA copies from L2 while all SMs do, and its share of the global memory's bandwidth.
MACS_PER_CLOCK, SMEM_BYTES_PER_CLOCK, COPIED_BYTES_PER_CLOCK, MEMORY_BYTES_PER_CLOCK = 2048, 128, 32, 16
EPILOGUE_CYCLES, START_CYCLES = 700, 3000  # of the stores of a wgmma's tile per 128 columns, and of a launch


@dataclass(frozen=True)
class HaloConfig(EstimatedTileConfig):
    """One config, or many configs as columns."""

    TILE_KNOBS: ClassVar[tuple[str, ...]] = ("warpgroups", "wgmma_m_tiles", "block_n", "cluster_m")

    w: Conv
    warpgroups: Any  # warpgroups that multiply, 64 × `wgmma_m_tiles` halo rows each
    wgmma_m_tiles: Any  # wgmmas of a warpgroup along the halo rows
    block_n: Any  # filters of a tile
    block_k_bytes: Any  # bytes of a block of channels
    halo_stages: Any  # blocks of channels of halo rows in shared memory
    stages: Any  # filters of a tap and a block of channels in shared memory
    cluster_m: Any  # CTAs that share the loads of filters

    @classmethod
    def list_options(cls, w: Conv) -> Mapping[str, Sequence[Any]]:
        """Return the options of all knobs."""
        columns = round_up(w.O, MIN_SWIZZLE_BYTES // get_itemsize(w.storage))
        channel_bytes = w.C * get_itemsize(w.storage)
        return {
            "warpgroups": (1, 2, 3),
            "wgmma_m_tiles": (1, 2),
            "block_n": [n for n in (32, 48, 64, 80, 96, 128, 160, 192, 256) if n <= columns] or [columns],
            "block_k_bytes": [n for n in (32, 64, 128) if n <= max(channel_bytes, 32)],
            "halo_stages": (1, 2, 3),
            "stages": (2, 3, 4, 6),
            "cluster_m": (1, 2),
        }

    @classmethod
    def list_required(cls, w: Conv) -> list[Rule]:
        """Return the conditions on every config."""
        return [
            (f"at most {MAX_ACCUMULATORS} accumulators per thread", lambda t: t.num_accumulators <= MAX_ACCUMULATORS),
            (
                "the registers of all threads fit",
                lambda t: (
                    (t.registers <= MAX_REGISTERS_PER_THREAD)
                    & (t.registers * t.num_threads <= REGISTERS_PER_MULTIPROCESSOR)
                ),
            ),
            (f"a copy has at most {MAX_PIXELS} halo rows", lambda t: t.plane_rows <= MAX_PIXELS),
            (
                "the CTAs of a cluster load equal parts of the filters, whole swizzle atoms",
                lambda t: t.block_n % (8 * t.cluster_m) == 0,
            ),
            (f"at most {MAX_SHARED_BYTES} bytes of shared memory", lambda t: t.smem_bytes <= MAX_SHARED_BYTES),
        ]

    @classmethod
    def list_pruned(cls, w: Conv) -> list[Rule]:
        """Return the conditions on configs that are worth a search."""
        return [
            ("halo rows are loaded ahead", lambda t: (t.halo_stages > 1) | (t.ctas_per_sm > 1)),
            ("clusters have several tiles", lambda t: (t.cluster_m == 1) | (t.num_tiles >= H200.multiprocessors)),
        ]

    @classmethod
    @functools.lru_cache(maxsize=64)
    def list_legal(cls, w: Conv) -> tuple[Self, Any]:
        """Return all configs, and which of them meet the required rules."""
        configs = cls.from_options(cls.list_options(w), w=w)
        return configs, functools.reduce(np.logical_and, [predicate(configs) for _, predicate in cls.list_required(w)])

    @property
    def image(self) -> HaloPixels:
        """The halo rows."""
        return HaloPixels(self.w)

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return get_itemsize(self.w.storage)

    @property
    def block_m(self) -> Any:
        """Halo rows of a tile."""
        return WGMMA_M * self.warpgroups * self.wgmma_m_tiles

    @property
    def block_k(self) -> Any:
        """Channels of a block."""
        return self.block_k_bytes // self.itemsize

    @property
    def num_blocks_k(self) -> Any:
        """Blocks of channels."""
        return ceil_div(self.w.C, self.block_k)

    @property
    def num_accumulators(self) -> Any:
        """Accumulator registers per thread."""
        return self.wgmma_m_tiles * self.block_n // 2

    @property
    def registers(self) -> Any:
        """Estimated registers per thread."""
        return round_up(self.num_accumulators + OVERHEAD_REGISTERS, 8)

    @property
    def num_warps(self) -> Any:
        """Warps per CTA."""
        return self.warpgroups * (WARPGROUP_SIZE // WARP_SIZE) + NUM_LOADER_WARPS

    @property
    def plane_rows(self) -> Any:
        """Halo rows of a tile in a plane, those of the halo included."""
        return self.image.rows_per_plane(self.block_m)

    @property
    def halo_bytes(self) -> Any:
        """Bytes of the halo rows of a tile with a block of channels."""
        return self.image.num_planes * self.plane_rows * self.block_k_bytes

    @property
    def halo_stage_bytes(self) -> Any:
        """Bytes from one stage of halo rows to the next."""
        return round_up(self.halo_bytes, SWIZZLE_ALIGNMENT_BYTES)

    @property
    def filter_stage_bytes(self) -> Any:
        """Bytes from one stage of filters to the next."""
        return round_up(self.block_n * self.block_k_bytes, SWIZZLE_ALIGNMENT_BYTES)

    @property
    def filters_offset_bytes(self) -> Any:
        """Shared-memory offset of the stages of filters."""
        return self.halo_stages * self.halo_stage_bytes

    @property
    def epilogue_row_bytes(self) -> Any:
        """Bytes of a row of a subtile of the output."""
        return np.gcd(self.block_n * self.itemsize, MAX_EPILOGUE_ROW_BYTES)

    @property
    def epilogue_offset_bytes(self) -> Any:
        """Shared-memory offset of the subtiles of the output, one for each warpgroup."""
        return self.filters_offset_bytes + self.stages * self.filter_stage_bytes

    @property
    def epilogue_stage_bytes(self) -> Any:
        """Bytes of a subtile of the output."""
        return round_up(WGMMA_M * self.epilogue_row_bytes, SWIZZLE_ALIGNMENT_BYTES)

    @property
    def channel_args_offset_bytes(self) -> Any:
        """Shared-memory offset of the per-channel arguments."""
        return self.epilogue_offset_bytes + self.warpgroups * self.epilogue_stage_bytes

    @property
    def barrier_offset_bytes(self) -> Any:
        """Shared-memory offset of the barriers."""
        num_channel_args = sum(op.argument_kind == "channel" for op in epilogue.get_ops(self.w.epilogue))
        return self.channel_args_offset_bytes + self.warpgroups * (num_channel_args * self.block_n * ACCUMULATOR_BYTES)

    @property
    def smem_bytes(self) -> Any:
        """Dynamic shared memory per CTA in bytes, including the alignment of its start."""
        num_barriers = 2 * (self.halo_stages + self.stages)
        return SWIZZLE_ALIGNMENT_BYTES + self.barrier_offset_bytes + num_barriers * BARRIER_BYTES

    @property
    def num_tiles(self) -> Any:
        """Number of work tiles, whole clusters."""
        tiles_m = round_up(ceil_div(self.image.num_rows, self.block_m), self.cluster_m)
        return tiles_m * ceil_div(self.w.O, self.block_n)

    @property
    def max_active_ctas(self) -> Any:
        """CTAs that run at a time, if one of them fits an SM."""
        return np.take(MAX_ACTIVE_CTAS, self.cluster_m)

    @property
    def ctas_per_sm(self) -> Any:
        """Number of resident CTAs per SM."""
        limits = self.num_tiles, self.max_active_ctas, self.smem_bytes
        return count_ctas_per_sm(*limits, self.registers, self.num_threads)

    @property
    def num_blocks(self) -> Any:
        """CTAs of the persistent grid, whole clusters."""
        return np.minimum(self.num_tiles, self.max_active_ctas * self.ctas_per_sm)

    @property
    def estimated_cycles(self) -> Any:
        """Estimated latency in clock cycles: the longest of products, copies and memory, and what does not overlap."""
        w, k_bytes, taps = self.w, 32, math.prod(self.w.kernel)
        tiles_per_sm = ceil_div(self.num_tiles, self.num_blocks) * self.ctas_per_sm
        mmas = self.block_m // WGMMA_M * taps * self.num_blocks_k * (self.block_k_bytes // k_bytes)
        macs = WGMMA_M * self.block_n * (k_bytes // 2)  # of operands of 16 bits; others take as long per byte
        smem_cycles = (WGMMA_M + self.block_n) * k_bytes / SMEM_BYTES_PER_CLOCK
        product_cycles = mmas * np.maximum(macs / MACS_PER_CLOCK, smem_cycles)
        filter_bytes = taps * self.block_n * self.block_k_bytes / self.cluster_m
        copied_bytes = (
            self.num_blocks_k * (self.halo_bytes + filter_bytes) + self.block_m * self.block_n * self.itemsize
        )
        memory_cycles = w.min_bytes / (H200.multiprocessors * MEMORY_BYTES_PER_CLOCK)
        exposed_cycles = EPILOGUE_CYCLES * self.wgmma_m_tiles * self.block_n / 128 / self.ctas_per_sm
        tile_cycles = np.maximum(product_cycles, copied_bytes / COPIED_BYTES_PER_CLOCK) + exposed_cycles
        first_bytes = self.halo_bytes + self.block_n * self.block_k_bytes
        start_cycles = START_CYCLES + first_bytes / COPIED_BYTES_PER_CLOCK
        return np.maximum(tiles_per_sm * tile_cycles, memory_cycles) + start_cycles
