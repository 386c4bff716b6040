"""Configs as a Gaussian process compares them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tvmconv.space import ChoiceKnob
from tvmconv.space.knobs import Knob
from tvmconv.space.search_space import Space


@dataclass(frozen=True)
class GPInputs:
    """Configs as the process compares them.

    Attributes:
        features: float (n, features).
        points: option indices, int32 (n, knobs): knobs are equal or not, whatever their features.
    """

    features: np.ndarray
    points: np.ndarray

    def __getitem__(self, indices: np.ndarray | slice) -> GPInputs:
        return GPInputs(self.features[indices], self.points[indices])


class GPInputEncoder:
    """What makes configs of a space alike: features, how often two divides a number, and which other knobs are equal.

    A block of 128 threads is often more like one of 64 than like one of 112: what is split, aligned or stored in banks
    goes by powers of two, and the logarithm of a number does not tell how many it holds.

    Args:
        space: where configs are compared.
        power_of_two_features: whether to look at how often two divides numbers.
        numeric_equality: whether it counts, too, if numbers are equal.
    """

    def __init__(self, space: Space, power_of_two_features: bool, numeric_equality: bool):
        knobs = list(space.knobs.values())
        self._power_of_two_counts = [
            (knob_index, _count_factors_of_two(knob))
            for knob_index, knob in enumerate(knobs)
            if power_of_two_features and _has_odd_factors(knob)
        ]
        # Of two options, the features tell all.
        self._equality_knobs = [
            knob_index
            for knob_index, knob in enumerate(knobs)
            if knob.size > 2 and (numeric_equality or not _is_numeric(knob))
        ]

    def encode(self, points: np.ndarray, features: np.ndarray) -> GPInputs:
        """Points (n, knobs) with their features (n, features), ready to compare."""
        power_columns = [
            factor_counts[points[:, knob_index]] for knob_index, factor_counts in self._power_of_two_counts
        ]
        return GPInputs(np.column_stack([features.astype(float), *power_columns]), points[:, self._equality_knobs])


def _is_numeric(knob: Knob) -> bool:
    return isinstance(knob, ChoiceKnob) and knob.option_table.dtype.kind in "biuf"


def _has_odd_factors(knob: Knob) -> bool:
    """Whether a knob is a choice of positive integers that are not all powers of two."""
    if (
        not isinstance(knob, ChoiceKnob)
        or knob.size < 3
        or knob.option_table.dtype.kind not in "iu"
        or knob.option_table.min() < 1
    ):
        return False
    return bool((knob.option_table & (knob.option_table - 1)).any())


def _count_factors_of_two(knob: Knob) -> np.ndarray:
    """How often two divides each option: float (options,)."""
    return np.log2(knob.option_table & -knob.option_table)
