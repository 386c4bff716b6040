"""Resources and limits of tile configs whose filter taps share a tile of halo rows, for channels-first X."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tvmconv.arithmetic import ceil_div, round_up
from tvmconv.target import MAX_REGISTERS_PER_THREAD, REGISTERS_PER_MULTIPROCESSOR, WARP_SIZE, WARPGROUP_SIZE
from tvmconv.workloads import Conv, epilogue
from tvmconv.workloads.dtypes import get_itemsize

from ...tile_config import Rule
from ..gemm.halo_boxes import BOX_CHANNELS, MAX_STAGES, PixelBoxes, choose_pixel_boxes
from ..gemm.halo_image import HaloImage, flatten_pixels
from ..gemm.smem_layout import CHUNK_BYTES
from ..implicit_gemm_shape import ACCUMULATOR_BYTES, ImplicitGemmShape
from ..latency_model import count_ctas_per_sm
from .constraints import MAX_ACCUMULATORS, MAX_SHARED_BYTES
from .tile_config import (
    BARRIER_BYTES,
    COOPERATIVE,
    HALO_LOADERS,
    HALO_SMEM,
    MAX_EPILOGUE_ROW_BYTES,
    MAX_SWIZZLE_BYTES,
    OVERHEAD_REGISTERS,
    SWIZZLE_ALIGNMENT_BYTES,
    WGMMA_M,
    HopperTileConfig,
)

HALO_STAGES = 2  # channel blocks of halo rows in shared memory
LOADER_REGISTERS = 116  # registers per thread of a loading warp
STMATRIX_COLUMNS = 16  # channels that a warp transposes at a time on their way to shared memory
MAX_BLOCK_K = 1 << 10  # channels of a block are fewer


@dataclass(frozen=True)
class HaloTile:
    """Formulas of one config, or of many as columns, with halo rows."""

    w: Conv  # the convolution, channels last
    config: HopperTileConfig  # the tile config; `stages` counts filter tiles of one tap

    @property
    def image(self) -> HaloImage:
        """The halo rows."""
        return HaloImage(flatten_pixels(self.w))

    @property
    def shape(self) -> ImplicitGemmShape:
        """The product, whose rows are halo rows."""
        return ImplicitGemmShape.from_workload(self.w)._replace(m=self.image.num_rows)

    @property
    def rows(self) -> Any:
        """Halo rows of a tile in all planes."""
        return self.image.rows_per_plane(self.config.block_m) * self.image.num_planes

    @property
    def input_bytes(self) -> Any:
        """Shared memory of all stages of halo rows in bytes."""
        return HALO_STAGES * round_up(self.rows * self.config.block_k_bytes, SWIZZLE_ALIGNMENT_BYTES)

    @property
    def filter_stage_bytes(self) -> Any:
        """Bytes from one stage of filters to the next."""
        return round_up(self.config.block_n * self.config.block_k_bytes, SWIZZLE_ALIGNMENT_BYTES)

    @property
    def copies_by_tma(self) -> bool:
        """Whether TMA copies boxes of pixels for one config."""
        return bool(self.uses_boxes) and self.boxes.uses_tma

    @property
    def uses_boxes(self) -> Any:
        """Whether boxes of pixels are copied to shared memory, where warps transpose them."""
        return np.equal(self.config.input_loader, HALO_SMEM)

    @property
    def num_loader_warps(self) -> Any:
        """Warps that load halo rows or transpose them; one of the others loads filters, and one copies boxes."""
        num_warps = self.config.producer_warpgroups * (WARPGROUP_SIZE // WARP_SIZE)
        return num_warps - np.where(self.uses_boxes, 2, 1)

    @property
    def boxes(self) -> PixelBoxes:
        """Boxes of pixels of one config's tile."""
        return choose_pixel_boxes(self.image.w, int(self.config.block_m), int(self.block_k))

    @property
    def block_k(self) -> Any:
        """Channels per channel block."""
        return self.config.block_k(get_itemsize(self.w.storage))

    def of_boxes(self, evaluate: Callable[[PixelBoxes], int]) -> Any:
        """Return a property of the boxes of each config."""
        sizes, w = self.config.block_m * MAX_BLOCK_K + self.block_k, self.image.w
        return _look_up(lambda size: evaluate(choose_pixel_boxes(w, *divmod(size, MAX_BLOCK_K))), sizes)

    @property
    def box_stages_bytes(self) -> Any:
        """Shared memory of all stages of channels-first pixels in bytes."""
        return self.of_boxes(lambda boxes: boxes.num_stages * boxes.nbytes)

    @property
    def boxes_bytes(self) -> Any:
        """Shared memory of channels-first pixels in bytes, and for those that a tile does not need."""
        if not np.any(self.uses_boxes):
            return 0
        unused_bytes = self.num_loader_warps * (WARP_SIZE * CHUNK_BYTES)
        box_bytes = round_up(self.box_stages_bytes + unused_bytes, SWIZZLE_ALIGNMENT_BYTES)
        return np.where(self.uses_boxes, box_bytes, 0)

    @property
    def boxes_offset_bytes(self) -> Any:
        """Shared-memory offset of the stages of channels-first pixels."""
        return self.input_bytes + self.config.stages * self.filter_stage_bytes

    @property
    def unused_offset_bytes(self) -> Any:
        """Shared-memory offset of pixels that a tile does not need."""
        return self.boxes_offset_bytes + self.box_stages_bytes

    @property
    def mainloop_bytes(self) -> Any:
        """Shared memory of all stages in bytes."""
        return self.boxes_offset_bytes + self.boxes_bytes

    @property
    def stored_columns(self) -> Any:
        """Output channels of a tile that a CTA stores, of those whose sums the CTAs of a cluster share."""
        return self.config.block_n // self.config.split_k

    @property
    def subtile_columns(self) -> int:
        """Output channels of a subtile of one config, which passes through shared memory at once."""
        itemsize = get_itemsize(self.w.storage)
        return math.gcd(int(self.stored_columns) * itemsize, MAX_EPILOGUE_ROW_BYTES) // itemsize

    @property
    def partial_sums_bytes(self) -> Any:
        """Shared memory of the partial sums that a CTA receives, in place of the stages."""
        return np.where(self.config.split_k > 1, self.config.block_m * self.config.block_n * ACCUMULATOR_BYTES, 0)

    @property
    def epilogue_offset_bytes(self) -> Any:
        """Shared-memory offset of the subtiles of the output."""
        return np.maximum(self.mainloop_bytes, self.partial_sums_bytes)

    @property
    def epilogue_stage_bytes(self) -> Any:
        """Bytes of a warpgroup's subtile of the output."""
        row_bytes = np.gcd(self.stored_columns * get_itemsize(self.w.storage), MAX_EPILOGUE_ROW_BYTES)
        return round_up(WGMMA_M * row_bytes, SWIZZLE_ALIGNMENT_BYTES)

    @property
    def channel_args_offset_bytes(self) -> Any:
        """Shared-memory offset of the per-channel arguments."""
        return self.epilogue_offset_bytes + self.config.warpgroups * self.epilogue_stage_bytes

    @property
    def barrier_offset_bytes(self) -> Any:
        """Shared-memory offset of the barriers."""
        num_channel_args = sum(op.argument_kind == "channel" for op in epilogue.get_ops(self.w.epilogue))
        channel_args_bytes = self.config.warpgroups * num_channel_args * self.stored_columns * ACCUMULATOR_BYTES
        return self.channel_args_offset_bytes + channel_args_bytes

    @property
    def smem_bytes(self) -> Any:
        """Dynamic shared memory per CTA in bytes, including the alignment of its start."""
        num_barriers = 2 * (HALO_STAGES + self.config.stages + MAX_STAGES)
        return SWIZZLE_ALIGNMENT_BYTES + self.barrier_offset_bytes + num_barriers * BARRIER_BYTES

    @property
    def num_threads(self) -> Any:
        """Threads per CTA."""
        return (self.config.warpgroups + self.config.producer_warpgroups) * WARPGROUP_SIZE

    @property
    def num_tiles(self) -> Any:
        """Number of output tiles."""
        shape, config = self.shape, self.config
        return shape.groups * ceil_div(shape.m, config.block_m) * ceil_div(shape.n, config.block_n)

    @property
    def num_ctas(self) -> Any:
        """Number of CTAs or clusters of the grid, which is persistent unless the reduction is split."""
        return np.where(
            self.config.split_k > 1, self.num_tiles, np.minimum(self.num_tiles, self.config.max_active_ctas)
        )

    @property
    def ctas_per_sm(self) -> Any:
        """Number of resident CTAs per SM; one stores while another multiplies."""
        registers = np.maximum(self.config.estimate_registers(), LOADER_REGISTERS)
        num_ctas, max_active_ctas = self.num_tiles * self.config.split_k, self.config.max_active_ctas
        return count_ctas_per_sm(num_ctas, max_active_ctas, self.smem_bytes, registers, self.num_threads)

    @property
    def num_channel_blocks(self) -> Any:
        """Number of channel blocks of the reduction."""
        return ceil_div(self.shape.channels_per_group, self.config.block_k(self.shape.itemsize))

    @property
    def blocks_per_cta(self) -> Any:
        """Number of channel blocks of a CTA."""
        return ceil_div(self.num_channel_blocks, self.config.split_k)

    @property
    def registers(self) -> Any:
        """Maximum number of registers per thread."""
        equal_share = REGISTERS_PER_MULTIPROCESSOR // self.num_threads // 8 * 8
        return np.minimum(MAX_REGISTERS_PER_THREAD, equal_share)


def can_use_halo(w: Conv) -> bool:
    """Return whether a convolution, viewed channels last, can be computed from halo rows of a channels-first X."""
    residuals = [op for op in epilogue.get_ops(w.epilogue) if op.argument_kind == "output"]
    return len(residuals) <= 1 and HaloImage(w).has_consecutive_planes


def halo_constraints(w: Conv) -> list[Rule]:
    """Return the constraints on configs with halo rows."""
    other_registers = OVERHEAD_REGISTERS

    def fits(config: HopperTileConfig) -> Any:
        return HaloTile(w, config).smem_bytes <= MAX_SHARED_BYTES

    rules: list[Rule] = [
        (
            "halo rows are loaded by cooperative CTAs that share no operands and no last wave",
            lambda t: (
                (t.kernel_schedule == COOPERATIVE) & (t.multicast_size == 1) & np.logical_not(t.divides_last_wave)
            ),
        ),
        (
            f"halo rows have at most {MAX_SWIZZLE_BYTES} bytes of channels, for all taps",
            lambda t: (t.block_k_bytes <= MAX_SWIZZLE_BYTES) & (t.taps_per_copy == 1),
        ),
        (
            f"each CTA of a split reduction has a channel block, and stores multiples of {STMATRIX_COLUMNS} channels",
            lambda t: (
                (HaloTile(w, t).blocks_per_cta * (t.split_k - 1) < HaloTile(w, t).num_channel_blocks)
                & (t.block_n % (STMATRIX_COLUMNS * t.split_k) == 0)
            ),
        ),
        (
            "a reduction is split only if all of its CTAs run at a time",
            lambda t: (t.split_k == 1) | (HaloTile(w, t).num_tiles * t.split_k <= t.max_active_ctas),
        ),
        (
            "the registers of all threads fit beside the vectors of a channels-first output",
            lambda t: (
                (t.num_accumulators <= MAX_ACCUMULATORS)
                & (t.num_accumulators + other_registers <= HaloTile(w, t).registers)
                & (HaloTile(w, t).registers >= LOADER_REGISTERS)
            ),
        ),
        (
            "copies of channels-first pixels fill whole channel blocks",
            lambda t: (t.input_loader != HALO_SMEM) | (t.block_k(get_itemsize(w.storage)) % BOX_CHANNELS == 0),
        ),
        (f"at most {MAX_SHARED_BYTES} bytes of shared memory with halo rows", fits),
    ]
    return [
        *((description, _limit_to_halo(predicate)) for description, predicate in rules),
        (
            "only halo rows have several producer warpgroups",
            lambda t: np.isin(t.input_loader, HALO_LOADERS) | (t.producer_warpgroups == 1),
        ),
    ]


def _limit_to_halo(predicate: Callable[[HopperTileConfig], Any]) -> Callable[[HopperTileConfig], Any]:
    """Return the condition that a predicate holds for configs with halo rows."""
    return lambda t: ~np.isin(t.input_loader, HALO_LOADERS) | predicate(t)


def _look_up(function: Callable[[int], int], values: Any) -> Any:
    """Return the results of a function of integers for a value or a column, with one call for each distinct value."""
    distinct, indices = np.unique(values, return_inverse=True)
    return np.array([function(int(value)) for value in distinct])[indices].reshape(np.shape(values))
