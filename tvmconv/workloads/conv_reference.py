"""The reference of convolutions in float64, by NumPy's matrix product, for all outputs or for some pixels."""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from threadpoolctl import ThreadpoolController

from tvmconv.arithmetic import ceil_div
from tvmconv.workloads.dtypes import FLOAT8_DTYPES, widen_to_float64

if TYPE_CHECKING:
    from numpy.typing import NDArray

CHUNK_BYTES = 16 << 20  # bytes of unfolded input per thread
NUM_THREADS = min(16, len(os.sched_getaffinity(0)))

Sizes = tuple[int, ...]


def convolve(
    x: NDArray[Any], k: NDArray[Any], stride: Sizes, padding: Sizes, dilation: Sizes, groups: int
) -> NDArray[np.float64]:
    """Convolve by unfolding the windows into columns (im2col) and multiplying them by the weight. Source: Chellapilla,
    Puri, Simard, "High Performance Convolutional Neural Networks for Document Processing", 2006. The columns are made
    in chunks, because all of them take as many times the input's memory as the kernel has taps. The input is (N, C,
    space), the weight (O, C / groups, kernel), and the output (N, O, out).
    """
    if x.dtype.name in FLOAT8_DTYPES:
        x = x.astype(np.float16)  # exact, and a type that NumPy views
    spatial_ndim, (filters, _, *kernel) = len(stride), k.shape
    sides = [(0, 0), (0, 0), *zip(padding[:spatial_ndim], padding[spatial_ndim:], strict=True)]
    window = [(taps - 1) * spacing + 1 for taps, spacing in zip(kernel, dilation, strict=True)]
    strided = (slice(None), slice(None), *(slice(None, None, spacing) for spacing in (*stride, *dilation)))
    weight = k.astype(np.float64).reshape(groups, filters // groups, -1)
    padded_space = (n + low + high for n, (low, high) in zip(x.shape[2:], sides[2:], strict=True))
    space = [
        (n - window_size) // spacing + 1 for n, window_size, spacing in zip(padded_space, window, stride, strict=True)
    ]
    out = np.empty((len(x), filters, *space), np.float64)
    column_elements = math.prod(k.shape[1:]) * groups

    max_images = CHUNK_BYTES // (8 * column_elements * math.prod(space))  # images per chunk
    images_per_chunk = max(1, min(max_images, ceil_div(len(x), NUM_THREADS)))
    padded = np.pad(x, sides)
    windows = sliding_window_view(padded, window, axis=tuple(range(2, 2 + spatial_ndim)))[strided]

    def convolve_chunk(index: tuple[slice, ...]) -> None:
        # Axes: image, channel, taps, pixels.
        columns = np.moveaxis(windows[index], range(2, 2 + spatial_ndim), range(-spatial_ndim, 0))
        unfolded = columns.astype(np.float64, order="C").reshape(len(columns), groups, weight.shape[2], -1)
        out[index] = (weight @ unfolded).reshape(len(columns), filters, *columns.shape[-spatial_ndim:])

    chunks = [
        (slice(i, i + images_per_chunk), slice(None), *chunk)
        for i in range(0, len(x), images_per_chunk)
        for chunk in _split_output(tuple(space), column_elements * images_per_chunk)
    ]
    _run_in_threads(convolve_chunk, chunks)
    return out


def _run_in_threads(work: Callable[[Any], None], chunks: Sequence[Any]) -> None:
    """Run `work` on all chunks in threads; NumPy copies and multiplies without the GIL. BLAS is limited to the calling
    thread: it would use all cores for each product, and the threads would wait for each other.
    """
    pool = ThreadPoolExecutor(min(len(chunks), NUM_THREADS))
    with _find_thread_libraries().limit(limits=1, user_api="blas"), pool as threads:
        list(threads.map(work, chunks))


@functools.cache
def _find_thread_libraries() -> ThreadpoolController:
    """Find the loaded libraries with threads of their own, NumPy's BLAS among them, which takes some milliseconds."""
    return ThreadpoolController()


def _split_output(output_size: Sizes, column_elements: int) -> itertools.product[tuple[slice, ...]]:
    """Split the output's pixels into chunks whose columns, of `column_elements` each, take at most `CHUNK_BYTES`."""
    max_pixels = max(1, CHUNK_BYTES // (8 * column_elements))
    chunk_sizes = []
    for n in reversed(output_size):  # whole rows if they fit, then whole planes
        chunk_sizes.append(min(n, max_pixels))
        max_pixels = max(1, max_pixels // n)
    axis_slices = (
        [slice(i, i + chunk_size) for i in range(0, n, chunk_size)]
        for n, chunk_size in zip(output_size, reversed(chunk_sizes), strict=True)
    )
    return itertools.product(*axis_slices)


def convolve_pixels(
    x: NDArray[Any],
    k: NDArray[Any],
    pixels: NDArray[np.int64],
    output_size: Sizes,
    stride: Sizes,
    pad_low: Sizes,
    dilation: Sizes,
    groups: int,
    upsample: Sizes,
    *,
    channels_last: bool,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Convolve at some pixels: gather their windows in chunks and multiply them by all filters. Input and weight are in
    memory order, and windows read each position of the input `upsample` times. Pixels are ascending numbers of output
    positions (n, p). Returns the sums (pixels, O) and their typical sizes (pixels, O). A typical size is the root mean
    square of the sum over all orders of the elements of window and filter, ‖window‖ · ‖filter‖ / √(elements).
    """
    spatial_ndim, filters, length = len(stride), len(k), math.prod(k.shape[1:])
    space, kernel = (x.shape[1:-1], k.shape[1:-1]) if channels_last else (x.shape[2:], k.shape[2:])
    channels, taps = length * groups // math.prod(kernel), math.prod(kernel)
    weight = widen_to_float64(k).reshape(groups, filters // groups, length)
    norms = np.linalg.norm(weight, axis=2).reshape(filters) / math.sqrt(length)
    pixel_indices = np.unravel_index(pixels, (len(x), *output_size))
    tap_indices = np.indices(kernel).reshape(spatial_ndim, taps)
    sums, scales = np.empty((2, len(pixels), filters))

    def convolve_chunk(chunk: slice) -> None:
        image = pixel_indices[0][chunk]
        flat_positions, is_inside = np.zeros((len(image), taps), np.int64), np.ones((len(image), taps), bool)
        for axis in range(spatial_ndim):
            start = pixel_indices[axis + 1][chunk] * stride[axis] - pad_low[axis]
            position = start[:, None] + tap_indices[axis] * dilation[axis]
            stored = position // upsample[axis] if upsample[axis] > 1 else position
            is_inside &= (stored >= 0) & (stored < space[axis])
            flat_positions = flat_positions * space[axis] + stored.clip(0, space[axis] - 1)
        if channels_last:
            windows = _gather_channels_last(x, image, flat_positions, is_inside)
            windows = windows.reshape(len(image), taps, groups, -1).transpose(2, 1, 3, 0)
        else:
            windows = _gather_channels_first(x, image, flat_positions, is_inside)
        windows = windows.reshape(groups, length, len(image))
        sums[chunk] = (weight @ windows).reshape(filters, -1).T
        sizes = np.sqrt(np.einsum("glp,glp->gp", windows, windows))
        scales[chunk] = sizes.repeat(filters // groups, axis=0).T * norms

    chunk_pixels = max(1, CHUNK_BYTES // (8 * taps * channels))
    chunks = [slice(i, i + chunk_pixels) for i in range(0, len(pixels), chunk_pixels)]
    _run_in_threads(convolve_chunk, chunks)
    return sums, scales


def _gather_channels_first(
    x: NDArray[Any], image: NDArray[np.int64], flat_positions: NDArray[np.int64], is_inside: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """Return the windows of pixels of a tensor (N, C, space) as (C, taps, pixels). `image` has the index n of each
    pixel, ascending. `flat_positions` (pixels, taps) has positions in the image's space, and `is_inside` tells which
    lie in the image; windows are zero elsewhere.
    """
    channels, (pixels, taps) = x.shape[1], flat_positions.shape
    windows = np.empty((channels, taps, pixels))
    boundaries = [0, *(np.flatnonzero(np.diff(image)) + 1), pixels]
    for first, last in itertools.pairwise(boundaries):  # the pixels of one image
        positions = flat_positions[first:last].T
        values = _take_raw(x[image[first]].reshape(channels, -1), positions.ravel(), axis=1)
        windows[:, :, first:last] = widen_to_float64(values).reshape(channels, *positions.shape)
    windows[:, ~is_inside.T] = 0
    return windows


def _gather_channels_last(
    x: NDArray[Any], image: NDArray[np.int64], flat_positions: NDArray[np.int64], is_inside: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """Return windows as `_gather_channels_first` does, of a tensor (N, space, C), as (pixels, taps, C)."""
    channels = x.shape[-1]
    row_indices = image[:, None] * math.prod(x.shape[1:-1]) + flat_positions
    values = _take_raw(x.reshape(-1, channels), row_indices.ravel(), axis=0)
    windows = widen_to_float64(values).reshape(*flat_positions.shape, channels)
    windows[~is_inside] = 0
    return windows


def _take_raw(array: NDArray[Any], indices: NDArray[np.int64], axis: int) -> NDArray[Any]:
    """Return `array.take` on integers of the same size, because copying elements of ml_dtypes holds the GIL."""
    return array.view(f"u{array.itemsize}").take(indices, axis=axis).view(array.dtype)


def input_gradient(
    dy: NDArray[Any],
    k: NDArray[Any],
    input_size: Sizes,
    stride: Sizes,
    pad_low: Sizes,
    dilation: Sizes,
    groups: int,
) -> NDArray[np.float64]:
    """Return the gradient (N, C, space) of a convolution's input from dY (N, O, out) and the weight (O, C/groups, R).

    For each tap, the product of the weight and dY is added to the pixels that the tap reads.
    """
    images, filters, *out = dy.shape
    gradient = widen_to_float64(dy).reshape(images, groups, filters // groups, -1)
    weight = widen_to_float64(k).reshape(groups, filters // groups, *k.shape[1:])
    dx = np.zeros((images, groups, k.shape[1], *input_size))

    def add_taps(image: int) -> None:
        for tap in np.ndindex(*k.shape[2:]):
            inputs, outputs = _find_overlap(tap, input_size, tuple(out), stride, pad_low, dilation)
            tap_index: tuple[Any, ...] = (slice(None), slice(None), slice(None), *tap)
            product = weight[tap_index].swapaxes(1, 2) @ gradient[image]
            dx[image][inputs] += product.reshape(groups, k.shape[1], *out)[outputs]

    _run_in_threads(add_taps, range(images))
    return dx.reshape(images, groups * k.shape[1], *input_size)


def weight_gradient(
    dy: NDArray[Any],
    x: NDArray[Any],
    kernel: Sizes,
    stride: Sizes,
    pad_low: Sizes,
    dilation: Sizes,
    groups: int,
) -> NDArray[np.float64]:
    """Return the gradient (O, C/groups, kernel) of a convolution's weight from dY (N, O, out) and X (N, C, space)."""
    images, filters, *out = dy.shape
    channels, space = x.shape[1] // groups, x.shape[2:]
    gradient = widen_to_float64(dy).reshape(images, groups, filters // groups, *out)
    values = widen_to_float64(x).reshape(images, groups, channels, *space)
    dk = np.zeros((groups, filters // groups, channels, *kernel))

    def compute_tap(tap: tuple[int, ...]) -> None:
        inputs, outputs = _find_overlap(tap, space, tuple(out), stride, pad_low, dilation)
        tap_index: tuple[Any, ...] = (slice(None), slice(None), slice(None), *tap)
        for image in range(images):
            columns = values[image][inputs].reshape(groups, channels, -1).swapaxes(1, 2)
            dk[tap_index] += gradient[image][outputs].reshape(groups, filters // groups, -1) @ columns

    _run_in_threads(compute_tap, list(np.ndindex(*kernel)))
    return dk.reshape(filters, channels, *kernel)


def _find_overlap(
    tap: tuple[int, ...], input_size: Sizes, output_size: Sizes, stride: Sizes, pad_low: Sizes, dilation: Sizes
) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Return the slices (groups, channels, space) of the input and of the output that a tap connects."""
    inputs, outputs = [slice(None)] * 2, [slice(None)] * 2
    for axis, r in enumerate(tap):
        offset = r * dilation[axis] - pad_low[axis]  # position that the first output reads
        first = max(0, ceil_div(-offset, stride[axis]))
        stop = max(first, min(output_size[axis], ceil_div(input_size[axis] - offset, stride[axis])))
        outputs.append(slice(first, stop))
        start = first * stride[axis] + offset
        inputs.append(slice(start, start + (stop - first) * stride[axis], stride[axis]))
    return tuple(inputs), tuple(outputs)
