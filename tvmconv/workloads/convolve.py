"""The reference of convolutions: in float64, by NumPy's matrix product."""

from __future__ import annotations

import itertools
import math
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

if TYPE_CHECKING:
    from numpy.typing import NDArray

CHUNK_BYTES = 16 << 20  # of unfolded input that a thread holds at a time
THREADS = min(
    16, len(os.sched_getaffinity(0))
)  # that convolve a part each: several small images, or a part of a large one

Sizes = tuple[int, ...]


def convolve(
    x: NDArray[Any], k: NDArray[Any], stride: Sizes, padding: Sizes, dilation: Sizes, groups: int
) -> NDArray[np.float64]:
    """Convolve: unfold the windows into columns (im2col) and multiply them.

    Source: Chellapilla, Puri, Simard, "High Performance Convolutional Neural Networks for Document Processing", 2006.
    The columns are made a chunk at a time, as all of them are as many times the input as the kernel has taps.

    Args:
        x: input (N, C, space).
        k: weight (O, C / groups, kernel).
        stride: one number for each axis of space.
        padding: zeros before each axis, then behind each.
        dilation: one number for each axis.
        groups: number of groups.

    Returns:
        Output (N, O, out).
    """
    rank, (filters, _, *kernel) = len(stride), k.shape
    sides = [(0, 0), (0, 0), *zip(padding[:rank], padding[rank:], strict=True)]
    window = [(taps - 1) * step + 1 for taps, step in zip(kernel, dilation, strict=True)]
    stepped = (slice(None), slice(None), *(slice(None, None, step) for step in (*stride, *dilation)))
    weight = k.astype(np.float64).reshape(groups, filters // groups, -1)
    padded_space = (n + before + behind for n, (before, behind) in zip(x.shape[2:], sides[2:], strict=True))
    space = [(n - seen) // step + 1 for n, seen, step in zip(padded_space, window, stride, strict=True)]
    out = np.empty((len(x), filters, *space), np.float64)
    column = math.prod(k.shape[1:]) * groups  # elements

    small = CHUNK_BYTES // (8 * column * math.prod(space))  # images that make a chunk together
    together = max(1, min(small, -(-len(x) // THREADS)))
    padded = np.pad(x, sides)
    windows = sliding_window_view(padded, window, axis=tuple(range(2, 2 + rank)))[stepped]

    def convolve_part(place: tuple[slice, ...]) -> None:
        columns = np.moveaxis(windows[place], range(2, 2 + rank), range(-rank, 0))  # image, channel, taps, pixels
        unfolded = columns.astype(np.float64, order="C").reshape(len(columns), groups, weight.shape[2], -1)
        out[place] = (weight @ unfolded).reshape(len(columns), filters, *columns.shape[-rank:])

    parts = [
        (slice(i, i + together), slice(None), *chunk)
        for i in range(0, len(x), together)
        for chunk in _chunks(tuple(space), column * together)
    ]
    with ThreadPoolExecutor(min(len(parts), THREADS)) as threads:  # NumPy copies and multiplies without Python's lock
        for _ in threads.map(convolve_part, parts):
            pass
    return out


def _chunks(out: Sizes, column: int) -> itertools.product[tuple[slice, ...]]:
    """The output's pixels in parts whose columns, of so many elements each, keep to `CHUNK_BYTES`."""
    left = max(1, CHUNK_BYTES // (8 * column))
    steps = []
    for n in reversed(out):  # whole lines where they fit, then whole planes
        steps.append(min(n, left))
        left = max(1, left // n)
    parts = ([slice(i, i + step) for i in range(0, n, step)] for n, step in zip(out, reversed(steps), strict=True))
    return itertools.product(*parts)
