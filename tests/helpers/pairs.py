"""Few combinations of choices in which every two of them meet."""

import itertools
from collections.abc import Iterable
from typing import Any


def in_pairs(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """The fewest combinations, one choice of each axis, that a greedy search finds for all pairs of choices."""
    places = range(len(axes))
    missing = {
        combination: {(i, j, combination[i], combination[j]) for i, j in itertools.combinations(places, 2)}
        for combination in itertools.product(*axes)
    }
    chosen = []
    while missing:
        best = max(missing, key=lambda combination: len(missing[combination]))
        chosen.append(best)
        met = missing[best]
        missing = {combination: left for combination, others in missing.items() if (left := others - met)}
    return chosen
