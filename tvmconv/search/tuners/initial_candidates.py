"""Initial candidates of a search without trials: the configs that the schedule's latency estimate prefers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tvmconv.space.search_space import Space


def iterate_initial_candidates(space: Space) -> Iterator[np.ndarray]:
    """Yield the points of a space by the schedule's estimate, the best first.

    A point that differs from an earlier one in only one knob is deferred until all others have come. There are no
    points if the schedule has no estimate, or if the space is too large to list.
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
