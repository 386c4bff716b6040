"""Rivals of the best config: those with the other option of a knob of two, judged among their like.

With shared memory and without, say, other tiles are fast. A search that has tuned one side alone expects little of the
other, of which it knows nothing that is tuned. So now and then a config need only improve on the other side's best.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tvmconv.space.search_space import Space


@dataclass(frozen=True)
class KnobRestriction:
    """The configs that have one option of a knob of two.

    Attributes:
        knob_index: of the knob.
        option_index: its index.
    """

    knob_index: int
    option_index: int

    def mask_points(self, points: np.ndarray) -> np.ndarray:
        """Which points (n, knobs) are on it: bool (n,)."""
        return points[:, self.knob_index] == self.option_index


def restrict_to_opposite_value(space: Space, best_point: np.ndarray, turn_index: int) -> KnobRestriction | None:
    """The side that a point is not on, of the knob of two whose turn it is.

    Args:
        space: the point's.
        best_point: the point, (knobs,).
        turn_index: which knob: they take turns.

    Returns:
        None where no knob has two options.
    """
    binary_knobs = [knob_index for knob_index, size in enumerate(space.sizes) if size == 2]
    if not binary_knobs:
        return None
    knob_index = binary_knobs[turn_index % len(binary_knobs)]
    return KnobRestriction(knob_index, 1 - int(best_point[knob_index]))
