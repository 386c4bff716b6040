"""The reference of filters: correlation in float64, in pieces that fit a processor's cache."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

PIECE_ELEMENTS = 1 << 17  # float64 elements per work item of a thread


def correlate(x: NDArray[Any], k: NDArray[Any]) -> NDArray[np.float64]:
    """Slide a mask over each channel of an image, with zeros outside, by adding shifted copies of the image.

    Args:
        x: The image, (height, width, channels).
        k: The mask, (rows, columns), both odd.

    Returns:
        The correlation, of the image's shape, in float64.
    """
    y = np.empty(x.shape, np.float64)
    mask = _crop_mask(k.astype(np.float64), x.shape)
    with ThreadPoolExecutor() as threads:  # NumPy releases the GIL
        for _ in threads.map(lambda piece: _correlate_piece(y, piece, x, mask), _split_image(x.shape)):
            pass
    return y


def _crop_mask(k: NDArray[np.float64], image: tuple[int, ...]) -> NDArray[np.float64]:
    """Return the mask without taps that only meet zeros, because they are further from its center than the image is
    long.
    """
    middles = [size // 2 for size in k.shape]
    return k[tuple(slice(max(middle - n + 1, 0), middle + n) for middle, n in zip(middles, image, strict=False))]


def _split_image(image: tuple[int, ...]) -> Iterator[tuple[slice, slice]]:
    """Yield the image's rows and columns in pieces of about `PIECE_ELEMENTS` elements."""
    height, width, channels = image
    columns = max(1, min(width, PIECE_ELEMENTS // channels))
    rows = max(1, PIECE_ELEMENTS // (columns * channels))
    for top, left in product(range(0, height, rows), range(0, width, columns)):
        yield slice(top, min(top + rows, height)), slice(left, min(left + columns, width))


def _correlate_piece(
    y: NDArray[np.float64], piece: tuple[slice, slice], x: NDArray[Any], k: NDArray[np.float64]
) -> None:
    """Compute one piece of `y` from the same piece of `x` and its halo."""
    (rows, row_padding), (columns, column_padding) = (
        _clip_halo(piece_slice, taps // 2, size)
        for piece_slice, taps, size in zip(piece, k.shape, x.shape, strict=False)
    )
    padded = np.pad(x[rows, columns].astype(np.float64), (row_padding, column_padding, (0, 0)))
    out = y[piece]
    height, width, _ = out.shape
    out[:] = 0
    for (r, s), tap in np.ndenumerate(k):
        out += tap * padded[r : r + height, s : s + width]


def _clip_halo(piece_slice: slice, radius: int, size: int) -> tuple[slice, tuple[int, int]]:
    """Return the part of a piece and its halo inside the image, and the number of zeros missing before and after it."""
    first, last = piece_slice.start - radius, piece_slice.stop + radius
    return slice(max(first, 0), min(last, size)), (max(-first, 0), max(last - size, 0))
