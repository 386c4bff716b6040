"""Choice of the best tile configs by their estimates, for defaults and for the start of a search."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ...tile_config import Rule
from .tile_config import HopperTileConfig

WIDE_BOX = 64  # 16-bit elements of a box of an MN-major operand that fill the widest swizzle


def list_best(
    options: Mapping[str, Sequence[Any]],
    rules: Sequence[Rule],
    estimate: Callable[[HopperTileConfig], Any],
    max_tiles: int,
    *,
    prefers_wide_boxes: bool = False,
    **fixed: Any,
) -> list[tuple[HopperTileConfig, float]]:
    """Return the configs with the best estimates among those that meet all rules, one for each size of the tile.

    Args:
        options: Options by name of the attribute.
        rules: The rules.
        estimate: Function that returns the latencies of configs in microseconds.
        max_tiles: Maximum number of configs.
        prefers_wide_boxes: Whether boxes of operand B as wide as the widest swizzle are preferred to narrow ones. The
            estimate does not know the cost of the latter.
        fixed: Values of further attributes.

    Returns:
        The configs with their estimates, the best first.
    """
    wide = [block_n for block_n in options["block_n"] if block_n % WIDE_BOX == 0]
    for widths in [wide, options["block_n"]] if prefers_wide_boxes else [options["block_n"]]:
        legal = HopperTileConfig.from_options({**options, "block_n": widths}, **fixed).select_meeting(rules)
        if np.size(legal.block_n):
            estimates = np.asarray(estimate(legal))
            order = np.argsort(estimates, kind="stable")
            _, first_of_tile = np.unique((legal.block_m << 16 | legal.block_n)[order], return_index=True)
            best = order[np.sort(first_of_tile)[:max_tiles]].tolist()
            return [(legal.row(index), float(estimates[index])) for index in best]
    return []


def select_best(
    options: Mapping[str, Sequence[Any]],
    rules: Sequence[Rule],
    estimate: Callable[[HopperTileConfig], Any],
    *,
    prefers_wide_boxes: bool = False,
    **fixed: Any,
) -> tuple[HopperTileConfig | None, float]:
    """Return the config with the best estimate and that estimate; None and infinity if no config meets all rules."""
    best = list_best(options, rules, estimate, 1, prefers_wide_boxes=prefers_wide_boxes, **fixed)
    return best[0] if best else (None, math.inf)
