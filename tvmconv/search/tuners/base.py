"""What all tuners share: they propose configs that were not tried, and learn what those cost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Protocol

import numpy as np

from tvmconv.errors import KnobError
from tvmconv.space import Config
from tvmconv.space.search_space import Space


class Trial(Protocol):
    """What a tuner learns from; a record is one."""

    @property
    def config(self) -> Config:
        """Values by knob name."""

    @property
    def cost(self) -> float:
        """Seconds a launch; infinite if it failed."""


class Tuner:
    """Searches a space.

    The same seed and the same sequence of calls give the same proposals. What was measured may be learnt in any order,
    also when this tuner did not propose it.

    Attributes:
        batch_size: how many configs it likes to propose before it learns what they cost; it answers larger requests
            too.

    Args:
        space: where to search.
        seed: of the random numbers.
    """

    batch_size = 1

    def __init__(self, space: Space, seed: int = 0):
        self.space = space
        self._rng = np.random.default_rng(seed)
        self._claimed: set[bytes] = set()  # points proposed or learnt
        self._evaluated: dict[bytes, tuple[np.ndarray, float]] = {}
        self._random_points = self._iterate_random()

    def ask(self, max_configs: int, *, skip_model: bool = False) -> list[Config]:
        """Propose at most `max_configs` distinct legal configs that were not proposed or learnt before.

        Args:
            max_configs: how many.
            skip_model: whether there is too little time to load the libraries of a cost model, which takes seconds.

        Returns:
            The configs; none when the space is exhausted.
        """
        points = self._claim(self._select_points(max_configs, skip_model), max_configs)
        points += self._claim(self._random_points, max_configs - len(points))
        return [self.space.config_from_point(point) for point in points]

    def claim_points(self, points: Iterable[np.ndarray], max_configs: int) -> list[Config]:
        """The first `max_configs` of legal points that were not proposed or learnt before, which they count as from now
        on.
        """
        return [self.space.config_from_point(point) for point in self._claim(points, max_configs)]

    def ask_neighbors(self, config: Config, max_configs: int, *, skip_model: bool = False) -> list[Config]:
        """At most `max_configs` configs that differ from one in a single knob, as `claim_points`: what seems best
        first.

        None where the config is not in the space; `skip_model` as of `ask`.
        """
        try:
            neighbors = self.space.list_neighbors(self.space.point_from_config(config))
        except KnobError:
            return []
        unclaimed = neighbors[self._find_unclaimed(neighbors)] if len(neighbors) else neighbors
        return self.claim_points(self._rank_points(unclaimed, skip_model), max_configs)

    def tell(self, trials: Iterable[Trial]) -> None:
        """Take notice of what configs cost; those that are not in the space are passed over."""
        for point, cost in iterate_points_and_costs(self.space, trials):
            self._claimed.add(point.tobytes())
            self._evaluated[point.tobytes()] = point, cost

    def _rank_points(self, points: np.ndarray, skip_model: bool) -> np.ndarray:
        """Points (n, knobs) in the order in which to measure them; `skip_model` as of `ask`."""
        return self._rng.permutation(points)

    def _select_points(self, max_configs: int, skip_model: bool) -> Iterable[np.ndarray]:
        """The points to propose, the best first; those taken are left out afterwards, and random ones fill up.

        The arguments are those of `ask`.
        """
        return ()

    def _sort_points_by_cost(self) -> np.ndarray:
        """The learnt points, the fastest first and those that failed last: (n, knobs)."""
        evaluations = sorted(self._evaluated.values(), key=lambda evaluation: evaluation[1])
        return np.array([point for point, _ in evaluations], dtype=np.int32).reshape(-1, len(self.space.knobs))

    def _count_successes(self) -> int:
        """How many of the learnt configs did not fail."""
        return sum(math.isfinite(cost) for _, cost in self._evaluated.values())

    def _find_unclaimed(self, points: np.ndarray) -> np.ndarray:
        """Which points were neither proposed nor learnt: bool (n,)."""
        return np.array([point.tobytes() not in self._claimed for point in points], dtype=bool)

    def _claim(self, points: Iterable[np.ndarray], max_points: int) -> list[np.ndarray]:
        """The first `max_points` fresh points, which are taken with that."""
        claimed: list[np.ndarray] = []
        if max_points < 1:
            return claimed
        for point in points:
            key = point.tobytes()
            if key not in self._claimed:
                self._claimed.add(key)
                claimed.append(point)
                if len(claimed) == max_points:
                    break
        return claimed

    def _iterate_random(self) -> Iterator[np.ndarray]:
        """Legal points in random order, until there is none left that is fresh."""
        if self.space.enumerated_legal is not None:
            yield from self.space.sample_legal(len(self.space.enumerated_legal), self._rng)
            return
        while self._find_unclaimed(points := self.space.sample_legal(256, self._rng)).any():
            yield from points


def iterate_points_and_costs(space: Space, trials: Iterable[Trial]) -> Iterator[tuple[np.ndarray, float]]:
    """The trials as points of a space; those that are not in it are left out."""
    for trial in trials:
        try:
            yield space.point_from_config(trial.config), trial.cost
        except KnobError:  # an older log may hold values that are no longer searched
            continue


def list_legal_default_points(space: Space) -> list[np.ndarray]:
    """The default config, if it is legal."""
    point = space.point_from_config(space.default)
    return [point] if space.is_legal(point[None])[0] else []
