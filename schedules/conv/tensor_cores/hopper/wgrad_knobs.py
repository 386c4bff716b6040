"""Knobs of the wgrads of `hopper`: tiles and parts of the reduction, which of them a search tries, and the default."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tvmconv.space import Knobs
from tvmconv.workloads import Conv
from tvmconv.workloads.conv_gradient import WeightGradient

from ...tile_config import Rule, declare_choices
from ..implicit_gemm_shape import ImplicitGemmShape
from .candidates import WIDE_BOX, list_best
from .constraints import MIN_BOX_COLUMNS, count_equal_registers, prune_narrow_boxes
from .knobs import MAX_LATENCY_RATIO
from .starting_configs import STARTING_TILES
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
from .wgrad_product import choose_columns_per_tap, constraints, has_kernel_schedules, list_options, make_family

# Latency of reductions split within clusters over their estimate, relative to that of parts in a workspace. SMs of a
# cluster load different pixels, so that fewer requests of neighbours coincide (two layers on an H100).
SPLIT_LATENCY_RATIO = 1.15
SLICES_LATENCY_RATIO = 1.05  # likewise of k-tiles that warpgroups divide, which were faster in two of seven layers
# Configs with which a search starts besides the default. In four seconds it tries some 80, of which hardly one of those
# that it drew itself was faster, on an H200.
STARTING_CONFIGS = 19
# Further ones: tiles that do not fill wide boxes, clusters that share an operand, and those of each kind of which K
# tiles of another size are tried.
NUM_NARROW_CONFIGS, NUM_SHARING_CONFIGS, NUM_K_TILES = 4, 4, 4
OTHER_BLOCK_K_BYTES = {128: 256, 256: 128}  # size of the K tiles that are tried as well
MAX_PARTS_OF_SEVERAL_TILES = 8  # of products large enough for CTAs that compute several tiles of each part
Ranking = list[tuple[dict[str, Any], float]]  # knob values of configs, and their estimates in microseconds


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
def list_best_configs(w: WeightGradient) -> Ranking:
    """Return the knob values with the best estimates of several tiles and numbers of parts, and these estimates.

    The best ones come first. Others follow that an estimate does not rank well: tiles that do not fill wide boxes, CTAs
    that share an operand, and K tiles of another size.
    """
    widths, min_box = KNOB_OPTIONS["block_n"], math.gcd(choose_columns_per_tap(w.forward), MIN_BOX_COLUMNS)
    wide = _list_best_tiles(w, [n for n in widths if n % WIDE_BOX == 0])
    narrow = _list_best_tiles(w, [n for n in widths if n % WIDE_BOX and math.gcd(n, MIN_BOX_COLUMNS) >= min_box])
    best = (wide or narrow)[: STARTING_CONFIGS + 1]
    narrow, sharing = _select_widths(narrow) if wide else [], _list_sharing_configs(w)
    k_tiles = [_change_k_tile(w, *entry) for ranking in (best, narrow, sharing) for entry in ranking[:NUM_K_TILES]]
    configs, known = list(best), [config for config, _ in best]
    for entry in (*narrow, *sharing, *filter(None, k_tiles)):
        if entry[0] not in known:
            known.append(entry[0])
            configs.append(entry)
    return configs


def _select_widths(ranking: Ranking) -> Ranking:
    """Return the best configs of different widths."""
    best_by_width = {config["block_n"]: (config, latency_us) for config, latency_us in reversed(ranking)}
    return sorted(best_by_width.values(), key=lambda entry: entry[1])[:NUM_NARROW_CONFIGS]


def _change_k_tile(w: WeightGradient, config: dict[str, Any], latency_us: float) -> tuple[dict[str, Any], float] | None:
    """Return the config with K tiles of the other size, and as many stages as fit; None if that is not legal."""
    block_k_bytes = OTHER_BLOCK_K_BYTES.get(config["block_k_bytes"])
    if block_k_bytes is None:
        return None
    changed = {**config, "block_k_bytes": block_k_bytes}
    fixed = {name: value for name, value in changed.items() if name not in ("stages", "parts")}
    legal = HopperTileConfig.from_options({"stages": STAGES_CHOICES}, **fixed)
    stages = legal.select_meeting(constraints(w, config["parts"])).stages
    return ({**changed, "stages": int(np.max(stages))}, latency_us) if np.size(stages) else None


def _list_sharing_configs(w: WeightGradient) -> Ranking:
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


def _list_best_tiles(w: WeightGradient, widths: Sequence[int]) -> Ranking:
    """Return the configs with the best estimates of several tiles of some widths and numbers of parts."""
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
