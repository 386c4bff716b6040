"""Tiles: how an axis is cut into nested loops, by named factors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


class Tile:
    """An axis of `extent` cut into nested loops, each with a name and a factor, outermost first.

    The factors are ints, of one config, or columns (n,), of many: a formula over tiles serves both. A factor is an
    attribute by its name (`tile.thread`); the outermost is as many as it takes to cover the extent.

    Attributes:
        extent: of the axis.
        factors: by name, outermost first.
    """

    def __init__(self, extent: int, factors: Mapping[str, Any]) -> None:
        self.extent = extent
        self.factors = dict(factors)

    @classmethod
    def from_column(cls, extent: int, levels: Sequence[str], column: np.ndarray) -> Tile:
        """The tiles of many configs.

        Args:
            extent: of the axis.
            levels: names of the factors, outermost first.
            column: the factors, (n, levels), without -1.
        """
        return cls(extent, dict(zip(levels, column.T, strict=True)))

    def __getattr__(self, level: str) -> Any:
        factors = self.__dict__.get("factors", {})
        if level not in factors:
            raise AttributeError(f"the tile has no level {level!r}: {', '.join(factors)}")
        return factors[level]

    def __repr__(self) -> str:
        return f"Tile({self.extent}, {self.factors})"

    @property
    def size(self) -> Any:
        """What the inner loops cover together: all factors but the outermost, multiplied."""
        return math.prod(list(self.factors.values())[1:])

    @property
    def divides(self) -> Any:
        """Whether no tile overhangs the axis."""
        return self.extent % self.size == 0

    def size_below(self, level: str) -> Any:
        """What the loops inside a level cover together."""
        names = list(self.factors)
        return math.prod([self.factors[name] for name in names[names.index(level) + 1 :]])
