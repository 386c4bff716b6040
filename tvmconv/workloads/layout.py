"""Layouts: how tensors of images lie in memory, beside the order N, C, space in which their sizes are written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from tvmconv.errors import WorkloadError
from tvmconv.workloads.text import quote

T = TypeVar("T")

CHANNELS_FIRST, CHANNELS_LAST = "nchw", "nhwc"  # so they are called whatever the number of axes of space
LAYOUTS = (CHANNELS_FIRST, CHANNELS_LAST)


def validate_layout(name: object) -> None:
    """Raise WorkloadError for what is no layout."""
    if name not in LAYOUTS:
        raise WorkloadError(f"layout={quote(name)}: expected one of {', '.join(LAYOUTS)}")


def to_storage_order(layout: str, axes: Sequence[T]) -> tuple[T, ...]:
    """Sizes or indices (N, C, space), of a weight (O, C, kernel), in the order in which they lie in memory."""
    first, channel, *space = axes
    return (first, *space, channel) if layout == CHANNELS_LAST else (first, channel, *space)


def move_channels_second(layout: str, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """An array that lies in memory as the layout says, viewed as (N, C, space)."""
    return np.moveaxis(array, -1, 1) if layout == CHANNELS_LAST else array


def to_storage_layout(layout: str, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """An array (N, C, space) as the layout says, in C order."""
    return np.ascontiguousarray(np.moveaxis(array, 1, -1)) if layout == CHANNELS_LAST else array
