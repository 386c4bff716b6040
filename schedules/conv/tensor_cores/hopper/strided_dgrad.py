"""Strided gradients of inputs, and strided transposed convolutions, on Hopper's tensor cores, in one launch.

The taps that reach a pixel of dX depend on its position modulo stride, so pixels are divided into residue classes, and
each class is a convolution of dY of stride 1 with the taps that it has. A work tile belongs to one class, and its
reduction runs over the taps of this class alone. Nothing is multiplied by the zeros between the elements of dY. Tiles
of classes without taps, as three of the four of a 1×1 filter of stride 2, store zeros or the epilogue of zeros. Zeros
need no accumulators and no shared memory: warps store them as vectors.

One tensor map serves all classes: TMA copies dY in im2col mode at stride 1, and where a class starts is a part of the
offsets. Pixels of a class are not contiguous in dX, so warps store vectors of channels in place of TMA.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from tvmconv import tensor_map as maps
from tvmconv.arithmetic import ceil_div
from tvmconv.fitted_latency import H200_FIT
from tvmconv.space import Columns, Knobs
from tvmconv.space.search_space import ResourceUsage
from tvmconv.workloads import Conv
from tvmconv.workloads.conv_gradient import InputGradient
from tvmconv.workloads.dtypes import get_itemsize

from ....tir_builder import Buffer
from ...tile_config import Rule, add_rules
from ..gemm.problem import make_strided_dgrad
from ..gemm.residue_classes import ResidueClasses
from ..implicit_gemm_shape import ACCUMULATOR_BYTES, VECTOR_BYTES, ImplicitGemmShape
from ..residue_product import ResidueProduct
from .candidates import select_best
from .constraints import isa_constraints, prune_narrow_boxes, require_whole_slices, resource_constraints
from .kernel import emit_kernel
from .knobs import can_compute_several_tiles, compute_usage, declare_knobs
from .latency import estimate_latency_us
from .starting_configs import list_starting_configs
from .tile_config import (
    DATA_PARALLEL,
    KERNEL_SCHEDULES,
    KNOB_OPTIONS,
    REALLOCATED_WGMMA_M_TILES_CHOICES,
    HopperTileConfig,
)
from .tma_requirements import WGMMA_K_BYTES


def can_load_by_tma(w: InputGradient) -> bool:
    """Return whether TMA can copy both operands: channels fill 16-byte chunks, and offsets and corners are in range."""
    forward, product = w.forward, ResidueProduct.from_workload(w)
    shape, axes = product.shape, product.residues.axes
    max_corner, max_offset = maps.CORNER_LIMITS[w.spatial_ndim + 2], maps.OFFSET_LIMITS[w.spatial_ndim + 2]
    last_corners = [
        axis.lower_corner + axis.positions - size for axis, size in zip(axes, forward.output_size, strict=True)
    ]
    channel_bytes = VECTOR_BYTES if shape.groups == 1 else WGMMA_K_BYTES
    return (
        shape.channels_per_group * shape.itemsize % channel_bytes == 0
        and shape.n * shape.itemsize % VECTOR_BYTES == 0
        and all(axis.max_offset < max_offset for axis in axes)
        and all(-max_corner <= corner < max_corner for corner in (*(a.lower_corner for a in axes), *last_corners))
    )


def is_promising(w: InputGradient) -> bool:
    """Return whether each group has enough input and output channels for wgmma."""
    shape = ResidueProduct.from_workload(w).shape
    return can_load_by_tma(w) and shape.channels_per_group * shape.itemsize >= WGMMA_K_BYTES and shape.n >= 16


def _get_residues(product: Conv) -> ResidueClasses:
    return cast("ResidueProduct", product).residues


def make_product(w: InputGradient) -> Conv:
    """Return the products, as `hopper` reads them."""
    return cast("Conv", ResidueProduct.from_workload(w))


def estimate_us(config: HopperTileConfig, product: Conv) -> Any:
    """Return the estimated latency in microseconds, which is that of the CTA whose tiles have most taps.

    CTAs take tiles of all classes in turn, those with most taps first. Tiles without taps are only stored.
    """
    shape, residues, params = ImplicitGemmShape.from_workload(product), _get_residues(product), H200_FIT.hopper
    num_ctas = config.num_tiles(shape) * config.split_k
    num_ctas = np.minimum(num_ctas, config.max_active_ctas * config.ctas_per_sm(product)) // config.split_k
    taps = tuple(residues.num_taps(residue) for residue in range(residues.count))
    work = _find_longest_work(taps, config.num_tiles(shape) // residues.count, num_ctas)
    store_us = params.tile_start_us + params.epilogue_us_per_accumulator * config.num_accumulators
    return estimate_latency_us(
        config,
        product,
        waves=work.tiles,
        k_tiles=work.taps / work.tiles * config.k_tiles_per_tap(shape) / config.split_k,
        other_us=work.empty_tiles * store_us / (1 + config.is_pingpong),
    )


class CtaWork(NamedTuple):
    """The tiles of a CTA: those with taps, the taps of all of them, and those without taps."""

    tiles: Any
    taps: Any
    empty_tiles: Any


def _find_longest_work(taps: tuple[int, ...], tiles_per_class: Any, num_ctas: Any) -> CtaWork:
    """Return the work of the CTA whose tiles have most taps, for each number of tiles and of CTAs."""
    tiles_per_class, num_ctas = np.broadcast_arrays(tiles_per_class, num_ctas)
    pairs, index = np.unique(np.stack([tiles_per_class.ravel(), num_ctas.ravel()]), axis=1, return_inverse=True)
    work = np.reshape([_find_longest_work_once(taps, *pair) for pair in pairs.T.tolist()], (-1, 3))
    return CtaWork(*(column[index].reshape(np.shape(num_ctas)) for column in work.T))


@functools.lru_cache(maxsize=4096)
def _find_longest_work_once(taps: tuple[int, ...], tiles_per_class: int, num_ctas: int) -> CtaWork:
    """Return the work of the CTA whose tiles have most taps; CTAs take them as `TileScheduler` distributes them."""
    num_tiles = tiles_per_class * len(taps)
    tile_taps = np.full(ceil_div(num_tiles, num_ctas) * num_ctas, -1)  # -1: there is no tile
    tile_taps[:num_tiles] = np.repeat(taps, tiles_per_class)
    rounds = tile_taps.reshape(-1, num_ctas)
    if len(set(taps)) > 1:
        rounds[1::2] = rounds[1::2, ::-1]
    totals, tiles = np.sum(np.maximum(rounds, 0), axis=0), np.sum(rounds > 0, axis=0)
    slowest = int(np.lexsort((tiles, totals))[-1])
    return CtaWork(int(tiles[slowest]), int(totals[slowest]), int(np.sum(rounds[:, slowest] == 0)))


def constraints(product: Conv) -> list[Rule]:
    """Return the constraints on tile configs besides those of `hopper`."""
    return [
        require_whole_slices(cast("ResidueProduct", product).forward.storage),
        ("CTAs do not divide tiles of the last wave, whose classes differ", lambda t: t.decomposition == DATA_PARALLEL),
    ]


@functools.lru_cache(maxsize=256)
def select_default(product: Conv) -> HopperTileConfig:
    """Return the config with the best estimate; ping-pong hides the stores that follow short reductions."""
    options: dict[str, Sequence[Any]] = dict(KNOB_OPTIONS)
    if can_compute_several_tiles(product):
        options |= {"wgmma_m_tiles": REALLOCATED_WGMMA_M_TILES_CHOICES, "kernel_schedule": KERNEL_SCHEDULES}
    rules = [*isa_constraints(product), *resource_constraints(product), *constraints(product)]
    config, _ = select_best(options, rules, lambda t: estimate_us(t, product), prefers_wide_boxes=True)
    assert config is not None, "the narrowest tiles are always legal"
    return config


def compute_strided_usage(w: InputGradient, columns: Columns) -> ResourceUsage:
    """Return the resources that configs use; work is the mean of all residue classes."""
    product, residues = make_product(w), ResidueProduct.from_workload(w).residues
    quantities = compute_usage(product, columns).to_columns()
    share = residues.total_taps / (residues.count * residues.max_taps)
    work = {name: quantities[name] * share for name in ("steps", "products", "traffic")}
    estimate = estimate_us(HopperTileConfig.of_workload(columns, product), product)
    return ResourceUsage(**quantities | work | {"estimate": estimate}, estimate_seconds_per_unit=1e-6)


def declare_strided_knobs(w: InputGradient, k: Knobs) -> HopperTileConfig:
    """Declare the knobs of `hopper`, with defaults that suit the workload, and return their values."""
    product = make_product(w)
    config = declare_knobs(product, k, select_default(product), estimate_us)
    pruned = [prune_narrow_boxes(w.C // w.groups)] if get_itemsize(w.storage) < ACCUMULATOR_BYTES else []
    add_rules(k, lambda columns: HopperTileConfig.of_workload(columns, product), constraints(product), pruned)
    return config


def list_strided_starting_configs(w: InputGradient) -> list[dict[str, Any]]:
    """Return the configs with which a search starts; see `list_starting_configs`."""
    product = make_product(w)
    return list_starting_configs(product, select_default(product), estimate_us, constraints(product))


def emit_strided_dgrad(w: InputGradient, config: HopperTileConfig, arguments: dict[str, Buffer]) -> None:
    """Emit the kernel; arguments have the names of a forward convolution of dY."""
    product = make_product(w)
    problem = make_strided_dgrad(w.forward, ImplicitGemmShape.from_workload(product))
    emit_kernel(product, config, arguments, make_problem=lambda *_: problem)
