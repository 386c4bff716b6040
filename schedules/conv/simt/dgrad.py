"""Gradients of inputs, and transposed convolutions, in float32 on the FMA units: the kernel of `mma_sync` on dY.

A small launch transposes the weight, so that the reduction is contiguous in both operands. A lane loads two elements of
each of its rows and columns at once, and multiplies them where `mma_sync` has an mma of TF32. All else is that of
`mma_sync`: with a stride, each residue class of the pixels has its taps, and no product is one with an inserted zero.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from tvm.s_tir import Schedule

from tvmconv.arithmetic import ceil_div
from tvmconv.registry import schedule
from tvmconv.space import Knobs
from tvmconv.target import H200, L2_CLOCKS, SCHEDULERS, WARP_SIZE
from tvmconv.workloads.conv_gradient import InputGradient
from tvmconv.workloads.dtypes import ACCUMULATOR

from ..gradient_conversion import view_channels_last
from ..gradient_operators import DGRAD, TRANSPOSE
from ..tensor_cores.gemm.fma_mainloop import FmaPairAtom
from ..tensor_cores.implicit_gemm_shape import ACCUMULATOR_BYTES, ImplicitGemmShape
from ..tensor_cores.mma_sync.dgrad import build_gradient, compute_gradient_usage, is_gradient_promising
from ..tensor_cores.mma_sync.latency import list_candidates
from ..tensor_cores.mma_sync.strided_dgrad import FIXED_KNOBS, make_mean_shape
from ..tensor_cores.mma_sync.tile_config import MmaSyncTileConfig, list_options
from ..tensor_cores.pixel_tiles import REDUCTION_CYCLES, count_resident_ctas
from ..tensor_cores.residue_product import ResidueProduct
from ..tile_config import combine_overlapping

MIN_CHANNELS = 8  # of dX and of dY in each group
STARTING_TILES = 8  # configs with which a search starts besides the default, each of another tile
MAX_REGISTERS, OVERHEAD_REGISTERS = 216, 56  # per thread; with more, ptxas spilled some
TILE_CYCLES = 120  # of the barrier and the addresses of a K tile
WORKSPACE_BYTES_PER_CYCLE = 2500  # of the second kernel of a split reduction, for the whole GPU


def has_enough_channels(w: InputGradient) -> bool:
    """Return whether the channels of a group fill the columns of a warp."""
    return is_gradient_promising(w) and min(w.C, w.O) // w.groups >= MIN_CHANNELS


def estimate_registers(config: MmaSyncTileConfig) -> Any:
    """Return the estimated registers per thread, with two sets of fragments."""
    atom = FmaPairAtom
    fmas_m = config.block_m // (config.warps_m * atom.m)
    fmas_n = config.block_n // (config.warps_n * atom.n)
    return config.num_accumulators + 2 * (atom.a_registers * fmas_m + atom.b_registers * fmas_n) + OVERHEAD_REGISTERS


def estimate_cycles(config: MmaSyncTileConfig, shape: ImplicitGemmShape) -> Any:
    """Return the estimated latency of configs in clock cycles: the issue of the busiest SM, or a CTA alone."""
    atom, warps = FmaPairAtom, config.warps_m * config.warps_n * config.warps_k
    fmas_m = config.block_m // (config.warps_m * atom.m)
    fmas_n = config.block_n // (config.warps_n * atom.n)
    k_tiles, blocks_per_sm = config.k_tiles_per_block(shape), ceil_div(config.num_blocks(shape), H200.multiprocessors)
    elements = k_tiles * config.block_k / config.warps_k  # of the reduction of a warp
    instructions = 4 * fmas_m * fmas_n + fmas_m + fmas_n  # for one of them
    resident = count_resident_ctas(config.stages * config.stage_bytes(shape), estimate_registers(config), warps)
    alone = elements * instructions + k_tiles * (TILE_CYCLES + L2_CLOCKS / (config.stages - 1))
    issue = blocks_per_sm * warps * elements * instructions / SCHEDULERS
    sums = config.split_k * shape.num_products * shape.m * shape.n
    reduction = REDUCTION_CYCLES + 2 * ACCUMULATOR_BYTES * sums / WORKSPACE_BYTES_PER_CYCLE
    cycles = combine_overlapping(issue, ceil_div(blocks_per_sm, resident) * alone)
    return cycles + np.where(config.split_k > 1, reduction, 0)


@functools.lru_cache(maxsize=64)
def list_starting_configs(w: InputGradient) -> list[dict[str, Any]]:
    """Return the configs with the best estimates, one for each size of the tile."""
    viewed = view_channels_last(w)
    conv = viewed.direct_convolution
    shape = ImplicitGemmShape.from_workload(conv) if conv else make_mean_shape(ResidueProduct.from_workload(viewed))
    configs = list_candidates(shape.itemsize, shape.spatial_ndim)
    is_allowed = configs.has_k_tile_in_each_part(shape) & ((configs.split_k == 1) | (conv is not None))
    is_allowed &= (estimate_registers(configs) <= MAX_REGISTERS) & (configs.num_threads >= SCHEDULERS * WARP_SIZE)
    configs = configs.filter(is_allowed)
    estimates = estimate_cycles(configs, shape)
    order = np.argsort(estimates, kind="stable")
    _, first_of_tile = np.unique((configs.block_m << 16 | configs.block_n)[order], return_index=True)
    best = order[np.sort(first_of_tile)[:STARTING_TILES]].tolist()
    names = [name for name in list_options(shape.itemsize) if conv or name not in FIXED_KNOBS]
    return [{name: getattr(config, name) for name in names} for config in map(configs.row, best)]


@schedule(
    *(*DGRAD, *TRANSPOSE),
    dtypes=(ACCUMULATOR,),
    usage=compute_gradient_usage,
    search_if=has_enough_channels,
    starting_configs=list_starting_configs,
    supersedes=("implicit_gemm", "tiling"),
    device_kinds=("cuda",),
    min_arch=80,
)
def simt(s: Schedule, w: InputGradient, k: Knobs) -> Schedule:
    """Emit the kernel of the convolution of dY, or of one for each residue class, which reads a transposed weight."""
    return build_gradient(w, k)
