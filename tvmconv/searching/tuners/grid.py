"""Grid search: every legal config, in the order of the space's index."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from tvmconv.knobs.space import Space
from tvmconv.searching.tuners.base import Tuner

_STRIDE = 1 << 15  # points looked at together


class GridTuner(Tuner):
    """Walks through the space without listing it; `seed` is without effect."""

    def __init__(self, space: Space, seed: int = 0):
        super().__init__(space, seed)
        self._walk = self._in_order()

    def _choose(self, n: int, quick: bool) -> Iterable[np.ndarray]:
        return self._walk

    def _in_order(self) -> Iterator[np.ndarray]:
        if self.space.listed is not None:
            yield from self.space.listed
            return
        for start in range(0, self.space.size, _STRIDE):
            points = self.space.walk(start, _STRIDE)
            yield from points[self.space.legal(points)]
