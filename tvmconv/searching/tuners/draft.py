"""Which configs to measure first where nothing was measured: those that a schedule itself believes to be fast."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tvmconv.knobs.space import Space


def draft(space: Space) -> Iterator[np.ndarray]:
    """The points of a space by the schedule's estimate, the best first; none where it has none, or cannot be listed.

    Of points that differ in one knob alone the better one comes first, and the other behind all that differ more.
    """
    listed = space.listed
    usage = space.usage(listed) if listed is not None and len(listed) else None
    if listed is None or usage is None or usage.estimate is None:
        return
    left = listed[np.argsort(usage.estimate, kind="stable")]
    while len(left):
        taken: list[np.ndarray] = []
        later = []
        for point in left:
            if any(np.count_nonzero(point != other) == 1 for other in taken):
                later.append(point)
                continue
            taken.append(point)
            yield point
        left = np.array(later)
