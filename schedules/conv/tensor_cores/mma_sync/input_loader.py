"""The knob of `mma_sync` that chooses how a channels-first X is loaded, with the configs of each value.

| value | meaning |
| --- | --- |
| "converted" | a launch of its own transposes X to channels last |
| "halo" | boxes of pixels are copied as they lie and transposed in shared memory to halo rows, which all taps share |
| "cp_async" | vectors of pixels are copied to an MN-major tile, for filters of one tap |
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from tvmconv.arithmetic import ceil_div
from tvmconv.target import PORTABLE_SHARED_BYTES
from tvmconv.workloads import Conv
from tvmconv.workloads.dtypes import get_itemsize

from ...layout_conversion import estimate_pixel_conversion_us
from ...tile_config import Rule
from ..gemm.halo_boxes import PixelBoxes, can_transpose, choose_gathered_boxes
from ..gemm.halo_image import HaloImage, flatten_pixels
from ..gemm.plane_gather import count_vector_pixels
from ..implicit_gemm_shape import VECTOR_BYTES, ImplicitGemmShape
from .epilogue_split import compute_smem_bytes
from .latency import estimate_latency_us, list_candidates
from .tile_config import MmaSyncTileConfig

INPUT_LOADER, CONVERTED, HALO, CP_ASYNC = "input_loader", "converted", "halo", "cp_async"
MAX_BLOCK = 1 << 10  # rows and channels of a tile are fewer
NARROW_COPY_RATIO = (
    0.1  # further time of a launch that copies vectors of 16 bytes, and twice as much for 8; an assumption
)
TRANSPOSED_BYTES_PER_US = 33e3  # halo rows of a block of threads: five timings of searches on an H200


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

    def transpose_us(self, gemm: ImplicitGemmShape) -> Any:
        """Return the time of all transposes of a block of threads in microseconds, which no product hides."""
        return self.blocks_per_cta(gemm) * self.halo_bytes(gemm) / TRANSPOSED_BYTES_PER_US


@functools.lru_cache(maxsize=64)
def _make_image(w: Conv) -> HaloImage:
    return HaloImage(flatten_pixels(w))


def list_input_loaders(w: Conv) -> tuple[str, ...]:
    """Return the values of the knob, the one of configs without the knob first, for a convolution, channels last."""
    image, loaders = _make_image(w), [CONVERTED]
    if w.C // w.groups * get_itemsize(w.storage) < VECTOR_BYTES:
        return ()
    if image.has_consecutive_planes and can_transpose(image.w):
        loaders.append(HALO)
    is_matrix = math.prod((*w.kernel, *w.stride)) == 1 and w.output_size == w.input_size
    if is_matrix and _count_vector_bytes(w):
        loaders.append(CP_ASYNC)
    return tuple(loaders) if len(loaders) > 1 else ()


def _count_vector_bytes(w: Conv) -> int:
    """Return the bytes of a vector of pixels; 0 if it is too small to copy."""
    itemsize = get_itemsize(w.storage)
    return count_vector_pixels(math.prod(w.input_size), itemsize) * itemsize


def list_loader_constraints() -> list[Rule]:
    """Return the constraints on configs with some loaders, besides those on all configs."""

    def is_gather(t: MmaSyncTileConfig) -> Any:
        return np.equal(t.input_loader, CP_ASYNC)

    def is_halo(t: MmaSyncTileConfig) -> Any:
        return np.equal(t.input_loader, HALO)

    return [
        ("a block with halo rows computes one tile", lambda t: ~is_halo(t) | (t.tiles_per_block == 1)),
        (
            "residuals are added in the epilogue of a block with halo rows",
            lambda t: ~is_halo(t) | np.not_equal(t.residual_add, "accumulator_init"),
        ),
        (
            "threads copy vectors of pixels of whole channels, of as many as a swizzle permutes",
            lambda t: ~is_gather(t) | ((t.block_m & (t.block_m - 1) == 0) & (t.num_threads >= t.block_m)),
        ),
    ]


def estimate_by_loader_us(config: MmaSyncTileConfig, w: Conv) -> Any:
    """Return the estimated latency of configs in microseconds, with what it takes to load X."""
    latency_us = estimate_latency_us(config, config.get_shape(w))
    narrow_ratio = NARROW_COPY_RATIO * VECTOR_BYTES / max(1, _count_vector_bytes(w))
    gather_us = np.where(np.equal(config.input_loader, CP_ASYNC), narrow_ratio * latency_us, 0.0)
    conversion_us = np.where(np.equal(config.input_loader, CONVERTED), estimate_pixel_conversion_us(w), 0.0)
    return latency_us + gather_us + conversion_us


@functools.lru_cache(maxsize=64)
def rank_loader_defaults(w: Conv, loaders: tuple[str, ...]) -> list[tuple[float, MmaSyncTileConfig]]:
    """Return the config of each loader with the best estimate, and that in microseconds, the best first."""
    gemm = ImplicitGemmShape.from_workload(w)
    candidates = list_candidates(gemm.itemsize, gemm.spatial_ndim)
    ranking = []
    for loader in loaders:
        columns = vars(candidates) | {INPUT_LOADER: loader, "stores_channels_first": True}
        configs = HaloTileConfig(**columns, w=w) if loader == HALO else MmaSyncTileConfig(**columns)
        rules = [*list_loader_constraints(), ("", lambda t: t.has_k_tile_in_each_part(gemm))]
        rules.append(("", lambda t: compute_smem_bytes(w, t) <= PORTABLE_SHARED_BYTES))
        configs = configs.select_meeting(rules)
        if np.size(configs.block_m):
            estimates = estimate_by_loader_us(configs, w)
            best = int(np.argmin(estimates))
            ranking.append((float(estimates[best]), configs.row(best)))
    return sorted(ranking, key=lambda entry: entry[0])
