"""A genetic algorithm: good configs are crossed knob by knob, and changed a little."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np

from tvmconv.search.tuners.base import Tuner, list_legal_default_points
from tvmconv.space.mutation import Mutator
from tvmconv.space.search_space import Space

_NUM_STARTUP_TRIALS = 10  # successful configs, at random, before the first child is born
_MIN_POPULATION, _MAX_POPULATION = 8, 64  # the population: the fastest eighth of the configs known, within these limits
_OFFSPRING_PER_SLOT = 32  # children born for one that is wanted; illegal ones and known ones die
_MAX_OFFSPRING = 4096
_MUTATION_PROBABILITY = 0.85  # the share of children that are changed


class GeneticTuner(Tuner):
    """A steady-state genetic algorithm with elitism, tournaments of two and uniform crossover.

    The fastest configs of all are the population; a config that failed is the last to have children. (Mitchell, "An
    Introduction to Genetic Algorithms", MIT Press 1996, chapter 5.)
    """

    batch_size = 4

    def __init__(self, space: Space, seed: int = 0):
        super().__init__(space, seed)
        self._mutator = Mutator(space)

    def _select_points(self, max_configs: int, skip_model: bool) -> Iterable[np.ndarray]:
        if self._count_successes() < _NUM_STARTUP_TRIALS:
            return itertools.chain(list_legal_default_points(self.space), self._random_points)
        num_offspring = min(_OFFSPRING_PER_SLOT * max_configs, _MAX_OFFSPRING)
        population_size = min(max(len(self._evaluated) // 8, _MIN_POPULATION), _MAX_POPULATION)
        parents = self._sort_points_by_cost()[:population_size]
        # Parents are ordered by cost, so that the smaller of two random ranks is the winner of a tournament.
        parents_a, parents_b = parents[self._rng.integers(0, len(parents), size=(2, 2, num_offspring)).min(axis=1)]
        offspring = np.where(self._rng.random(parents_a.shape) < 0.5, parents_a, parents_b)
        is_mutated = self._rng.random(len(offspring)) < _MUTATION_PROBABILITY
        offspring[is_mutated] = self._mutator.mutate(offspring[is_mutated], self._rng)
        return offspring[self.space.is_legal(offspring)]
