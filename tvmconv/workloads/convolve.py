"""The reference of convolutions: in float64, by NumPy's matrix product, of all outputs or of some pixels."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from threadpoolctl import threadpool_limits

from tvmconv.arithmetic import ceil_div
from tvmconv.workloads.dtypes import widen

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
    together = max(1, min(small, ceil_div(len(x), THREADS)))
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
    _run_in_threads(convolve_part, parts)
    return out


def _run_in_threads(work: Callable[[Any], None], parts: Sequence[Any]) -> None:
    """Do the work of all parts in threads; NumPy copies and multiplies without Python's lock.

    A matrix product keeps to its thread: BLAS would use all cores for each, and the threads would wait for one another.
    """
    with threadpool_limits(1, user_api="blas"), ThreadPoolExecutor(min(len(parts), THREADS)) as threads:
        for _ in threads.map(work, parts):
            pass


def _chunks(out: Sizes, column: int) -> itertools.product[tuple[slice, ...]]:
    """The output's pixels in parts whose columns, of so many elements each, keep to `CHUNK_BYTES`."""
    left = max(1, CHUNK_BYTES // (8 * column))
    steps = []
    for n in reversed(out):  # whole lines where they fit, then whole planes
        steps.append(min(n, left))
        left = max(1, left // n)
    parts = ([slice(i, i + step) for i in range(0, n, step)] for n, step in zip(out, reversed(steps), strict=True))
    return itertools.product(*parts)


def convolve_at(
    x: NDArray[Any],
    k: NDArray[Any],
    pixels: NDArray[np.int64],
    out: Sizes,
    stride: Sizes,
    before: Sizes,
    dilation: Sizes,
    groups: int,
    *,
    channels_last: bool,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Convolve at some pixels: gather their windows, a chunk at a time, and multiply them by all filters.

    Args:
        x: input as it lies in memory, (N, C, space) or (N, space, C).
        k: weight as it lies in memory, (O, C / groups, kernel) or (O, kernel, C / groups).
        pixels: numbers of output positions (n, p), ascending.
        out: sizes of the output along the axes of space.
        stride: one number for each axis of space.
        before: zeros before each axis.
        dilation: one number for each axis.
        groups: number of groups.
        channels_last: which of the layouts it is.

    Returns:
        The sums, (pixels, O), and for each its typical size: the root mean square of what the same window and the
        same filter give in any order of their elements, ‖window‖ · ‖filter‖ / √(elements).
    """
    rank, filters, length = len(stride), len(k), math.prod(k.shape[1:])
    space, kernel = (x.shape[1:-1], k.shape[1:-1]) if channels_last else (x.shape[2:], k.shape[2:])
    channels, taps = length * groups // math.prod(kernel), math.prod(kernel)
    weight = widen(k).reshape(groups, filters // groups, length)
    norms = np.linalg.norm(weight, axis=2).reshape(filters) / math.sqrt(length)
    numbers = np.unravel_index(pixels, (len(x), *out))
    steps = np.indices(kernel).reshape(rank, taps)
    sums, scales = np.empty((2, len(pixels), filters))

    def convolve_chunk(part: slice) -> None:
        image = numbers[0][part]
        flat, inside = np.zeros((len(image), taps), np.int64), np.ones((len(image), taps), bool)
        for axis in range(rank):
            place = (numbers[axis + 1][part] * stride[axis] - before[axis])[:, None] + steps[axis] * dilation[axis]
            inside &= (place >= 0) & (place < space[axis])
            flat = flat * space[axis] + place.clip(0, space[axis] - 1)
        gather = _gather_last if channels_last else _gather_first
        windows = gather(x, image, flat, inside, groups)  # (groups, length, pixels)
        sums[part] = (weight @ windows).reshape(filters, -1).T
        sizes = np.sqrt(np.einsum("glp,glp->gp", windows, windows))
        scales[part] = sizes.repeat(filters // groups, axis=0).T * norms

    step = max(1, CHUNK_BYTES // (8 * taps * channels))
    parts = [slice(i, i + step) for i in range(0, len(pixels), step)]
    _run_in_threads(convolve_chunk, parts)
    return sums, scales


def _gather_first(
    x: NDArray[Any], image: NDArray[np.int64], flat: NDArray[np.int64], inside: NDArray[np.bool_], groups: int
) -> NDArray[np.float64]:
    """The windows of pixels of a tensor (N, C, space), as (groups, C / groups * taps, pixels).

    Args:
        x: the tensor.
        image: the index n of each pixel, ascending.
        flat: position in the image's space, (pixels, taps).
        inside: whether it is there; what is not is zero.
        groups: number of groups.
    """
    channels, (pixels, taps) = x.shape[1], flat.shape
    windows = np.empty((channels, taps, pixels))
    ends = [0, *(np.flatnonzero(np.diff(image)) + 1), pixels]
    for first, last in itertools.pairwise(ends):  # the pixels of one image
        places = flat[first:last].T
        read = _take(x[image[first]].reshape(channels, -1), places.ravel(), axis=1)
        windows[:, :, first:last] = widen(read).reshape(channels, *places.shape)
    windows[:, ~inside.T] = 0
    return windows.reshape(groups, -1, pixels)


def _gather_last(
    x: NDArray[Any], image: NDArray[np.int64], flat: NDArray[np.int64], inside: NDArray[np.bool_], groups: int
) -> NDArray[np.float64]:
    """As `_gather_first`, of a tensor (N, space, C), as (groups, taps * C / groups, pixels)."""
    channels, (pixels, taps) = x.shape[-1], flat.shape
    rows = image[:, None] * math.prod(x.shape[1:-1]) + flat
    read = _take(x.reshape(-1, channels), rows.ravel(), axis=0)
    windows = widen(read).reshape(pixels, taps, groups, channels // groups)
    windows[~inside] = 0
    return windows.transpose(2, 1, 3, 0).reshape(groups, -1, pixels)


def _take(array: NDArray[Any], places: NDArray[np.int64], axis: int) -> NDArray[Any]:
    """`array.take`, as integers of the same size: Python's lock is held while elements of ml_dtypes are copied."""
    return array.view(f"u{array.itemsize}").take(places, axis=axis).view(array.dtype)
