"""Tiles: an axis split into nested loops with named factors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


class Tile:
    """An axis of `extent` iterations split into nested loops, each with a name and a factor, outermost first.

    The factors are ints for one config, or columns of shape (n,) for many configs, so one formula serves both. Each
    factor is an attribute with its level's name (`tile.thread`). The outermost factor is the number of tiles that cover
    the extent.

    Attributes:
        extent: Number of iterations of the axis.
        factors: Factors by level name, outermost first.

    Examples:
        >>> tile = Tile(56, {"block": 4, "thread": 7, "local": 2})
        >>> tile.size, tile.thread, tile.divides
        (14, 7, True)
    """

    def __init__(self, extent: int, factors: Mapping[str, Any]) -> None:
        self.extent = extent
        self.factors = dict(factors)

    @classmethod
    def from_column(cls, extent: int, levels: Sequence[str], column: np.ndarray | tuple[int, ...]) -> Tile:
        """Return the tile of one config's factors, without -1, or of many configs' as a column (n, levels)."""
        factors = column.T if isinstance(column, np.ndarray) else column
        return cls(extent, dict(zip(levels, factors, strict=True)))

    def __getattr__(self, level: str) -> Any:
        factors = self.__dict__.get("factors", {})
        if level not in factors:
            raise AttributeError(f"expected a tile level among {', '.join(factors)}, not {level!r}")
        return factors[level]

    def __repr__(self) -> str:
        return f"Tile({self.extent}, {self.factors})"

    @property
    def size(self) -> Any:
        """Number of iterations that the inner loops cover: the product of all factors except the outermost."""
        return math.prod(list(self.factors.values())[1:])

    @property
    def divides(self) -> Any:
        """Whether the tile size divides the extent, so that no tile overhangs the axis."""
        return self.extent % self.size == 0
