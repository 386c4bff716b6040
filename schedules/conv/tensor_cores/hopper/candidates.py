"""Choice of the default among all tile configs of a gradient."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .tile_config import HopperTileConfig

Rule = tuple[str, Callable[[HopperTileConfig], Any]]

WIDE_BOX = 64  # 16-bit elements of a box of an MN-major operand that fill the widest swizzle


def select_best(
    options: Mapping[str, Sequence[int]],
    make_config: Callable[[Mapping[str, Any]], HopperTileConfig],
    rules: Sequence[Rule],
    estimate: Callable[[HopperTileConfig], Any],
) -> tuple[dict[str, int], float]:
    """Return the knob values with the best estimate among configs that meet all rules, and that estimate.

    Boxes as wide as the widest swizzle are preferred to narrow ones, whose cost the estimate does not know.
    """
    grid = np.meshgrid(*options.values(), indexing="ij")
    columns = {name: column.ravel() for name, column in zip(options, grid, strict=True)}
    config = make_config(columns)
    allowed = functools.reduce(np.logical_and, (predicate(config) for _, predicate in rules))
    has_wide_boxes = np.asarray(columns["block_n"]) % WIDE_BOX == 0
    if np.any(allowed & has_wide_boxes):
        allowed = allowed & has_wide_boxes
    if not np.any(allowed):
        return {}, math.inf
    legal = {name: column[allowed] for name, column in columns.items()}
    estimates = estimate(make_config(legal))
    index = int(np.argmin(estimates))
    return {name: column[index].item() for name, column in legal.items()}, float(estimates[index])
