"""The random sample of output pixels by which a large convolution is verified; it meets every tile.

A pixel is an output position (n, p) with its batch index n and its spatial indices p. Pixels are numbered in that
order, and all O output channels of a chosen pixel are compared. The cell c is a power of two. The sample is the union
of these sets:

- One random pixel of each c consecutive pixels. They miss any set of T pixels with a probability of at most exp(-T /
  c), and never one that contains c aligned consecutive pixels, as the row tile of a matrix product does.
- A digital net. It contains the pixel (n, d, h, w) if w ^ reversed(h) ^ pascal(d) == s_n modulo c, with a random s_n
  for each image. It meets every aligned box of an image whose sides are powers of two and whose volume is at least c: c
  x 1, 8 x 8, 4 x 4 x 4 for c = 64. The generator matrices are the identity, the reversed identity and Pascal's triangle
  modulo 2, those of a (0, m, 3)-net. Source: Niederreiter, "Random Number Generation and Quasi-Monte Carlo Methods",
  1992, chapter 4.
- Up to `SLAB_PIXELS` pixels of certain slabs; a slab is all pixels with one index along one spatial axis. These slabs
  are borders, read padding, or are the first or last of the remainder of a tile of 2, 4, ... 256 pixels.
- All corners of the first and the last image, and the ends of the remainders of tiles of the numbered pixels.
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
TILE_SIZES = tuple(2**i for i in range(9))  # tile sizes whose remainders are sampled
MIN_CELL, MAX_CELL = 4, 64
TARGET_FLOPS = 20e9  # largest cost of a sample while its cell is below `MAX_CELL`
LIMIT_FLOPS = 64e9  # above it the cell grows beyond `MAX_CELL`
MAX_OUTPUTS = 1 << 23  # approximate number of outputs of a sample; each takes some 20 bytes


def choose_cell(w: ConvGeometry) -> int:
    """Return the cell of a sample: the smallest power of two from `MIN_CELL` on that is affordable. It is at most
    `MAX_CELL` for convolutions of up to 2 TFLOP and 2^28 outputs.
    """
    cell = MIN_CELL
    while 2 * w.flops / cell > (TARGET_FLOPS if cell < MAX_CELL else LIMIT_FLOPS) or (
        2 * math.prod(w.output_shape) / cell > MAX_OUTPUTS
    ):
        cell *= 2
    return cell


def choose_pixels(w: ConvGeometry, cell: int, seed: int) -> NDArray[np.int64]:
    """Choose about one in `cell / 2` pixels, as the module's docstring describes; return ascending numbers."""
    rng = np.random.default_rng([seed, cell])
    sizes = (w.N, *w.output_size)
    chosen = [_sample_strata(math.prod(sizes), cell, rng), _sample_net(sizes, cell, rng), _list_corners(sizes)]
    for axis, edges in enumerate(_find_edges(w), 1):
        chosen += [_sample_slab(sizes, axis, index, rng) for index in edges]
    return np.unique(np.concatenate(chosen))


def _sample_strata(count: int, cell: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return a random one of each `cell` consecutive numbers below `count`, and the ends of tiles' remainders."""
    first = np.arange(0, count, cell)
    tile_ends = {count // tile * tile - offset for tile in TILE_SIZES for offset in (0, 1)}
    fixed = [end for end in sorted(tile_ends) if 0 <= end < count]
    return np.concatenate([first + rng.integers(0, np.minimum(cell, count - first)), np.array(fixed, np.int64)])


def _sample_net(sizes: tuple[int, ...], cell: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return the pixels of the digital net."""
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
    """Return the numbers below `count`, modulo 2^bits, with their bits reversed."""
    numbers = np.arange(count)
    return sum(((numbers >> bit & 1) << (bits - 1 - bit) for bit in range(bits)), np.zeros_like(numbers))


def _multiply_by_pascal(count: int, bits: int) -> NDArray[np.int64]:
    """Return the numbers below `count`, modulo 2^bits, times Pascal's triangle modulo 2. The binomial coefficient of i
    over j is odd where j has no bit that i lacks (Lucas's theorem).
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
    """Return the indices along each spatial axis where the image, its padding or a tile's remainder begins or ends."""
    edges = []
    for size, output_size, window, stride, pad_low in zip(
        w.input_size, w.output_size, w.window, w.stride, w.pad_low, strict=True
    ):
        first = ceil_div(pad_low, stride)  # first output whose window begins in the image
        last = (size + pad_low - window) // stride  # last output whose window ends in the image
        indices = {*range(first + 1), *range(last, output_size), output_size - 1}
        indices |= {output_size // tile * tile - offset for tile in TILE_SIZES for offset in (0, 1)}
        edges.append(sorted(index for index in indices if 0 <= index < output_size))
    return edges


def _sample_slab(sizes: tuple[int, ...], axis: int, index: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return evenly spread random pixels with a given index along an axis."""
    others = sizes[:axis] + sizes[axis + 1 :]
    count = math.prod(others)
    points = min(count, SLAB_PIXELS)
    pixel_numbers = ((np.arange(points) + rng.random(points)) * (count / points)).astype(np.int64)
    coordinates = list(np.unravel_index(np.minimum(pixel_numbers, count - 1), others))
    coordinates.insert(axis, np.full(points, index))
    return np.ravel_multi_index(tuple(coordinates), sizes)
