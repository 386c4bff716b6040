"""Layouts: the orders in which tensors of images are stored; shapes are otherwise written as N, C, space.

A uniform layout is that of all tensors of an operator. A mixed layout of a convolution names the layout of X and then
that of Y. The weight lies as X does, because the reduction runs over the axes that they share; a residual lies as Y
does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from tvmconv.errors import WorkloadError
from tvmconv.workloads.text import quote

T = TypeVar("T")

CHANNELS_FIRST, CHANNELS_LAST = "nchw", "nhwc"  # the names are the same for any number of spatial axes
UNIFORM_LAYOUTS = (CHANNELS_FIRST, CHANNELS_LAST)
SEPARATOR = "-"  # between the layouts of X and Y in a mixed layout
MIXED_LAYOUTS = tuple(SEPARATOR.join(names) for names in (UNIFORM_LAYOUTS, UNIFORM_LAYOUTS[::-1]))
LAYOUTS = (*UNIFORM_LAYOUTS, *MIXED_LAYOUTS)


def validate_layout(name: object, layouts: Sequence[str] = LAYOUTS) -> None:
    """Raise WorkloadError unless the name is one of the layouts."""
    if name not in layouts:
        raise WorkloadError(f"layout={quote(name)}: expected one of {', '.join(layouts)}")


def get_input_layout(name: str) -> str:
    """Return the uniform layout in which X and the weight lie."""
    return name.partition(SEPARATOR)[0]


def get_output_layout(name: str) -> str:
    """Return the uniform layout in which Y and a residual lie."""
    return name.rpartition(SEPARATOR)[2]


def join_layouts(input_layout: str, output_layout: str) -> str:
    """Return the layout whose X and Y have these uniform layouts.

    Examples:
        >>> join_layouts("nchw", "nhwc"), join_layouts("nhwc", "nhwc")
        ('nchw-nhwc', 'nhwc')
    """
    return input_layout if input_layout == output_layout else f"{input_layout}{SEPARATOR}{output_layout}"


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
