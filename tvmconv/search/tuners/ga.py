"""A genetic algorithm, which crosses fast configs knob by knob and mutates them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np

from tvmconv.search.tuners.base import Tuner
from tvmconv.space.mutation import Mutator
from tvmconv.space.search_space import Space

_NUM_STARTUP_TRIALS = 10  # number of successful random configs before the first crossover
_MIN_POPULATION, _MAX_POPULATION = 8, 64  # limits of the population, which is the fastest eighth of the learnt configs
_OFFSPRING_PER_SLOT = 32  # number of children for each requested config; illegal and known ones are dropped
_MAX_OFFSPRING = 4096
_MUTATION_PROBABILITY = 0.85


class GeneticTuner(Tuner):
    """A steady-state genetic algorithm with elitism, tournaments of two and uniform crossover. The population consists
    of the fastest configs of all trials. Source: Mitchell, "An Introduction to Genetic Algorithms", 1996, chapter 5.
    """

    batch_size = 4

    def __init__(self, space: Space, seed: int = 0):
        super().__init__(space, seed)
        self._mutator = Mutator(space)

    def _select_points(self, max_configs: int, skip_model: bool) -> Iterable[np.ndarray]:
        if self._count_successes() < _NUM_STARTUP_TRIALS:
            return itertools.chain(self._list_legal_default(), self._random_points)
        num_offspring = min(_OFFSPRING_PER_SLOT * max_configs, _MAX_OFFSPRING)
        population_size = min(max(len(self._evaluated) // 8, _MIN_POPULATION), _MAX_POPULATION)
        parents = self._sort_points_by_cost()[:population_size]
        # Parents are ordered by cost, so the smaller of two random indices wins the tournament.
        parents_a, parents_b = parents[self._rng.integers(0, len(parents), size=(2, 2, num_offspring)).min(axis=1)]
        offspring = np.where(self._rng.random(parents_a.shape) < 0.5, parents_a, parents_b)
        is_mutated = self._rng.random(len(offspring)) < _MUTATION_PROBABILITY
        offspring[is_mutated] = self._mutator.mutate(offspring[is_mutated], self._rng)
        return offspring[self.space.is_legal(offspring)]
