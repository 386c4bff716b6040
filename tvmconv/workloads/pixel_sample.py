"""Which output pixels of a large convolution are verified: a random sample that meets every tile.

A pixel is an output position (n, p) with its batch index n and its space indices p; pixels are numbered in that order,
and all O output channels of a chosen pixel are compared. With the cell c, a power of two, the sample is the union of

- one random pixel of each c consecutive pixels. Any set of T pixels is missed by these with a probability of at most
  exp(-T / c), and never where it contains c aligned consecutive pixels, as the row tile of a matrix product does;
- a digital net. The pixel (n, d, h, w) belongs to it where w ^ reversed(h) ^ pascal(d) == s_n, taken modulo c, with a
  random s_n for each image. It meets every aligned box within an image whose sides are powers of two and whose volume
  is at least c: c x 1, 8 x 8, 4 x 4 x 4 for c = 64. Generator matrices are the identity, the identity reversed and
  Pascal's triangle modulo 2, those of a (0, m, 3)-net. Source: Niederreiter, "Random Number Generation and Quasi-Monte
  Carlo Methods", 1992, chapter 4;
- some `SLAB_PIXELS` pixels of each slab (all pixels with one index along one axis of space) that is a border, that
  reads padding, or that is the first or last of the remainder of a tile of 2, 4, ... 256 pixels along that axis;
- all corners of the first and the last image, and where remainders of tiles of the numbered pixels begin and end.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import numpy as np

from tvmconv.arithmetic import ceil_div

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tvmconv.workloads.conv_geometry import ConvGeometry

SLAB_PIXELS = 64
TILE_SIZES = tuple(2**i for i in range(9))  # sizes of tiles whose remainders are looked at
MIN_CELL, MAX_CELL = 4, 64
TARGET_FLOPS = 20e9  # what a sample takes while its cell is below `MAX_CELL`
LIMIT_FLOPS = 64e9  # and above, where the guarantee of one pixel in `MAX_CELL` ends
MAX_OUTPUTS = 1 << 23  # outputs of a sample, about: each takes some 20 bytes


def choose_cell(w: ConvGeometry) -> int:
    """The cell of a sample: the smallest power of two from `MIN_CELL` on that is affordable.

    It is at most `MAX_CELL` for convolutions of up to 2 TFLOP and 2^28 outputs.
    """
    cell = MIN_CELL
    while 2 * w.flops / cell > (TARGET_FLOPS if cell < MAX_CELL else LIMIT_FLOPS) or (
        2 * math.prod(w.output_shape) / cell > MAX_OUTPUTS
    ):
        cell *= 2
    return cell


def choose_pixels(w: ConvGeometry, cell: int, seed: int) -> NDArray[np.int64]:
    """Choose the pixels of a sample; see the file's docstring.

    Args:
        w: the convolution.
        cell: a power of two; about one in `cell / 2` pixels is chosen.
        seed: of the random choices.

    Returns:
        Numbers of pixels, ascending, each once.
    """
    rng = np.random.default_rng([seed, cell])
    sizes = (w.N, *w.output_size)
    chosen = [_sample_strata(math.prod(sizes), cell, rng), _sample_net(sizes, cell, rng), _list_corners(sizes)]
    for axis, edges in enumerate(_find_edges(w), 1):
        chosen += [_sample_slab(sizes, axis, index, rng) for index in edges]
    return np.unique(np.concatenate(chosen))


def _sample_strata(count: int, cell: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """A random one of each `cell` consecutive numbers below `count`, and the ends of tiles' remainders."""
    first = np.arange(0, count, cell)
    tile_ends = {count // tile * tile - offset for tile in TILE_SIZES for offset in (0, 1)}
    fixed = [end for end in sorted(tile_ends) if 0 <= end < count]
    return np.concatenate([first + rng.integers(0, np.minimum(cell, count - first)), np.array(fixed, np.int64)])


def _sample_net(sizes: tuple[int, ...], cell: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """The pixels of the digital net."""
    bits = cell.bit_length() - 1
    images, *space = sizes
    *outer, width = space
    depth, height = [1, 1, *outer][-2:]
    shift = rng.integers(0, cell, images)
    start = (
        shift[:, None, None]
        ^ _multiply_by_pascal(depth, bits)[None, :, None]
        ^ _reverse_bits(height, bits)[None, None, :]
    )
    w = start.reshape(-1, 1) + np.arange(0, width, cell)
    pixels = np.arange(images * depth * height)[:, None] * width + w
    return pixels[w < width]


def _reverse_bits(count: int, bits: int) -> NDArray[np.int64]:
    """Numbers below `count`, modulo 2^bits, with their bits in reverse."""
    numbers = np.arange(count)
    return sum(((numbers >> bit & 1) << (bits - 1 - bit) for bit in range(bits)), np.zeros_like(numbers))


def _multiply_by_pascal(count: int, bits: int) -> NDArray[np.int64]:
    """Numbers below `count`, modulo 2^bits, times Pascal's triangle modulo 2.

    The binomial coefficient of i over j is odd where j has no bit that i lacks (Lucas's theorem).
    """
    row_masks = [sum(1 << i for i in range(bits) if i & j == j) for j in range(bits)]
    numbers, result = np.arange(count), np.zeros(count, np.int64)
    for bit, row in enumerate(row_masks):
        result ^= (numbers >> bit & 1) * row
    return result


def _list_corners(sizes: tuple[int, ...]) -> NDArray[np.int64]:
    corners = list(itertools.product(*({0, size - 1} for size in sizes)))
    return np.ravel_multi_index(tuple(np.transpose(corners)), sizes)


def _find_edges(w: ConvGeometry) -> list[list[int]]:
    """Indices along each axis of space where something begins or ends: the image, its padding, a tile's remainder."""
    edges = []
    for size, output_size, window, stride, pad_low in zip(
        w.input_size, w.output_size, w.window, w.stride, w.pad_low, strict=True
    ):
        first = ceil_div(pad_low, stride)  # the first one whose window begins in the image
        last = (size + pad_low - window) // stride  # the last one whose window ends in it
        indices = {*range(first + 1), *range(last, output_size), output_size - 1}
        indices |= {output_size // tile * tile - offset for tile in TILE_SIZES for offset in (0, 1)}
        edges.append(sorted(index for index in indices if 0 <= index < output_size))
    return edges


def _sample_slab(sizes: tuple[int, ...], axis: int, index: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Random pixels, evenly spread, of those with an index along an axis."""
    others = sizes[:axis] + sizes[axis + 1 :]
    count = math.prod(others)
    points = min(count, SLAB_PIXELS)
    pixel_numbers = ((np.arange(points) + rng.random(points)) * (count / points)).astype(np.int64)
    coordinates = list(np.unravel_index(np.minimum(pixel_numbers, count - 1), others))
    coordinates.insert(axis, np.full(points, index))
    return np.ravel_multi_index(tuple(coordinates), sizes)
