"""The product of a wgrad for `hopper`: parts of the reduction as groups, and the knobs of its tiles and parts."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from tvmconv.arithmetic import ceil_div, round_up
from tvmconv.space import Knobs
from tvmconv.workloads import Conv
from tvmconv.workloads.conv_gradient import WeightGradient
from tvmconv.workloads.dtypes import ACCUMULATOR

from ...tile_config import Rule, declare_choices
from ..implicit_gemm_shape import ACCUMULATOR_BYTES, ImplicitGemmShape
from .candidates import WIDE_BOX, list_best
from .constraints import (
    MIN_BOX_COLUMNS,
    count_equal_registers,
    isa_constraints,
    prune_narrow_boxes,
    require_whole_slices,
    resource_constraints,
)
from .knobs import MAX_LATENCY_RATIO, STARTING_TILES, can_compute_several_tiles
from .product_family import ProductFamily
from .tile_config import (
    COOPERATIVE,
    COOPERATIVE_SETMAXNREG,
    DATA_PARALLEL,
    K_SLICES_CHOICES,
    KERNEL_SCHEDULES,
    KNOB_OPTIONS,
    NUM_MULTIPROCESSORS,
    RASTER_ORDERS,
    REALLOCATED_WGMMA_M_TILES_CHOICES,
    STAGES_CHOICES,
    SUM_DECOMPOSITIONS,
    HopperTileConfig,
)

PART_PIXELS = 128  # parts are whole K tiles of any size
PARTS_CHOICES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 14, 16, 20, 22, 24, 28, 30, 32, 40, 44, 48, 66, 88, 132)
CLUSTER_CHOICES, MAX_CLUSTER_SIZE = (1, 2, 4, 8), 8  # CTAs along an axis, and in all, of a cluster
COLUMN_UNITS = (64, 32, 16)  # channels per box
MAX_PADDING = 1 / 8  # of columns, for wider boxes
MAX_PADDING_OF_NARROW_BOXES = 1 / 3  # of columns, for boxes of 64 bytes instead of 32, which TMA copies slowly
REDUCTION_LAUNCH_US, WORKSPACE_BYTES_PER_US = 1.2, 5.0e6  # fitted to 240 configs of six layers on an H200
# Latency of reductions split within clusters over their estimate, relative to that of parts in a workspace. SMs of a
# cluster load different pixels, so that fewer requests of neighbours coincide (two layers on an H100).
SPLIT_LATENCY_RATIO = 1.15
SLICES_LATENCY_RATIO = 1.05  # likewise of k-tiles that warpgroups divide, which were faster in two of seven layers
# Configs with which a search starts besides the default. In four seconds it tries some 80, of which hardly one of those
# that it drew itself was faster, on an H200.
STARTING_CONFIGS = 19
# Further ones: tiles that do not fill wide boxes, clusters that share an operand, and tiles of which K tiles of another
# size are tried.
NUM_NARROW_CONFIGS, NUM_SHARING_CONFIGS, NUM_TWINS = 4, 4, 4
TWIN_BLOCK_K_BYTES = (128, 256)
MAX_PARTS_OF_SEVERAL_TILES = 8  # of products large enough for CTAs that compute several tiles of each part


@dataclass(frozen=True)
class PartialProduct:
    """The product of a wgrad in parts, with the attributes of a convolution that `hopper` reads.

    It is a convolution of one line of filters as pixels, and each part of the reduction of each group is a group.
    """

    output_size: tuple[int]  # number of filters of a group
    # Columns of all parts and groups.
    O: int  # noqa: E741  the field's own letter
    C: int  # pixels of all parts, once for each group
    groups: int  # number of parts × groups
    storage: str  # storage dtype of the operands
    min_bytes: int  # minimum number of bytes moved from and to memory
    N: int = 1
    spatial_ndim: int = 1
    kernel: tuple[int] = (1,)
    stride: tuple[int] = (1,)
    dilation: tuple[int] = (1,)
    epilogue: tuple[str, ...] = ()
    argument_dtypes: tuple[str, ...] = (ACCUMULATOR,)


def make_product(w: WeightGradient, num_parts: int) -> Conv:
    """Return the product in parts of whole K tiles; there are fewer if some would have no pixels."""
    forward = w.forward
    pixels, columns = forward.N * math.prod(forward.output_size), choose_columns_per_tap(forward)
    part = round_up(ceil_div(pixels, num_parts), PART_PIXELS)
    parts = ceil_div(pixels, part)
    n = math.prod(forward.kernel) * columns
    filters, groups = forward.O // forward.groups, forward.groups * parts
    product = PartialProduct((filters,), n * groups, part * groups, groups, forward.storage, w.min_bytes)
    if stores_result(w, parts):
        product = replace(product, epilogue=w.epilogue, argument_dtypes=w.argument_dtypes[-1:])
    return cast("Conv", product)


def stores_result(w: WeightGradient, num_parts: int) -> bool:
    """Return whether the kernel stores dK itself: the reduction is whole, and columns are those of dK."""
    return num_parts * w.groups == 1 and choose_columns_per_tap(w.forward) == w.C


def choose_columns_per_tap(w: Conv) -> int:
    """Return the channels of X of a group, padded to whole boxes: wide boxes unless much would be padding.

    If channels do not fill the narrowest boxes either, more padding is permitted for boxes of twice their width.
    """
    channels, (_, medium, narrow) = w.C // w.groups, COLUMN_UNITS
    padded = {unit: round_up(channels, unit) for unit in COLUMN_UNITS}
    if channels % narrow and padded[medium] <= (1 + MAX_PADDING_OF_NARROW_BOXES) * channels:
        padded.pop(narrow)
        return min(padded.values())
    wide = [columns for columns in padded.values() if columns <= (1 + MAX_PADDING) * channels]
    return wide[0] if wide else min(padded.values())


@functools.lru_cache(maxsize=64)
def make_family(w: WeightGradient) -> ProductFamily:
    """Return the products for all numbers of parts that differ."""
    products = {product.groups // w.groups: product for product in (make_product(w, parts) for parts in PARTS_CHOICES)}
    shapes = {parts: ImplicitGemmShape.from_workload(product) for parts, product in sorted(products.items())}
    other_us = {
        parts: 0.0
        if stores_result(w, parts)
        else REDUCTION_LAUNCH_US + 2 * shape.groups * shape.m * shape.n * ACCUMULATOR_BYTES / WORKSPACE_BYTES_PER_US
        for parts, shape in shapes.items()
    }
    return ProductFamily("parts", {parts: products[parts] for parts in shapes}, other_us)


def has_kernel_schedules(w: WeightGradient) -> bool:
    """Return whether dK is so large that a CTA may compute several tiles of useful size of a whole reduction."""
    return can_compute_several_tiles(make_family(w).products[1])


def list_options(w: WeightGradient) -> dict[str, Sequence[Any]]:
    """Return the options of all knobs but the parts."""
    options = KNOB_OPTIONS | {"k_slices": K_SLICES_CHOICES, "cluster_m": CLUSTER_CHOICES, "cluster_n": CLUSTER_CHOICES}
    if not has_kernel_schedules(w):
        return options
    return options | {
        "wgmma_m_tiles": REALLOCATED_WGMMA_M_TILES_CHOICES,
        "kernel_schedule": KERNEL_SCHEDULES,
        "raster_order": RASTER_ORDERS,
        "decomposition": SUM_DECOMPOSITIONS,
    }


def constraints(w: WeightGradient, num_parts: int) -> list[Rule]:
    """Return the constraints on tile configs for a number of parts."""
    product = make_family(w).products[num_parts]
    box = math.gcd(choose_columns_per_tap(w.forward), COLUMN_UNITS[0])
    return [
        *isa_constraints(product),
        *resource_constraints(product),
        require_whole_slices(product.storage, a_is_mn_major=True),
        (f"a cluster has at most {MAX_CLUSTER_SIZE} CTAs", lambda t: t.cluster_size <= MAX_CLUSTER_SIZE),
        ("boxes are at least a narrow swizzle wide", lambda t: np.gcd(t.block_n, box) >= COLUMN_UNITS[-1]),
    ]


def pruning_constraints(w: WeightGradient, num_parts: int) -> list[Rule]:
    """Return the conditions under which a config with a number of parts is worth searching."""
    family, (_, best_us) = make_family(w), select_default(w)
    gemm = ImplicitGemmShape.from_workload(family.products[num_parts])
    return [
        (
            "a reduction is split within clusters only if tiles are few",
            lambda t: (t.split_k == 1) | (t.num_tiles(gemm) <= NUM_MULTIPROCESSORS),
        ),
        prune_narrow_boxes(choose_columns_per_tap(w.forward)),
        ("tiles are less than twice as high as the product", lambda t: t.block_m < 2 * max(gemm.m, 64)),
        ("tiles are less than twice as wide as the product", lambda t: t.block_n < 2 * max(gemm.n, 16)),
        (
            "there are at most as many stages as k-tiles",
            lambda t: (t.stages <= t.k_tiles_per_cta(gemm) + 1) | (t.stages == STAGES_CHOICES[0]),
        ),
        *_list_rules_of_several_tiles(family.products[num_parts], gemm),
        (
            "the order of tiles changes only if CTAs compute several",
            lambda t: (t.raster_order == RASTER_ORDERS[0]) | t.computes_several_tiles(gemm),
        ),
        (
            f"the estimated latency is at most {MAX_LATENCY_RATIO} times the best estimate",
            lambda t: family.estimate_us(t, num_parts) <= MAX_LATENCY_RATIO * best_us,
        ),
    ]


def _list_rules_of_several_tiles(product: Conv, gemm: ImplicitGemmShape) -> list[Rule]:
    return [
        (
            "warpgroups take turns only if some CTA computes several tiles",
            lambda t: np.logical_not(t.is_pingpong) | t.computes_several_tiles(gemm),
        ),
        (
            "registers are reallocated only if an equal share does not suffice",
            lambda t: (
                (t.kernel_schedule != COOPERATIVE_SETMAXNREG)
                | (t.estimate_registers() > count_equal_registers(t, product))
            ),
        ),
    ]


@functools.lru_cache(maxsize=64)
def list_best_configs(w: WeightGradient) -> list[tuple[dict[str, int], float]]:
    """Return the knob values with the best estimates of several tiles and numbers of parts, and these estimates.

    The best ones come first. Others follow that an estimate does not rank well: tiles that do not fill wide boxes, K
    tiles of another size, and CTAs that share an operand.
    """
    widths, min_box = KNOB_OPTIONS["block_n"], math.gcd(choose_columns_per_tap(w.forward), MIN_BOX_COLUMNS)
    wide, narrow = (
        _list_best_tiles(
            w, [n for n in widths if (n % WIDE_BOX == 0) == is_wide and math.gcd(n, MIN_BOX_COLUMNS) >= box]
        )
        for is_wide, box in ((True, 0), (False, min_box))
    )
    best = (wide or narrow)[: STARTING_CONFIGS + 1]
    best_by_width = {config["block_n"]: (config, latency_us) for config, latency_us in reversed(narrow)}
    narrow = sorted(best_by_width.values(), key=lambda entry: entry[1])[:NUM_NARROW_CONFIGS] if wide else []
    sharing = _list_sharing_configs(w)
    twins = [
        twin for ranked in (best, narrow, sharing) for entry in ranked[:NUM_TWINS] for twin in _list_twins(w, *entry)
    ]
    known, more = [config for config, _ in best], list[tuple[dict[str, int], float]]()
    for config, latency_us in (*narrow, *sharing, *twins):
        if config not in known:
            known.append(config)
            more.append((config, latency_us))
    return [*best, *more]


def _list_twins(w: WeightGradient, config: dict[str, int], latency_us: float) -> list[tuple[dict[str, int], float]]:
    """Return the config with K tiles of twice or half the size, and as many stages as fit, if that is legal."""
    values = dict(config)
    parts, block_k_bytes = values.pop("parts"), values["block_k_bytes"]
    others = [size for size in TWIN_BLOCK_K_BYTES if block_k_bytes in TWIN_BLOCK_K_BYTES and size != block_k_bytes]
    twins = []
    for size in others:
        options = {"stages": sorted(STAGES_CHOICES, reverse=True)}
        fixed = {name: value for name, value in values.items() if name != "stages"} | {"block_k_bytes": size}
        legal = HopperTileConfig.from_options(options, **fixed).select_meeting(constraints(w, parts))
        if np.size(legal.stages):
            twins.append(({**config, "block_k_bytes": size, "stages": int(np.max(legal.stages))}, latency_us))
    return twins


def _list_sharing_configs(w: WeightGradient) -> list[tuple[dict[str, int], float]]:
    """Return the best configs of one tile along an axis, whose operand the CTAs along the other axis share in clusters.

    All CTAs of a part read the same tile of this operand. For 216 to 216 channels, clusters of four took 12.3 µs on an
    H200, and the best config without a shared operand 16.3.
    """
    family, best = make_family(w), dict[tuple[int, int], tuple[dict[str, int], float]]()
    for parts, product in family.products.items():
        gemm = ImplicitGemmShape.from_workload(product)
        rules: list[Rule] = [
            *constraints(w, parts),
            (
                "CTAs along one axis share the operand of the other, along which there is one tile",
                functools.partial(_shares_operand, gemm),
            ),
            ("all CTAs run at a time", functools.partial(_has_one_wave, gemm)),
        ]
        options, estimate = KNOB_OPTIONS | {"split_k": (1,)}, functools.partial(family.estimate_us, value=parts)
        for config, latency_us in list_best(options, rules, estimate, NUM_SHARING_CONFIGS):
            tile = int(config.block_m), int(config.block_n)
            if tile not in best or latency_us < best[tile][1]:
                values = {name: getattr(config, name) for name in list_options(w)}
                best[tile] = {**values, "parts": parts}, latency_us
    return sorted(best.values(), key=lambda entry: entry[1])[:NUM_SHARING_CONFIGS]


def _shares_operand(gemm: ImplicitGemmShape, t: HopperTileConfig) -> Any:
    shares_columns = (t.block_n >= gemm.n) & (t.cluster_n == 1) & (t.cluster_m > 1)
    shares_rows = (t.block_m >= gemm.m) & (t.cluster_m == 1) & (t.cluster_n > 1) & (t.block_n % WIDE_BOX == 0)
    return shares_columns | shares_rows


def _has_one_wave(gemm: ImplicitGemmShape, t: HopperTileConfig) -> Any:
    return t.num_tiles(gemm) <= t.max_active_ctas


def _list_best_tiles(w: WeightGradient, widths: Sequence[int]) -> list[tuple[dict[str, int], float]]:
    family, best = make_family(w), dict[tuple[Any, ...], tuple[dict[str, int], float]]()
    for parts in family.products:
        gemm = ImplicitGemmShape.from_workload(family.products[parts])

        def estimate(config: HopperTileConfig, parts: int = parts) -> Any:
            ratio = np.where(config.split_k > 1, SPLIT_LATENCY_RATIO, 1.0)
            return family.estimate_us(config, parts) * ratio * np.where(config.k_slices > 1, SLICES_LATENCY_RATIO, 1.0)

        for options, fixed in _list_tile_families(w, parts):
            rules = constraints(w, parts)
            if fixed:
                rules += _list_rules_of_several_tiles(family.products[parts], gemm)
            tiles = list_best(options | {"block_n": widths}, rules, estimate, STARTING_TILES + 1, **fixed)
            for config, latency_us in tiles:
                how = config.kernel_schedule, config.decomposition, config.k_slices
                tile = config.block_m, config.block_n, parts, *how
                if tile not in best or latency_us < best[tile][1]:
                    values = {name: getattr(config, name) for name in list_options(w)}
                    best[tile] = {**values, "parts": parts}, latency_us
    return sorted(best.values(), key=lambda entry: entry[1])


def _list_tile_families(w: WeightGradient, parts: int) -> list[tuple[dict[str, Sequence[Any]], dict[str, Any]]]:
    """Return options and fixed values of configs for a number of parts: data-parallel and cooperative ones first."""
    options = KNOB_OPTIONS | ({} if parts == 1 else {"split_k": (1,)})
    families = [(options, dict[str, Any]()), (options | {"warpgroups": (2,)}, {"k_slices": K_SLICES_CHOICES[-1]})]
    if not has_kernel_schedules(w) or parts > MAX_PARTS_OF_SEVERAL_TILES:
        return families
    alone = KNOB_OPTIONS | {"split_k": (1,), "cluster_m": (1,), "cluster_n": (1,)}
    for kernel_schedule in KERNEL_SCHEDULES:
        for decomposition in SUM_DECOMPOSITIONS:
            if (kernel_schedule, decomposition) == (COOPERATIVE, DATA_PARALLEL):
                continue
            fixed = {"kernel_schedule": kernel_schedule, "decomposition": decomposition}
            reallocated = {} if kernel_schedule == COOPERATIVE else {"wgmma_m_tiles": REALLOCATED_WGMMA_M_TILES_CHOICES}
            families.append((alone | reallocated, fixed))
    return families


def select_default(w: WeightGradient) -> tuple[dict[str, int], float]:
    """Return the knob values with the best estimate, and that estimate in microseconds."""
    return list_best_configs(w)[0]


def declare_knobs(w: WeightGradient, k: Knobs) -> tuple[HopperTileConfig, int]:
    """Declare the knobs, with defaults that suit the workload, and return the tile config and the number of parts."""
    family, (default, _) = make_family(w), select_default(w)
    options = list_options(w) | {"parts": list(family.products)}
    missing = {"split_k": 1, "kernel_schedule": COOPERATIVE, "k_slices": 1}  # of older configs
    values = {
        name: k.choice(name, options.pop(name), default[name], missing=value)
        for name, value in missing.items()
        if name in options
    }
    values |= declare_choices(k, options, default)
    parts = values.pop("parts")
    family.add_rules(k, functools.partial(constraints, w), functools.partial(pruning_constraints, w))
    return HopperTileConfig(**values), parts
