"""Which pixels a sample has: every tile, border, corner and remainder is met."""

import itertools
import math

import numpy as np
import pytest

import tvmconv as tc
from tvmconv.workloads.pixel_sample import MAX_CELL, MAX_OUTPUTS, choose_cell, choose_pixels

IMAGES = "conv2d:2x4x37x300,8x4x3x3,s1,p1"
VOLUME = "conv3d:1x4x17x20x70,8x4x3x3x3,s1,p1"
SIGNAL = "conv1d:3x4x1000,8x4x9,s2,p4"
TEXTS = [IMAGES, VOLUME, SIGNAL]


def chosen(text, cell, seed=0):
    """Whether each pixel (n, space) is in the sample."""
    w = tc.parse(text)
    mask = np.zeros((w.N, *w.output_size), bool)
    mask.reshape(-1)[choose_pixels(w, cell, seed)] = True
    return mask


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("cell", [8, 64])
def test_every_aligned_box_of_a_cell_has_a_pixel(text, cell):
    mask, bits = chosen(text, cell), cell.bit_length() - 1
    _, *space = mask.shape
    for sides in itertools.product(range(bits + 1), repeat=len(space)):
        box = [2**side for side in sides]
        if sum(sides) != bits or any(side > size for side, size in zip(box, space, strict=True)):
            continue
        whole = mask[(slice(None), *(slice(size // side * side) for size, side in zip(space, box, strict=True)))]
        parts = [len(mask)] + [n for size, side in zip(space, box, strict=True) for n in (size // side, side)]
        assert whole.reshape(parts).any(axis=tuple(range(2, len(parts), 2))).all(), box


@pytest.mark.parametrize("text", TEXTS)
def test_every_cell_of_consecutive_pixels_has_a_pixel(text):
    mask = chosen(text, 64).reshape(-1)
    padded = np.append(mask, np.zeros(-len(mask) % 64, bool))
    assert padded.reshape(-1, 64).any(axis=1).all()


@pytest.mark.parametrize("text", TEXTS)
def test_borders_corners_and_remainders_have_pixels(text):
    mask = chosen(text, 64)
    assert all(mask[corner] for corner in itertools.product(*({0, size - 1} for size in mask.shape)))
    for axis, size in enumerate(mask.shape[1:], 1):
        on_axis = mask.any(axis=tuple(other for other in range(mask.ndim) if other != axis))
        remainders = [size // 2**i * 2**i for i in range(9)]
        assert on_axis[[0, 1, size - 2, size - 1]].all()
        assert on_axis[[index for index in remainders if index < size]].all()
    flat = mask.reshape(-1)
    assert flat[[n for i in range(9) if (n := flat.size // 2**i * 2**i) < flat.size]].all()


@pytest.mark.parametrize("text", TEXTS)
def test_a_sample_is_a_small_part_and_differs_by_seed(text):
    mask = chosen(text, 16)
    assert mask.mean() < 0.3
    assert (mask != chosen(text, 16, seed=1)).any()


@pytest.mark.parametrize(
    "text",
    [
        "conv3d:1x192x9x240x416,192x192x3x3x3,s1,p1",
        "conv2d:32x64x224x224,64x64x3x3,s1,p1",
        "conv2d:1x64x64x64,64x64x3x3",
    ],
)
def test_the_cell_keeps_the_promise_of_one_pixel_in_64(text):
    w = tc.parse(text)
    cell = choose_cell(w)
    assert 4 <= cell <= MAX_CELL
    assert 2 * w.flops / cell <= 64e9
    assert 2 * math.prod(w.output_shape) / cell <= MAX_OUTPUTS
