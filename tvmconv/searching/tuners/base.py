"""What all tuners share: they propose configs that were not tried, and learn what those cost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Protocol

import numpy as np

from tvmconv.errors import KnobError
from tvmconv.knobs import Config
from tvmconv.knobs.space import Space


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
        batch: how many configs it likes to propose before it learns what they cost; it answers larger requests too.

    Args:
        space: where to search.
        seed: of the random numbers.
    """

    batch = 1

    def __init__(self, space: Space, seed: int = 0):
        self.space = space
        self._rng = np.random.default_rng(seed)
        self._taken: set[bytes] = set()  # points proposed or learnt
        self._learnt: dict[bytes, tuple[np.ndarray, float]] = {}
        self._random = self._at_random()

    def propose(self, n: int, *, quick: bool = False) -> list[Config]:
        """Propose at most `n` distinct legal configs that were not proposed or learnt before.

        Args:
            n: how many.
            quick: whether there is too little time to load the libraries of a cost model, which takes seconds.

        Returns:
            The configs; none when the space is exhausted.
        """
        chosen = self._take(self._choose(n, quick), n)
        chosen += self._take(self._random, n - len(chosen))
        return [self.space.config(point) for point in chosen]

    def take(self, points: Iterable[np.ndarray], n: int) -> list[Config]:
        """The first `n` of legal points that were not proposed or learnt before, which they count as from now on."""
        return [self.space.config(point) for point in self._take(points, n)]

    def take_near(self, config: Config, n: int, *, quick: bool = False) -> list[Config]:
        """At most `n` configs that differ from one in a single knob, as `take`: what seems best first.

        None where the config is not in the space; `quick` as of `propose`.
        """
        try:
            near = self.space.neighbours(self.space.point(config))
        except KnobError:
            return []
        fresh = near[self._fresh(near)] if len(near) else near
        return self.take(self._best_first(fresh, quick), n)

    def learn(self, trials: Iterable[Trial]) -> None:
        """Take notice of what configs cost; those that are not in the space are passed over."""
        for point, cost in points_and_costs(self.space, trials):
            self._taken.add(point.tobytes())
            self._learnt[point.tobytes()] = point, cost

    def _best_first(self, points: np.ndarray, quick: bool) -> np.ndarray:
        """Points (n, knobs) in the order in which to measure them; `quick` as of `propose`."""
        return self._rng.permutation(points)

    def _choose(self, n: int, quick: bool) -> Iterable[np.ndarray]:
        """The points to propose, the best first; those taken are left out afterwards, and random ones fill up.

        The arguments are those of `propose`.
        """
        return ()

    def _ranked(self) -> np.ndarray:
        """The learnt points, the fastest first and those that failed last: (n, knobs)."""
        ranked = sorted(self._learnt.values(), key=lambda learnt: learnt[1])
        return np.array([point for point, _ in ranked], dtype=np.int32).reshape(-1, len(self.space.knobs))

    def _succeeded(self) -> int:
        """How many of the learnt configs did not fail."""
        return sum(math.isfinite(cost) for _, cost in self._learnt.values())

    def _fresh(self, points: np.ndarray) -> np.ndarray:
        """Which points were neither proposed nor learnt: bool (n,)."""
        return np.array([point.tobytes() not in self._taken for point in points], dtype=bool)

    def _take(self, points: Iterable[np.ndarray], n: int) -> list[np.ndarray]:
        """The first `n` fresh points, which are taken with that."""
        taken: list[np.ndarray] = []
        if n < 1:
            return taken
        for point in points:
            key = point.tobytes()
            if key not in self._taken:
                self._taken.add(key)
                taken.append(point)
                if len(taken) == n:
                    break
        return taken

    def _at_random(self) -> Iterator[np.ndarray]:
        """Legal points in random order, until there is none left that is fresh."""
        if self.space.listed is not None:
            yield from self.space.sample(len(self.space.listed), self._rng)
            return
        while self._fresh(points := self.space.sample(256, self._rng)).any():
            yield from points


def points_and_costs(space: Space, trials: Iterable[Trial]) -> Iterator[tuple[np.ndarray, float]]:
    """The trials as points of a space; those that are not in it are left out."""
    for trial in trials:
        try:
            yield space.point(trial.config), trial.cost
        except KnobError:  # an older log may hold values that are no longer searched
            continue


def default_point(space: Space) -> list[np.ndarray]:
    """The default config, if it is legal."""
    point = space.point(space.default)
    return [point] if space.legal(point[None])[0] else []
