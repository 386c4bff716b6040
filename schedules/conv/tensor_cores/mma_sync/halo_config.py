"""Configs of `mma_sync` whose filter taps share halo rows of a channels-first X: resources, limits and estimates."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from tvmconv.arithmetic import ceil_div
from tvmconv.target import PORTABLE_SHARED_BYTES
from tvmconv.workloads import Conv

from ...tile_config import Rule
from ..gemm.halo_boxes import PixelBoxes, can_transpose, choose_gathered_boxes
from ..gemm.halo_image import HaloImage, flatten_pixels
from ..implicit_gemm_shape import ImplicitGemmShape
from .epilogue_split import compute_smem_bytes
from .latency import estimate_latency_us, list_candidates
from .tile_config import MmaSyncTileConfig

INPUT_LOADER, CONVERTED, HALO = "input_loader", "converted", "halo"
INPUT_LOADERS = (CONVERTED, HALO)
MAX_BLOCK = 1 << 10  # rows and channels of a tile are fewer
TRANSPOSE_US = 0.25  # barrier and latencies of the transpose of a block of channels, an assumption


@dataclass(frozen=True)
class HaloTileConfig(MmaSyncTileConfig):
    """Tile of a block whose rows are halo rows, and its division among warps."""

    w: Conv | None = None  # the convolution, channels last, which is no knob; None is not allowed

    @property
    def image(self) -> HaloImage:
        """The halo rows."""
        assert self.w
        return _make_image(self.w)

    @property
    def rows(self) -> Any:
        """Halo rows of a tile in all planes."""
        return self.image.rows_per_plane(self.block_m) * self.image.num_planes

    @property
    def num_taps(self) -> int:
        """Taps of the filter, which share halo rows."""
        return math.prod(self.image.w.kernel)

    @property
    def boxes(self) -> PixelBoxes:
        """Boxes of pixels of one config's tile, with all channels of a block."""
        return choose_gathered_boxes(self.image.w, int(self.block_m), int(self.block_k))

    @property
    def box_bytes(self) -> Any:
        """Bytes of the boxes of a block of channels."""
        sizes, w = self.block_m * MAX_BLOCK + self.block_k, self.image.w
        distinct, indices = np.unique(sizes, return_inverse=True)
        nbytes = np.array([choose_gathered_boxes(w, *divmod(int(size), MAX_BLOCK)).nbytes for size in distinct])
        return nbytes[indices].reshape(np.shape(sizes))

    @property
    def box_stages(self) -> Any:
        """Stages of boxes, as many as copies of filters are ahead."""
        return ceil_div(self.stages - 1, self.num_taps)

    def get_shape(self, w: Conv) -> ImplicitGemmShape:
        """Return the matrix product, whose rows are halo rows."""
        return ImplicitGemmShape.from_workload(w)._replace(m=self.image.num_rows)

    def blocks_per_cta(self, gemm: ImplicitGemmShape) -> Any:
        """Return the number of blocks of channels of a block of threads."""
        return ceil_div(ceil_div(gemm.channels_per_group, self.block_k), self.split_k)

    def total_k_tiles(self, gemm: ImplicitGemmShape) -> Any:
        """Return the number of k-tiles of the whole reduction, each with a tap of a block of channels."""
        return ceil_div(gemm.channels_per_group, self.block_k) * self.num_taps

    def k_tiles_per_block(self, gemm: ImplicitGemmShape) -> Any:
        """Return the number of k-tiles per block of threads."""
        return self.blocks_per_cta(gemm) * self.num_taps

    def stage_bytes(self, gemm: ImplicitGemmShape) -> Any:
        """Return the shared memory of one pipeline stage in bytes, which has filters only."""
        return self.block_n * self.block_k * gemm.itemsize

    def halo_bytes(self, gemm: ImplicitGemmShape) -> Any:
        """Return the bytes of the halo rows of a block of channels."""
        return self.rows * self.block_k * gemm.itemsize

    def mainloop_bytes(self, gemm: ImplicitGemmShape) -> Any:
        """Return the shared memory of the mainloop in bytes: halo rows, stages of filters, and stages of boxes."""
        return self.halo_bytes(gemm) + self.stages * self.stage_bytes(gemm) + self.box_stages * self.box_bytes

    def copied_bytes(self, gemm: ImplicitGemmShape) -> Any:
        """Return the mean number of bytes that are copied for a k-tile."""
        return self.stage_bytes(gemm) + self.box_bytes / self.num_taps

    def moved_bytes(self, gemm: ImplicitGemmShape) -> Any:
        """Return the mean number of bytes that a k-tile stores to shared memory or moves there."""
        return self.copied_bytes(gemm) + (self.box_bytes + self.halo_bytes(gemm)) / self.num_taps

    @property
    def further_k_tile_us(self) -> float:
        """Mean latency of the transpose of a block of channels per k-tile in microseconds."""
        return TRANSPOSE_US / self.num_taps


@functools.lru_cache(maxsize=64)
def _make_image(w: Conv) -> HaloImage:
    return HaloImage(flatten_pixels(w))


def can_share_halo_rows(w: Conv) -> bool:
    """Return whether a convolution, viewed channels last, can be computed from halo rows of a channels-first X."""
    image = _make_image(w)
    return image.has_consecutive_planes and can_transpose(image.w)


def halo_constraints() -> list[Rule]:
    """Return the constraints on configs with halo rows, besides those on all configs."""
    return [
        ("blocks compute one tile", lambda t: t.tiles_per_block == 1),
        ("residuals are added in the epilogue", lambda t: np.not_equal(t.residual_add, "accumulator_init")),
    ]


@functools.lru_cache(maxsize=64)
def select_halo_default(w: Conv) -> tuple[HaloTileConfig | None, float]:
    """Return the config with halo rows that has the best estimate, and that in microseconds; None if none is legal."""
    gemm = ImplicitGemmShape.from_workload(w)
    candidates = list_candidates(gemm.itemsize, gemm.spatial_ndim)
    configs = HaloTileConfig(**vars(candidates) | {"input_loader": HALO, "stores_channels_first": True}, w=w)
    configs = configs.filter(configs.has_k_tile_in_each_part(gemm))
    configs = configs.filter(compute_smem_bytes(w, configs) <= PORTABLE_SHARED_BYTES)
    if not np.size(configs.block_m):
        return None, math.inf
    estimates = estimate_latency_us(configs, configs.get_shape(w))
    best = int(np.argmin(estimates))
    return configs.row(best), float(estimates[best])
