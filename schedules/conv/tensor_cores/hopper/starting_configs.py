"""Configs with which a search of `hopper` starts: the best estimates of each kind that estimates do not rank well."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from tvmconv.workloads import Conv

from ...tile_config import Rule
from ..implicit_gemm_shape import ImplicitGemmShape
from ..promotion import has_eight_bits, needs_promotion
from .candidates import list_best
from .constraints import can_store_wide_boxes, isa_constraints, resource_constraints
from .knobs import Estimate, can_compute_several_tiles, can_evict_output, can_keep_filters, pruning_constraints
from .latency import estimate_latency_us, list_promotion_options
from .tile_config import (
    COOPERATIVE,
    COOPERATIVE_SETMAXNREG,
    FIRST,
    KERNEL_SCHEDULES,
    KNOB_OPTIONS,
    MAX_SWIZZLE_BYTES,
    NARROW_LAST_WAVE,
    PINGPONG,
    REALLOCATED_WGMMA_M_TILES_CHOICES,
    RESIDENT,
    SPLIT_LAST_WAVE,
    WIDE,
    HopperTileConfig,
)
from .tma_requirements import can_pad_lines, describe_lines, list_taps_per_copy_of_whole_lines

# Kernel schedules of the first configs, in this order; each entry takes another tile. Of 22 layers that were timed, one
# of the two best estimates in ping-pong was within 2.1 % of its fastest kernel on all but one.
STARTING_KERNEL_SCHEDULES = (PINGPONG, COOPERATIVE, PINGPONG, COOPERATIVE, COOPERATIVE_SETMAXNREG)
# The same for sums that are promoted: in ping-pong, tensor cores wait for each promotion.
STARTING_FLOAT8_SCHEDULES = (COOPERATIVE_SETMAXNREG, COOPERATIVE, COOPERATIVE_SETMAXNREG, COOPERATIVE, PINGPONG)
STARTING_TILES = 4  # configs of a gradient that has no kernel schedules
NEAR_RATIO = 1.05  # maximum ratio of the estimates of narrower tiles in the last wave to the best one
NUM_RESIDENT_CONFIGS = 4  # configs whose CTAs keep filters
NUM_WIDE_CONFIGS = 2  # configs that have wide boxes, besides those with resident filters
NUM_EVICTING_CONFIGS = 2  # configs whose output leaves L2 first
Ranking = list[tuple[HopperTileConfig, float]]  # configs and their estimates in microseconds


@dataclasses.dataclass(frozen=True)
class TileOptions:
    """The tiles of a product from which the best ones are chosen."""

    w: Conv  # the convolution, as TMA views it, or the product of a gradient
    options: Mapping[str, Sequence[Any]]  # options by knob
    rules: Sequence[Rule]
    estimate: Estimate
    is_gradient: bool  # whether operand B is MN-major, in boxes whose width matters

    def replace_options(self, **options: Sequence[Any]) -> TileOptions:
        """Return the tiles with other options of some knobs."""
        return dataclasses.replace(self, options={**self.options, **options})

    def list_best(self, max_tiles: int, **fixed: Any) -> Ranking:
        """Return the configs of several tiles with the best estimates; `fixed` has values of further attributes."""
        prefers_wide_boxes = self.is_gradient and fixed.get("filters") != RESIDENT
        fixed |= describe_lines(self.w)
        return list_best(
            *(self.options, self.rules, lambda t: self.estimate(t, self.w), max_tiles),
            prefers_wide_boxes=prefers_wide_boxes,
            **fixed,
        )

    def get_knob_values(self, config: HopperTileConfig) -> dict[str, Any]:
        """Return the values of the knobs of a config."""
        names = (*self.options, "kernel_schedule", "raster_order", "decomposition")
        return {name: getattr(config, name) for name in names}


def list_starting_configs(
    w: Conv,
    default: HopperTileConfig | None = None,
    estimate: Estimate = estimate_latency_us,
    rules: Sequence[Rule] = (),
    *,
    keeps_filters: bool = False,
) -> list[dict[str, Any]]:
    """Return the configs with which a search starts: the best estimates of several tiles for each kernel schedule.

    Others divide the last wave, if an estimate is lower with it. Every second one keeps filters, if that is possible.
    Where the kernel schedule is no knob, there are the best estimates of several tiles for a gradient and for operands
    of 8 bits. There are none for other convolutions, for which the cost model has some.

    Args:
        w: The convolution, as TMA views it, or the product of a gradient.
        default: Config with the best estimate of a gradient, whose operand B is MN-major; None for a convolution.
        estimate: Function that returns the latencies of configs in microseconds.
        rules: Rules of a gradient besides those of a convolution.
        keeps_filters: Whether a CTA may keep filters.
    """
    rules = [*isa_constraints(w), *resource_constraints(w), *rules]
    rules += pruning_constraints(w, estimate, float(estimate(default, w)) if default else None)
    options = KNOB_OPTIONS | {"taps_per_copy": list_taps_per_copy_of_whole_lines(w)} | list_promotion_options(w)
    tiles = TileOptions(w, options, rules, estimate, default is not None)
    if not can_compute_several_tiles(w):
        ranking = tiles.list_best(STARTING_TILES) if tiles.is_gradient or has_eight_bits(w) else []
        return [tiles.get_knob_values(config) for config, _ in ranking]
    tiles = tiles.replace_options(wgmma_m_tiles=REALLOCATED_WGMMA_M_TILES_CHOICES)
    ranking = _list_kernel_schedules(tiles)
    ranking += _list_last_waves(tiles, min((latency_us for _, latency_us in ranking), default=math.inf))
    ranking += _list_padded_lines(tiles)
    configs = [tiles.get_knob_values(config) for config, _ in ranking]
    resident = _list_resident_filters(tiles) if keeps_filters else []
    kept = [{**tiles.get_knob_values(config), "filters": RESIDENT} for config, _ in resident]
    pairs = itertools.zip_longest(configs, kept)  # a short search tries the best of both
    return [config for pair in pairs for config in pair if config]


def _list_kernel_schedules(tiles: TileOptions) -> Ranking:
    """Return the best configs of each kernel schedule."""
    schedules = STARTING_FLOAT8_SCHEDULES if needs_promotion(tiles.w) else STARTING_KERNEL_SCHEDULES
    best = {name: iter(tiles.list_best(schedules.count(name), kernel_schedule=name)) for name in KERNEL_SCHEDULES}
    ranking = [entry for name in schedules if (entry := next(best[name], None))]
    if has_eight_bits(tiles.w) and not needs_promotion(tiles.w):
        # Three warpgroups in turn were fastest in 7 of 17 comparisons on an H200, which estimates do not tell.
        ranking += tiles.replace_options(warpgroups=(3,)).list_best(1, kernel_schedule=PINGPONG)
    return ranking


def _list_last_waves(tiles: TileOptions, best_us: float) -> Ranking:
    """Return configs whose CTAs divide the tiles of the last wave; `best_us` is the best estimate of the others."""
    split, narrow = (
        [
            entry
            for name in (PINGPONG, COOPERATIVE)
            for entry in tiles.list_best(1, kernel_schedule=name, decomposition=decomposition)
        ]
        for decomposition in (SPLIT_LAST_WAVE, NARROW_LAST_WAVE)
    )
    best_split = min(split, key=lambda entry: entry[1], default=None)
    ranking = [best_split] if best_split and best_split[1] < best_us else []
    return ranking + [entry for entry in narrow if entry[1] < NEAR_RATIO * best_us]


def _list_padded_lines(tiles: TileOptions) -> Ranking:
    """Return configs whose taps share copies of lines that are padded, if that is possible.

    Whole swizzles of channels were fastest for three layers of 64 channels on an H200, unlike their estimates.
    """
    w = tiles.w
    if not can_pad_lines(w) or w.kernel[-1] == 1:
        return []
    gemm = ImplicitGemmShape.from_workload(w)
    tiles = tiles.replace_options(taps_per_copy=(w.kernel[-1],))
    if gemm.channels_per_group * gemm.itemsize % MAX_SWIZZLE_BYTES == 0:
        tiles = tiles.replace_options(block_k_bytes=(MAX_SWIZZLE_BYTES,))
    return [entry for name in (PINGPONG, COOPERATIVE) for entry in tiles.list_best(2, kernel_schedule=name)]


def _list_resident_filters(tiles: TileOptions) -> Ranking:
    """Return the best configs whose CTAs keep filters."""
    ranking = [
        entry for name in KERNEL_SCHEDULES for entry in tiles.list_best(2, kernel_schedule=name, filters=RESIDENT)
    ]
    return sorted(ranking, key=lambda entry: entry[1])[:NUM_RESIDENT_CONFIGS]


def add_output_configs(w: Conv, configs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the configs with which a search starts, and some of them with other stores of the output.

    The first ones have outputs that leave L2 first, and the first ones with narrow boxes also have wide ones.
    """
    viewed_workload = w.to_channels_last()
    evicting = configs[:NUM_EVICTING_CONFIGS] if can_evict_output(w) else ()
    wide = [{**config, "output_boxes": WIDE} for config in configs] if can_keep_filters(w, viewed_workload) else []
    wide = [c for c in wide if can_store_wide_boxes(HopperTileConfig.of_workload(c, viewed_workload), viewed_workload)]
    resident, streamed = ([c for c in wide if ("filters" in c) == is_resident] for is_resident in (True, False))
    wide = [*resident, *streamed[:NUM_WIDE_CONFIGS]]
    return [*configs, *wide, *({**config, "output_eviction": FIRST} for config in evicting)]
