"""Choice of the default among all tile configs of a gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ...tile_config import Rule
from .tile_config import HopperTileConfig

WIDE_BOX = 64  # 16-bit elements of a box of an MN-major operand that fill the widest swizzle


def select_best(
    options: Mapping[str, Sequence[Any]],
    rules: Sequence[Rule],
    estimate: Callable[[HopperTileConfig], Any],
    **fixed: int,
) -> tuple[HopperTileConfig | None, float]:
    """Return the config with the best estimate among those that meet all rules, if there is one, and that estimate.

    Boxes as wide as the widest swizzle are preferred to narrow ones, whose cost the estimate does not know.
    """
    legal = HopperTileConfig.from_options(options, **fixed).select_meeting(rules)
    has_wide_boxes = legal.block_n % WIDE_BOX == 0
    if np.any(has_wide_boxes):
        legal = legal.filter(has_wide_boxes)
    if not np.size(legal.block_n):
        return None, math.inf
    estimates = estimate(legal)
    index = int(np.argmin(estimates))
    return legal.row(index), float(estimates[index])
