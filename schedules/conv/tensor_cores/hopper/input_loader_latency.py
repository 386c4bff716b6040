"""Analytic latency of `hopper` configs by how a channels-first X is loaded."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tvmconv.arithmetic import ceil_div
from tvmconv.fitted_latency import H200_FIT
from tvmconv.target import WARP_SIZE
from tvmconv.workloads import Conv

from ...layout_conversion import estimate_pixel_conversion_us
from ..gemm.plane_gather import count_vector_pixels
from ..implicit_gemm_shape import VECTOR_BYTES, ImplicitGemmShape
from ..latency_model import combine_overlapping_times
from .halo_latency import NARROW_COPIES_PER_US, estimate_halo_latency_us
from .latency import estimate_latency_us
from .tile_config import CP_ASYNC, HALO_LOADERS, TMA, HopperTileConfig
from .tma_requirements import choose_box_pixels, pad_planes

# Time of a launch relative to boxes of 64 pixels, by the pixels of a box: measured on two layers in float16 on an H100.
NARROW_BOX_RATIO = {32: 1.1, 16: 1.6}
WIDE_COPIES_PER_US = 120.0  # cp.async of a warp per SM in vectors of 16 bytes, which bypass the L1 cache; an assumption


def estimate_conversion_us(w: Conv) -> Any:
    """Return the estimated latency of the transpose of X by a launch of its own in microseconds."""
    return estimate_pixel_conversion_us(w)


def estimate_gather_latency_us(config: HopperTileConfig, w: Conv) -> Any:
    """Return the estimated latency of configs whose pixels are copied by cp.async in microseconds."""
    gemm = ImplicitGemmShape.from_workload(w)
    vector = max(1, count_vector_pixels(math.prod(w.input_size), gemm.itemsize))
    copies = config.block_m * config.block_k(gemm.itemsize) / (vector * WARP_SIZE)
    rate = WIDE_COPIES_PER_US if vector * gemm.itemsize == VECTOR_BYTES else NARROW_COPIES_PER_US
    ctas = config.num_tiles(gemm) * config.split_k
    copies_us = ceil_div(ctas, config.max_active_ctas) * config.k_tiles_per_cta(gemm) * copies / rate
    return combine_overlapping_times(estimate_latency_us(config, w), H200_FIT.hopper.launch_us + copies_us)


def estimate_by_input_loader_us(config: HopperTileConfig, w: Conv) -> Any:
    """Return the estimated latency of configs in microseconds, the conversion of X included."""
    loader, channels_last_us = config.input_loader, estimate_latency_us(config, w)
    reads_boxes, padded = np.equal(loader, TMA) & (config.cluster_n == 1), pad_planes(w) or w
    box_us = estimate_latency_us(config, padded) * NARROW_BOX_RATIO.get(choose_box_pixels(padded), 1.0)
    latency_us = np.where(reads_boxes, box_us, channels_last_us + estimate_conversion_us(w))
    latency_us = np.where(np.equal(loader, CP_ASYNC), estimate_gather_latency_us(config, w), latency_us)
    has_halo = np.isin(loader, HALO_LOADERS)
    return np.where(has_halo, estimate_halo_latency_us(config, w), latency_us) if np.any(has_halo) else latency_us
