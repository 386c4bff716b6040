"""Latency of work whose parts overlap in time."""

from __future__ import annotations

from typing import Any

import numpy as np

P_NORM_EXPONENT = 4


def combine_overlapping_times(*times: Any) -> Any:
    """Return the p-norm of several times: close to the longest one, and more if others are nearly as long."""
    return sum(np.asarray(time, float) ** P_NORM_EXPONENT for time in times) ** (1 / P_NORM_EXPONENT)
