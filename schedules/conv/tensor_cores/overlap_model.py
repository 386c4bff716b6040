"""How long work takes of which parts run side by side."""

from __future__ import annotations

from typing import Any

import numpy as np

P_NORM_EXPONENT = 4  # the p of the norm


def combine_overlapping_times(*times: Any) -> Any:
    """The longest of several times, smoothed by a p-norm: more where others come near to it."""
    return sum(np.asarray(time, float) ** P_NORM_EXPONENT for time in times) ** (1 / P_NORM_EXPONENT)
