"""Layouts: the orders in which tensors of images are stored; shapes are otherwise written as N, C, space."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from tvmconv.errors import WorkloadError
from tvmconv.workloads.text import quote

T = TypeVar("T")

CHANNELS_FIRST, CHANNELS_LAST = "nchw", "nhwc"  # the names are the same for any number of spatial axes
LAYOUTS = (CHANNELS_FIRST, CHANNELS_LAST)


def validate_layout(name: object) -> None:
    """Raise WorkloadError unless the name is one of `LAYOUTS`."""
    if name not in LAYOUTS:
        raise WorkloadError(f"layout={quote(name)}: expected one of {', '.join(LAYOUTS)}")


def to_storage_order(layout: str, axes: Sequence[T]) -> tuple[T, ...]:
    """Return sizes or indices (N, C, space), or (O, C, kernel) of a weight, in memory order."""
    first, channel, *space = axes
    return (first, *space, channel) if layout == CHANNELS_LAST else (first, channel, *space)


def move_channels_second(layout: str, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return an array in the layout's memory order as a view (N, C, space)."""
    return np.moveaxis(array, -1, 1) if layout == CHANNELS_LAST else array


def to_storage_layout(layout: str, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return an array (N, C, space) in the layout's memory order, C-contiguous."""
    return np.ascontiguousarray(np.moveaxis(array, 1, -1)) if layout == CHANNELS_LAST else array
