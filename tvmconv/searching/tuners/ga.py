"""A genetic algorithm: good configs are crossed knob by knob, and changed a little."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np

from tvmconv.knobs.moves import Moves
from tvmconv.knobs.space import Space
from tvmconv.searching.tuners.base import Tuner, default_point

_FOUNDERS = 10  # successful configs, at random, before the first child is born
_SMALLEST, _LARGEST = 8, 64  # the population: the fastest eighth of the configs known, within these limits
_LITTER = 32  # children born for one that is wanted; illegal ones and known ones die
_MOST_CHILDREN = 4096
_MUTATED = 0.85  # the share of children that are changed


class GeneticTuner(Tuner):
    """A steady-state genetic algorithm with elitism, tournaments of two and uniform crossover.

    The fastest configs of all are the population; a config that failed is the last to have children. (Mitchell, "An
    Introduction to Genetic Algorithms", MIT Press 1996, chapter 5.)
    """

    batch = 4

    def __init__(self, space: Space, seed: int = 0):
        super().__init__(space, seed)
        self._moves = Moves(space)

    def _choose(self, n: int, quick: bool) -> Iterable[np.ndarray]:
        if self._succeeded() < _FOUNDERS:
            return itertools.chain(default_point(self.space), self._random)
        litter = min(_LITTER * n, _MOST_CHILDREN)
        population = min(max(len(self._learnt) // 8, _SMALLEST), _LARGEST)
        parents = self._ranked()[:population]
        # Parents are ordered by cost, so that the smaller of two random ranks is the winner of a tournament.
        mothers, fathers = parents[self._rng.integers(0, len(parents), size=(2, 2, litter)).min(axis=1)]
        children = np.where(self._rng.random(mothers.shape) < 0.5, mothers, fathers)
        mutated = self._rng.random(len(children)) < _MUTATED
        children[mutated] = self._moves.mutate(children[mutated], self._rng)
        return children[self.space.legal(children)]
