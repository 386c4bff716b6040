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
    wide = [block_n for block_n in options["block_n"] if block_n % WIDE_BOX == 0]
    for widths in (wide, options["block_n"]):
        legal = HopperTileConfig.from_options({**options, "block_n": widths}, **fixed).select_meeting(rules)
        if np.size(legal.block_n):
            estimates = estimate(legal)
            index = int(np.argmin(estimates))
            return legal.row(index), float(estimates[index])
    return None, math.inf
