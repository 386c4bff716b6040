"""Which configs to measure first where nothing was measured: those that a schedule itself believes to be fast."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tvmconv.space.search_space import Space


def iterate_initial_candidates(space: Space) -> Iterator[np.ndarray]:
    """The points of a space by the schedule's estimate, the best first; none where it has none, or cannot be listed.

    Of points that differ in one knob alone the better one comes first, and the other behind all that differ more.
    """
    legal_points = space.enumerated_legal
    usage = space.compute_usage(legal_points) if legal_points is not None and len(legal_points) else None
    if legal_points is None or usage is None or usage.estimate is None:
        return
    remaining = legal_points[np.argsort(usage.estimate, kind="stable")]
    while len(remaining):
        chosen: list[np.ndarray] = []
        deferred = []
        for point in remaining:
            if any(np.count_nonzero(point != other) == 1 for other in chosen):
                deferred.append(point)
                continue
            chosen.append(point)
            yield point
        remaining = np.array(deferred)
