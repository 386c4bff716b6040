"""Small steps from one point to another, as evolution and annealing take them."""

from __future__ import annotations

import numpy as np

from tvmconv.knobs import Knob, Split
from tvmconv.knobs.space import Space


class Moves:
    """Changes single knobs of points, mostly to a nearby option: one of half the distance is twice as likely.

    The distance of two splits counts the factors of two by which their parts differ, so that the nearest ones have one
    factor moved from one part to another. That of two numbers counts the options between them; words are all alike.
    """

    def __init__(self, space: Space):
        self._knobs = list(space.knobs.values())
        self._free = [place for place, size in enumerate(space.sizes) if size > 1]
        self._cumulative: dict[tuple[int, int], np.ndarray] = {}

    def mutate(self, points: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """The points, each with one knob changed; the result need not be legal."""
        mutated = points.copy()
        if self._free:
            places = rng.choice(self._free, len(points))
            draws = rng.random(len(points))
            for row, place, draw in zip(mutated, places.tolist(), draws.tolist(), strict=True):
                row[place] = np.searchsorted(self._likelihood(place, int(row[place])), draw, side="right")
        return mutated

    def _likelihood(self, place: int, option: int) -> np.ndarray:
        """The cumulative likelihood of the options that a knob may change to."""
        key = (place, option)
        if key not in self._cumulative:
            likelihood = 0.5 ** distances(self._knobs[place], option)
            likelihood[option] = 0
            cumulative = np.cumsum(likelihood)
            self._cumulative[key] = cumulative / cumulative[-1]
        return self._cumulative[key]


def distances(knob: Knob, option: int) -> np.ndarray:
    """How far the options of a knob are from one of them: float (size,)."""
    table = knob.table
    if isinstance(knob, Split):
        return np.abs(np.log2(table / table[option])).sum(axis=1)
    if table.dtype.kind in "biuf":
        rank = np.argsort(np.argsort(table))
        return np.abs(rank - rank[option]).astype(float)
    return np.ones(len(table))
