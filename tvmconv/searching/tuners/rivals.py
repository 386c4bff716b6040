"""Rivals of the best config: those with the other option of a knob of two, judged among their like.

With shared memory and without, say, other tiles are fast. A search that has tuned one side alone expects little of the
other, of which it knows nothing that is tuned. So now and then a config need only improve on the other side's best.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tvmconv.knobs.space import Space


@dataclass(frozen=True)
class Side:
    """The configs that have one option of a knob of two.

    Attributes:
        place: of the knob.
        option: its index.
    """

    place: int
    option: int

    def has(self, points: np.ndarray) -> np.ndarray:
        """Which points (n, knobs) are on it: bool (n,)."""
        return points[:, self.place] == self.option


def other_side(space: Space, best: np.ndarray, turn: int) -> Side | None:
    """The side that a point is not on, of the knob of two whose turn it is.

    Args:
        space: the point's.
        best: the point, (knobs,).
        turn: which knob: they take turns.

    Returns:
        None where no knob has two options.
    """
    places = [place for place, size in enumerate(space.sizes) if size == 2]
    if not places:
        return None
    place = places[turn % len(places)]
    return Side(place, 1 - int(best[place]))
