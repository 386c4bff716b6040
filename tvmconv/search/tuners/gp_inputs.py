"""The encoding of configs as inputs of a Gaussian process."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tvmconv.space import ChoiceKnob
from tvmconv.space.knobs import Knob
from tvmconv.space.search_space import Space


@dataclass(frozen=True)
class GPInputs:
    """Encoded configs."""

    features: np.ndarray  # numeric features: float (n, features)
    points: np.ndarray  # option indices of knobs that are compared for equality only: int32 (n, knobs)

    def __getitem__(self, indices: np.ndarray | slice) -> GPInputs:
        return GPInputs(self.features[indices], self.points[indices])


class GPInputEncoder:
    """An encoder of configs by their features, the powers of two in their numbers, and the options of other knobs.

    A block of 128 threads often performs more like one of 64 than like one of 112, because splits, alignment and
    shared-memory banks depend on powers of two. The logarithm of a number does not show its power of two.
    """

    def __init__(self, space: Space, power_of_two_features: bool, numeric_equality: bool):
        knobs = list(space.knobs.values())
        self._power_of_two_counts = [
            (knob_index, _count_factors_of_two(knob))
            for knob_index, knob in enumerate(knobs)
            if power_of_two_features and _has_odd_factors(knob)
        ]
        # The features already distinguish the options of a binary knob.
        self._equality_knobs = [
            knob_index
            for knob_index, knob in enumerate(knobs)
            if knob.size > 2 and (numeric_equality or not _is_numeric(knob))
        ]

    def encode(self, points: np.ndarray, features: np.ndarray) -> GPInputs:
        """Return the encoded configs of points (n, knobs) with features (n, features)."""
        powers = [counts[points[:, knob_index]] for knob_index, counts in self._power_of_two_counts]
        return GPInputs(np.column_stack([features.astype(float), *powers]), points[:, self._equality_knobs])


def _is_numeric(knob: Knob) -> bool:
    return isinstance(knob, ChoiceKnob) and knob.option_table.dtype.kind in "biuf"


def _has_odd_factors(knob: Knob) -> bool:
    """Return whether a knob is a choice of positive integers that are not all powers of two."""
    if (
        not isinstance(knob, ChoiceKnob)
        or knob.size < 3
        or knob.option_table.dtype.kind not in "iu"
        or knob.option_table.min() < 1
    ):
        return False
    return bool((knob.option_table & (knob.option_table - 1)).any())


def _count_factors_of_two(knob: Knob) -> np.ndarray:
    """Return the exponent of two in each option: float (options,)."""
    return np.log2(knob.option_table & -knob.option_table)
