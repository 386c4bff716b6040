"""Analytic latency of `hopper` configs with halo rows, and the configs with which a search starts.

The costs of loads, stores and conversions are fitted to 38 timings of eight layers in float16 on an H100, at batch 1 or
32. The root mean square of the logarithmic errors of these estimates was 0.17. Two costs were added afterwards, from
five timings of a 1×1 filter of stride 2: the bandwidth of boxes, and vectors with pixels that the stride skips.
The barriers of a copy and the wait for the first vectors were then fitted to 76 timings of 15 layers of searches, so
that halo rows and conversions are in the right order.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from tvmconv.arithmetic import ceil_div
from tvmconv.fitted_latency import H200_FIT
from tvmconv.target import WARP_SIZE
from tvmconv.workloads import Conv

from ..gemm.halo_boxes import BOX_CHANNELS, choose_pixel_boxes
from ..gemm.plane_epilogue import can_store_planes
from ..implicit_gemm_shape import ImplicitGemmShape
from ..latency_model import bound_by_memory, combine_overlapping_times, estimate_k_tile_us
from .constraints import isa_constraints, resource_constraints
from .halo_tile import HaloTile, halo_constraints
from .tile_config import BLOCK_K_BYTES_CHOICES, HALO, KNOB_OPTIONS, PRODUCER_WARPGROUPS_CHOICES, HopperTileConfig
from .tma_requirements import WGMMA_K_BYTES, WGMMA_M

LOADER_BYTES_PER_US = 11e3  # of a loading warp, in vectors of at least `LOADER_VECTOR_BYTES`
LOADER_VECTOR_BYTES = 8
MATRICES_PER_US = 260.0  # matrices of 8 × 8 that a transposing warp moves, an assumption
ELEMENTS_RATIO = 4.0  # cost of a matrix whose elements are loaded one by one; on 7 × 7 pixels, on an H100
COPY_TRANSPOSE_US = 0.1  # barriers of a copy of boxes, fitted to the later 76 timings
MATRIX_BYTES = 128
SMEM_MOVES = 3  # how often pixels pass through shared memory: copied there, loaded for the transpose, and stored
# cp.async of a warp per SM in vectors of less than 16 bytes: 13 timings of a 1×1 filter on 14 × 14 pixels, on an H100.
NARROW_COPIES_PER_US = 50.0
BOX_BYTES_PER_US = 3.2e6  # boxes that all SMs copy from the L2 cache: 1×1 filters of stride 2, on an H100
LOADER_WAIT_US = 1.3  # until the first vectors of a channel block have arrived, fitted to the later 76 timings
BOX_STORE_RATIO = 2.0  # `STORE_RATIO` where boxes are transposed in shared memory, an assumption
PLANE_VECTOR = 4  # vector with the cost of planes that TMA stores, an assumption
STORE_RATIO = 14.0  # further cost of an epilogue that stores single pixels, relative to that of wide vectors


def estimate_halo_latency_us(config: HopperTileConfig, w: Conv) -> Any:
    """Return the estimated latency of configs with halo rows in microseconds.

    A channel block takes as long as its filter taps, or as the loads of its halo rows. The loads of the first block
    are not hidden.
    """
    halo, params, image = HaloTile(w, config), H200_FIT.hopper, HaloTile(w, config).image
    shape, taps = halo.shape, math.prod(w.kernel)
    ctas_per_sm = halo.ctas_per_sm
    waves = ceil_div(halo.num_tiles * config.split_k, config.max_active_ctas * ctas_per_sm)
    macs = config.block_m * config.block_n * config.block_k(shape.itemsize)
    num_wgmmas = config.block_k_bytes // WGMMA_K_BYTES * (config.block_m // WGMMA_M)
    row_bytes = halo.rows * config.block_k_bytes
    moved_bytes = row_bytes * np.where(halo.uses_boxes, SMEM_MOVES, 1)
    smem_bytes = num_wgmmas * (WGMMA_M + config.block_n) * WGMMA_K_BYTES + halo.filter_stage_bytes + moved_bytes / taps
    tma_us = ctas_per_sm * config.block_n / params.tma_rows_per_us
    tap_us = estimate_k_tile_us(ctas_per_sm, macs, smem_bytes, shape.itemsize, params, tma_us, params.k_tile_us)
    stage_wait_us = params.stage_reuse_k_tiles * tap_us / np.minimum(config.stages, halo.blocks_per_cta * taps)
    vector_bytes = image.input_vector * image.itemsize
    loader_rate = LOADER_BYTES_PER_US * halo.num_loader_warps
    columns_per_row = w.stride[-1] / image.planes[-1]  # of a vector, those between the pixels that taps read included
    copy_us = ctas_per_sm * columns_per_row * row_bytes / loader_rate * max(1, LOADER_VECTOR_BYTES / vector_bytes)
    transpose_us = _estimate_transpose_us(halo)
    loader_us = LOADER_WAIT_US + np.where(halo.uses_boxes, transpose_us, copy_us)
    exposed_us = np.where(halo.uses_boxes, ctas_per_sm * transpose_us, loader_us)  # copies are ahead of the transpose
    block_us = combine_overlapping_times(taps * combine_overlapping_times(tap_us, stage_wait_us), exposed_us)
    epilogue_us = params.epilogue_us_per_accumulator * config.num_accumulators / config.split_k
    store_ratio = np.where(halo.uses_boxes, BOX_STORE_RATIO, STORE_RATIO)
    vector = PLANE_VECTOR if can_store_planes(image) else image.output_vector
    epilogue_us = ctas_per_sm * epilogue_us * (1 + store_ratio / vector)
    mainloop_us = halo.blocks_per_cta * block_us
    overlapping_us = waves * combine_overlapping_times(mainloop_us, epilogue_us) + epilogue_us / ctas_per_sm
    tiles_us = np.where(ctas_per_sm > 1, overlapping_us, waves * (mainloop_us + epilogue_us))
    tiles_us = np.maximum(tiles_us, _count_copied_bytes(halo) / BOX_BYTES_PER_US)
    launch_us = params.launch_us + loader_us + tiles_us
    launch_us = (
        launch_us + (waves > 1) * waves * params.tile_start_us + (config.split_k > 1) * params.split_k_cluster_us
    )
    return bound_by_memory(launch_us, ImplicitGemmShape.from_workload(w), params)


def _count_copied_bytes(halo: HaloTile) -> Any:
    """Return the bytes that all tiles copy to shared memory in boxes of pixels, those that no tap reads included."""
    if not np.any(halo.uses_boxes):
        return 0
    num_copies = halo.block_k / halo.of_boxes(lambda boxes: boxes.channels)
    tile_bytes = halo.num_channel_blocks * num_copies * halo.of_boxes(lambda boxes: boxes.nbytes)
    return np.where(halo.uses_boxes, halo.num_tiles * tile_bytes, 0)


def _estimate_transpose_us(halo: HaloTile) -> Any:
    """Return the time of the transpose of a channel block in shared memory."""
    if not np.any(halo.uses_boxes):
        return 0.0
    num_copies = halo.block_k / halo.of_boxes(lambda boxes: boxes.channels)
    matrices = num_copies * halo.of_boxes(lambda boxes: boxes.nbytes) / MATRIX_BYTES
    boxes = choose_pixel_boxes(halo.image.w, WGMMA_M, BOX_CHANNELS)  # of any size of the tile
    row_matrices = halo.rows * halo.config.block_k_bytes / MATRIX_BYTES
    moved = matrices if boxes.has_matrices else ELEMENTS_RATIO * row_matrices
    transpose_us = num_copies * COPY_TRANSPOSE_US + moved / (MATRICES_PER_US * halo.num_loader_warps)
    copies = 0 if boxes.uses_tma else matrices * MATRIX_BYTES / (WARP_SIZE * boxes.vector * boxes.itemsize)
    return np.maximum(transpose_us, copies / NARROW_COPIES_PER_US)


@functools.lru_cache(maxsize=256)
def list_best_halo_tiles(w: Conv, max_tiles: int, loader: str = HALO) -> tuple[HopperTileConfig, ...]:
    """Return the configs of a loader of halo rows that have the best estimates, one for each size of the tile."""
    options = {name: values for name, values in KNOB_OPTIONS.items() if not name.startswith("cluster")}
    options["block_k_bytes"] = BLOCK_K_BYTES_CHOICES
    options["producer_warpgroups"] = PRODUCER_WARPGROUPS_CHOICES
    tiles = HopperTileConfig.from_options(options, cluster_m=1, cluster_n=1, input_loader=loader)
    tiles = tiles.select_meeting([*isa_constraints(w), *resource_constraints(w), *halo_constraints(w)])
    best: dict[tuple[int, int], HopperTileConfig] = {}
    for index in np.argsort(estimate_halo_latency_us(tiles, w), kind="stable"):
        if len(best) == max_tiles:
            break
        config = tiles.row(int(index))
        best.setdefault((config.block_m, config.block_n), config)
    return tuple(best.values())
