"""Mutations of points in a search space, for evolutionary search and simulated annealing."""

from __future__ import annotations

import numpy as np

from tvmconv.space import Knob, SplitKnob
from tvmconv.space.search_space import Space


class Mutator:
    """Operator that changes a knob of each point, mostly to a nearby option: half the distance is twice as likely.
    The distance between two splits is the number of factors of two by which their factors differ; the nearest splits
    move one factor from one level to another. The distance between two numbers is the number of options between them.
    Words are equally distant from each other. A word decides which values of other knobs are legal, so that half of its
    changes come with a change of another knob.
    """

    def __init__(self, space: Space):
        self._knobs = list(space.knobs.values())
        self._mutable_knob_indices = [knob_index for knob_index, size in enumerate(space.sizes) if size > 1]
        self._words = [index for index in self._mutable_knob_indices if _has_words(self._knobs[index])]
        self._cumulative_probabilities: dict[tuple[int, int], np.ndarray] = {}

    def mutate(self, points: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Return the points with one knob changed each, or two if the first is a word; the results may be illegal."""
        mutated = points.copy()
        if self._mutable_knob_indices:
            changed = self._change_one_knob(mutated, rng)
            if self._words:
                has_two_changes = np.isin(changed, self._words) & (rng.random(len(points)) < 0.5)
                twice_mutated = mutated[has_two_changes]
                self._change_one_knob(twice_mutated, rng)
                mutated[has_two_changes] = twice_mutated
        return mutated

    def _change_one_knob(self, points: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Change one knob of each point in place, and return the indices of the knobs (n,)."""
        knob_indices = rng.choice(self._mutable_knob_indices, len(points))
        draws = rng.random(len(points))
        for row, knob_index, draw in zip(points, knob_indices.tolist(), draws.tolist(), strict=True):
            row[knob_index] = np.searchsorted(
                self._option_probabilities(knob_index, int(row[knob_index])), draw, side="right"
            )
        return knob_indices

    def _option_probabilities(self, knob_index: int, option: int) -> np.ndarray:
        """Return the cumulative probabilities of the options to which a knob may change."""
        key = (knob_index, option)
        if key not in self._cumulative_probabilities:
            probabilities = 0.5 ** compute_option_distances(self._knobs[knob_index], option)
            probabilities[option] = 0
            cumulative_probabilities = np.cumsum(probabilities)
            self._cumulative_probabilities[key] = cumulative_probabilities / cumulative_probabilities[-1]
        return self._cumulative_probabilities[key]


def _has_words(knob: Knob) -> bool:
    """Return whether the options of a knob are words, which have no order."""
    return not isinstance(knob, SplitKnob) and knob.option_table.dtype.kind not in "biuf"


def compute_option_distances(knob: Knob, option: int) -> np.ndarray:
    """Return the distance of each option of a knob from one option: float (size,)."""
    option_table = knob.option_table
    if isinstance(knob, SplitKnob):
        return np.abs(np.log2(option_table / option_table[option])).sum(axis=1)
    if not _has_words(knob):
        option_ranks = np.argsort(np.argsort(option_table))
        return np.abs(option_ranks - option_ranks[option]).astype(float)
    return np.ones(len(option_table))
