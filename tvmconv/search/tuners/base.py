"""The base class of tuners, which propose new configs and learn their costs, and the reference tuners."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Protocol

import numpy as np

from tvmconv.errors import KnobError
from tvmconv.space import Config
from tvmconv.space.mutation import Mutator
from tvmconv.space.search_space import Space

_NUM_STARTUP_TRIALS = 10  # number of successful random configs before the first crossover
_MIN_POPULATION, _MAX_POPULATION = 8, 64  # limits of the population, which is the fastest eighth of the learnt configs
_OFFSPRING_PER_SLOT = 32  # number of children for each requested config; illegal and known ones are dropped
_MAX_OFFSPRING = 4096
_MUTATION_PROBABILITY = 0.85
_GRID_BATCH_SIZE = 1 << 15  # number of points that a grid search checks at once


class Trial(Protocol):
    """A measured config that a tuner learns from, such as a record."""

    @property
    def config(self) -> Config:
        """Values by knob name."""

    @property
    def cost(self) -> float:
        """Seconds per launch; infinite if the config failed."""


class Tuner:
    """A search algorithm for one search space. The same seed and the same sequence of calls give the same proposals.
    Trials may be learnt in any order, even if this tuner did not propose their configs.
    """

    batch_size = 1  # preferred number of configs to propose before their costs are learnt

    def __init__(self, space: Space, seed: int = 0):
        self.space = space
        self._rng = np.random.default_rng(seed)
        self._claimed: set[bytes] = set()  # points that were proposed or learnt
        self._evaluated: dict[bytes, tuple[np.ndarray, float]] = {}
        self._random_points = self._iterate_random()

    def ask(self, max_configs: int, *, skip_model: bool = False) -> list[Config]:
        """Propose distinct legal configs that were not proposed or learnt before; none if the space is exhausted. With
        `skip_model`, too little time remains to load the libraries of a cost model, which takes seconds.
        """
        configs = self.claim_points(self._select_points(max_configs, skip_model), max_configs)
        return configs + self.claim_points(self._random_points, max_configs - len(configs))

    def ask_neighbors(self, config: Config, max_configs: int, *, skip_model: bool = False) -> list[Config]:
        """Propose configs that differ from `config` in one knob and are new, the most promising first. There are none
        if `config` is not in the space.
        """
        try:
            neighbors = self.space.list_neighbors(self.space.point_from_config(config))
        except KnobError:
            return []
        return self.claim_points(self._rank_points(neighbors[self._find_unclaimed(neighbors)], skip_model), max_configs)

    def claim_points(self, points: Iterable[np.ndarray], max_configs: int) -> list[Config]:
        """Return the configs of the first `max_configs` legal points that are new, and count them as proposed."""
        configs: list[Config] = []
        if max_configs < 1:
            return configs
        for point in points:
            key = point.tobytes()
            if key not in self._claimed:
                self._claimed.add(key)
                configs.append(self.space.config_from_point(point))
                if len(configs) == max_configs:
                    break
        return configs

    def tell(self, trials: Iterable[Trial]) -> None:
        """Learn the costs of configs; trials whose configs are not in the space are skipped."""
        for point, cost in iterate_points_and_costs(self.space, trials):
            self._claimed.add(point.tobytes())
            self._evaluated[point.tobytes()] = point, cost

    def _rank_points(self, points: np.ndarray, skip_model: bool) -> np.ndarray:
        """Return points (n, knobs) in the order in which to measure them; see `ask` for `skip_model`."""
        return self._rng.permutation(points)

    def _select_points(self, max_configs: int, skip_model: bool) -> Iterable[np.ndarray]:
        """Return the points to propose, the best first; `ask` leaves out claimed ones, and adds random points."""
        return ()

    def _list_legal_default(self) -> list[np.ndarray]:
        """Return the point of the default config, if it is legal."""
        point = self.space.point_from_config(self.space.default)
        return [point] if self.space.is_legal(point[None])[0] else []

    def _sort_points_by_cost(self) -> np.ndarray:
        """Return the learnt points (n, knobs), the fastest first and those that failed last."""
        evaluations = sorted(self._evaluated.values(), key=lambda evaluation: evaluation[1])
        return np.array([point for point, _ in evaluations], dtype=np.int32).reshape(-1, len(self.space.knobs))

    def _count_successes(self) -> int:
        """Return the number of learnt configs that did not fail."""
        return sum(math.isfinite(cost) for _, cost in self._evaluated.values())

    def _find_unclaimed(self, points: np.ndarray) -> np.ndarray:
        """Return which points were neither proposed nor learnt: bool (n,)."""
        return np.array([point.tobytes() not in self._claimed for point in points], dtype=bool)

    def _iterate_random(self) -> Iterator[np.ndarray]:
        """Yield legal points in random order, until all are claimed."""
        if self.space.enumerated_legal is not None:
            yield from self.space.sample_legal(len(self.space.enumerated_legal), self._rng)
            return
        while self._find_unclaimed(points := self.space.sample_legal(256, self._rng)).any():
            yield from points


class RandomTuner(Tuner):
    """Random search, which draws legal configs uniformly: the reference for the other tuners."""


class GridTuner(Tuner):
    """Grid search over all legal configs in the order of the space's index; `seed` has no effect."""

    def __init__(self, space: Space, seed: int = 0):
        super().__init__(space, seed)
        self._ordered_points = self._iterate_in_order()

    def _select_points(self, max_configs: int, skip_model: bool) -> Iterable[np.ndarray]:
        return self._ordered_points

    def _iterate_in_order(self) -> Iterator[np.ndarray]:
        if self.space.enumerated_legal is not None:
            yield from self.space.enumerated_legal
            return
        for start in range(0, self.space.size, _GRID_BATCH_SIZE):  # the space is too large to list in memory
            points = self.space.slice_points(start, _GRID_BATCH_SIZE)
            yield from points[self.space.is_legal(points)]


def iterate_points_and_costs(space: Space, trials: Iterable[Trial]) -> Iterator[tuple[np.ndarray, float]]:
    """Yield the points and costs of trials; trials whose configs are not in the space are left out."""
    for trial in trials:
        try:
            yield space.point_from_config(trial.config), trial.cost
        except KnobError:  # an older log may have values that are no longer in the space
            continue


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
