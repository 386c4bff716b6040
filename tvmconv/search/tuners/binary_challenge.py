"""Challenges of the best config: configs with the opposite value of a binary knob, compared only with each other.

Different tiles are fast with and without shared memory, for example. A search that has tuned only one value expects
little of the other value, whose measured configs are not tuned. So some configs only need to improve on the best config
with the opposite value.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tvmconv.space.search_space import Space


@dataclass(frozen=True)
class KnobRestriction:
    """A restriction to configs with one option of a binary knob."""

    knob_index: int
    option_index: int  # index of the option, 0 or 1

    def mask_points(self, points: np.ndarray) -> np.ndarray:
        """Return which points (n, knobs) satisfy the restriction: bool (n,)."""
        return points[:, self.knob_index] == self.option_index


def restrict_to_opposite_value(space: Space, best_point: np.ndarray, turn_index: int) -> KnobRestriction | None:
    """Return the restriction to the opposite value of one binary knob of a point.

    The binary knobs take turns. The result is None if the space has none.
    """
    binary_knobs = [knob_index for knob_index, size in enumerate(space.sizes) if size == 2]
    if not binary_knobs:
        return None
    knob_index = binary_knobs[turn_index % len(binary_knobs)]
    return KnobRestriction(knob_index, 1 - int(best_point[knob_index]))
