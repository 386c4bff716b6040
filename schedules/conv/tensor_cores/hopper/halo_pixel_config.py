"""Configs of `halo_hopper`: tiles of halo rows × filters, and the stages of both in shared memory."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from tvmconv.arithmetic import ceil_div, round_up
from tvmconv.target import H200, WARP_SIZE, WARPGROUP_SIZE
from tvmconv.tensor_map import MAX_BOX_ELEMENTS, MAX_PIXELS
from tvmconv.workloads import Conv, epilogue
from tvmconv.workloads.dtypes import get_itemsize

from ...estimated_config import EstimatedTileConfig
from ...tile_config import Rule
from ..gemm.halo_pixels import HaloPixels
from ..implicit_gemm_shape import ACCUMULATOR_BYTES
from ..latency_model import count_ctas_per_sm
from .constraints import MAX_ACCUMULATORS, MAX_SHARED_BYTES, limit_registers_per_thread
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

SWIZZLE_BYTES = (128, 64, MIN_SWIZZLE_BYTES)
NUM_LOADER_WARPS = 2  # the first loads filters, the second one pixels
PIXELS, FILTERS = "pixels", "filters"  # rows of the product
BLOCK_N_CHOICES = tuple(range(16, 257, 16))
MIN_COLUMNS = BLOCK_N_CHOICES[0]  # columns of the narrowest tile
STAGED_FILTERS = 64  # filters of a subtile of the output, if they are the rows of the product
# Approximate rates of an SM of an H200 per clock: multiply-adds of 16 bits, bytes of shared memory that wgmma reads and
# TMA writes, bytes that TMA copies from L2 while all SMs do, and bytes of its share of the global memory's bandwidth.
MACS_PER_CLOCK, SMEM_BYTES_PER_CLOCK, COPIED_BYTES_PER_CLOCK, MEMORY_BYTES_PER_CLOCK = 2048, 128, 40, 16
# Cycles of the stores of a wgmma's tile per 128 columns, of the barriers of a tap, and of a launch.
EPILOGUE_CYCLES, TAP_CYCLES, START_CYCLES = 700, 40, 3000


@dataclass(frozen=True)
class HaloPixelConfig(EstimatedTileConfig):
    """One config of `halo_hopper`, or many configs as columns."""

    TILE_KNOBS: ClassVar[tuple[str, ...]] = ("rows", "warpgroups", "wgmma_m_tiles", "block_n")
    # 293 kernels of 23 layers on an H200 took 0.77 to 1.53 times their estimate at the boost clock of an H100, and 1.04
    # times in geometric mean.
    SECONDS_PER_CYCLE: ClassVar[float | None] = 1.04 / 1.755e9

    w: Conv
    rows: Any  # what the rows of the product are: pixels, or filters; its columns are the others
    warpgroups: Any  # warpgroups that multiply, 64 × `wgmma_m_tiles` rows each
    wgmma_m_tiles: Any  # wgmmas of a warpgroup along the rows
    block_n: Any  # columns of a tile
    block_k_bytes: Any  # bytes of a block of channels
    halo_stages: Any  # blocks of channels of halo rows in shared memory
    stages: Any  # filters of a tap and a block of channels in shared memory
    cluster_size: Any  # CTAs that share the loads of filters

    @classmethod
    def list_options(cls, w: Conv) -> Mapping[str, Sequence[Any]]:
        """Return the options of all knobs."""
        channel_bytes = w.C * get_itemsize(w.storage)
        return {
            "rows": (PIXELS, FILTERS) if get_itemsize(w.storage) == 2 else (PIXELS,),
            "warpgroups": (1, 2, 3),
            "wgmma_m_tiles": (1, 2),
            "block_n": BLOCK_N_CHOICES,
            "block_k_bytes": [n for n in SWIZZLE_BYTES if n <= max(channel_bytes, MIN_SWIZZLE_BYTES)],
            "halo_stages": (2, 3, 1),  # of equal estimates, the first option is the default
            "stages": (6, 4, 3, 2),
            "cluster_size": (1, 2),
        }

    @classmethod
    def list_required(cls, w: Conv) -> list[Rule]:
        """Return the conditions on every config."""
        return [
            (f"at most {MAX_ACCUMULATORS} accumulators per thread", lambda t: t.num_accumulators <= MAX_ACCUMULATORS),
            ("the registers of all threads fit", lambda t: t.registers <= limit_registers_per_thread(t.num_threads)),
            (f"a copy has at most {MAX_PIXELS} halo rows", lambda t: t.plane_rows <= MAX_PIXELS),
            (
                "there is one stage of halo rows only for one block of channels, as the next block fills another stage",
                lambda t: (t.halo_stages > 1) | (t.num_blocks_k == 1),
            ),
            (
                "the CTAs of a cluster load equal parts of the filters, whole swizzle atoms",
                lambda t: t.tile_filters % (8 * t.cluster_size) == 0,
            ),
            (
                "a tile has at most as many filters as there are, in steps of an instruction",
                lambda t: t.tile_filters < w.O + np.where(t.has_filter_rows, WGMMA_M, MIN_COLUMNS),
            ),
            (f"TMA copies at most {MAX_BOX_ELEMENTS} filters at a time", lambda t: t.tile_filters <= MAX_BOX_ELEMENTS),
            (f"at most {MAX_SHARED_BYTES} bytes of shared memory", lambda t: t.smem_bytes <= MAX_SHARED_BYTES),
        ]

    @classmethod
    def list_pruned(cls, w: Conv) -> list[Rule]:
        """Return the conditions on configs that are worth a search."""
        return [
            ("halo rows are loaded ahead", lambda t: (t.halo_stages > 1) | (t.ctas_per_sm > 1)),
            ("clusters have several tiles", lambda t: (t.cluster_size == 1) | (t.num_tiles >= H200.multiprocessors)),
            (
                "blocks have as many channels as possible",
                lambda t: t.block_k_bytes == max(cls.list_options(w)["block_k_bytes"]),
            ),
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
    def has_filter_rows(self) -> Any:
        """Whether the rows of the product are filters."""
        return np.equal(self.rows, FILTERS)

    @property
    def block_m(self) -> Any:
        """Rows of a tile."""
        return WGMMA_M * self.warpgroups * self.wgmma_m_tiles

    @property
    def tile_pixels(self) -> Any:
        """Halo rows of a tile."""
        return np.where(self.has_filter_rows, self.block_n, self.block_m)

    @property
    def tile_filters(self) -> Any:
        """Filters of a tile."""
        return np.where(self.has_filter_rows, self.block_m, self.block_n)

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
        return self.image.rows_per_plane(self.tile_pixels)

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
        return round_up(self.tile_filters * self.block_k_bytes, SWIZZLE_ALIGNMENT_BYTES)

    @property
    def filters_offset_bytes(self) -> Any:
        """Shared-memory offset of the stages of filters."""
        return self.halo_stages * self.halo_stage_bytes

    @property
    def epilogue_row_bytes(self) -> Any:
        """Bytes of the filters of a pixel in a subtile of the output, of 64 pixels."""
        columns_bytes = np.gcd(self.block_n * self.itemsize, MAX_EPILOGUE_ROW_BYTES)
        return np.where(self.has_filter_rows, STAGED_FILTERS * self.itemsize, columns_bytes)

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
        channel_args_bytes = self.warpgroups * (num_channel_args * self.block_n * ACCUMULATOR_BYTES)
        return self.channel_args_offset_bytes + np.where(self.has_filter_rows, 0, channel_args_bytes)

    @property
    def smem_bytes(self) -> Any:
        """Dynamic shared memory per CTA in bytes, including the alignment of its start."""
        num_barriers = 2 * (self.halo_stages + self.stages)
        return SWIZZLE_ALIGNMENT_BYTES + self.barrier_offset_bytes + num_barriers * BARRIER_BYTES

    @property
    def num_tiles(self) -> Any:
        """Number of work tiles, whole clusters."""
        pixel_tiles = round_up(ceil_div(self.image.num_rows, self.tile_pixels), self.cluster_size)
        return pixel_tiles * ceil_div(self.w.O, self.tile_filters)

    @property
    def max_active_ctas(self) -> Any:
        """CTAs that run at a time, if one of them fits an SM."""
        return np.take(MAX_ACTIVE_CTAS, self.cluster_size)

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
    def usage_features(self) -> dict[str, Any]:
        """Further quantities of the usage, by name."""
        return {**super().usage_features, "cluster": self.cluster_size}

    @property
    def estimated_cycles(self) -> Any:
        """Estimated latency in clock cycles: the longest of products, copies and memory, and what does not overlap."""
        w, taps = self.w, math.prod(self.w.kernel)
        tiles_per_sm = ceil_div(self.num_tiles, self.num_blocks) * self.ctas_per_sm
        tap_macs = self.block_m * self.block_n * (self.block_k_bytes // 2)  # of 16 bits; others take as long per byte
        read_bytes = self.block_m // WGMMA_M * (WGMMA_M + self.block_n) * self.block_k_bytes
        filter_bytes = self.tile_filters * self.block_k_bytes
        smem_bytes = read_bytes + filter_bytes + self.halo_bytes / taps  # of a tap
        tap_cycles = np.maximum(tap_macs / MACS_PER_CLOCK, smem_bytes / SMEM_BYTES_PER_CLOCK) + TAP_CYCLES
        copied_bytes = self.halo_bytes + taps * filter_bytes / self.cluster_size  # of a block of channels
        output_bytes = self.block_m * self.block_n * self.itemsize
        memory_cycles = w.min_bytes / (H200.multiprocessors * MEMORY_BYTES_PER_CLOCK)
        exposed_cycles = EPILOGUE_CYCLES * self.wgmma_m_tiles * self.block_n / 128 / self.ctas_per_sm
        copy_cycles = (self.num_blocks_k * copied_bytes + output_bytes) / COPIED_BYTES_PER_CLOCK
        tile_cycles = np.maximum(taps * self.num_blocks_k * tap_cycles, copy_cycles) + exposed_cycles
        start_cycles = START_CYCLES + (self.halo_bytes + filter_bytes) / COPIED_BYTES_PER_CLOCK
        return np.maximum(tiles_per_sm * tile_cycles, memory_cycles) + start_cycles
