"""Configs as a Gaussian process compares them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tvmconv.knobs import Choice
from tvmconv.knobs.knobs import Knob
from tvmconv.knobs.space import Space


@dataclass(frozen=True)
class Rows:
    """Configs as the process compares them.

    Attributes:
        features: float (n, features).
        points: option indices, int32 (n, knobs): knobs are equal or not, whatever their features.
    """

    features: np.ndarray
    points: np.ndarray

    def __getitem__(self, chosen: np.ndarray | slice) -> Rows:
        return Rows(self.features[chosen], self.points[chosen])


class Comparison:
    """What makes configs of a space alike: features, how often two divides a number, and which other knobs are equal.

    A block of 128 threads is often more like one of 64 than like one of 112: what is split, aligned or stored in banks
    goes by powers of two, and the logarithm of a number does not tell how many it holds.

    Args:
        space: where configs are compared.
        twos: whether to look at how often two divides numbers.
        numbers: whether it counts, too, if numbers are equal.
    """

    def __init__(self, space: Space, twos: bool, numbers: bool):
        knobs = list(space.knobs.values())
        self._twos = [(place, _twos(knob)) for place, knob in enumerate(knobs) if twos and _has_odd_factors(knob)]
        # Of two options, the features tell all.
        self._compared = [
            place for place, knob in enumerate(knobs) if knob.size > 2 and (numbers or not _is_number(knob))
        ]

    def rows(self, points: np.ndarray, features: np.ndarray) -> Rows:
        """Points (n, knobs) with their features (n, features), ready to compare."""
        divided = [twos[points[:, place]] for place, twos in self._twos]
        return Rows(np.column_stack([features.astype(float), *divided]), points[:, self._compared])


def _is_number(knob: Knob) -> bool:
    return isinstance(knob, Choice) and knob.table.dtype.kind in "biuf"


def _has_odd_factors(knob: Knob) -> bool:
    """Whether a knob is a choice of positive integers that are not all powers of two."""
    if not isinstance(knob, Choice) or knob.size < 3 or knob.table.dtype.kind not in "iu" or knob.table.min() < 1:
        return False
    return bool((knob.table & (knob.table - 1)).any())


def _twos(knob: Knob) -> np.ndarray:
    """How often two divides each option: float (options,)."""
    return np.log2(knob.table & -knob.table)
