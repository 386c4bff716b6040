"""Grid search: every legal config, in the order of the space's index."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from tvmconv.search.tuners.base import Tuner
from tvmconv.space.search_space import Space

_BATCH_SIZE = 1 << 15  # number of points that are checked at once


class GridTuner(Tuner):
    """Grid search over all legal configs, which does not list the space in memory; `seed` has no effect."""

    def __init__(self, space: Space, seed: int = 0):
        super().__init__(space, seed)
        self._ordered_points = self._iterate_in_order()

    def _select_points(self, max_configs: int, skip_model: bool) -> Iterable[np.ndarray]:
        return self._ordered_points

    def _iterate_in_order(self) -> Iterator[np.ndarray]:
        if self.space.enumerated_legal is not None:
            yield from self.space.enumerated_legal
            return
        for start in range(0, self.space.size, _BATCH_SIZE):
            points = self.space.slice_points(start, _BATCH_SIZE)
            yield from points[self.space.is_legal(points)]
