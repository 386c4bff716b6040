"""What there is to choose in `winograd_hopper`, what it errs by, and how long its kernels take, about."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from tvmconv.knobs import Columns, Knobs
from tvmconv.knobs.space import Usage
from tvmconv.workloads import Conv2d
from tvmconv.workloads.dtypes import DTYPES as ALL_DTYPES
from tvmconv.workloads.dtypes import TF32, numpy_dtype
from tvmconv.workloads.layout import CHANNELS_LAST
from tvmconv.workloads.text import MAX_ELEMENTS

from ...tensor_cores.hopper import choice as product_choice
from ...tensor_cores.hopper.estimate import preferred, preferred_estimate
from ...tensor_cores.hopper.rules import fitting, legal
from ...tensor_cores.hopper.tiles import CHOICES, TILES, HopperTiles
from ...tensor_cores.hopper.workload import can_be_copied
from ..cook_toom import Transforms, error_growth, transforms
from ..plan import Grid

DTYPES = ("float16", "bfloat16", "tf32")
TILE_SIZES = (2, 4)
VECTORS = (1, 2, 4, 8)  # channels
VECTOR_BYTES = 16  # of an access, at most
# With six inputs a tile, of points that are each other's negatives and reciprocals these err least: 0, ±1, 1/2 and -2,
# which serve float32 well, by a half more.
POINTS = {5: (Fraction(0), Fraction(-2, 3), Fraction(2, 3), Fraction(-3, 2), Fraction(3, 2))}
MARGIN = 1.2  # of an expected error against the tolerance
ROUNDED = 0.42  # of the unit roundoff, what rounding changes on average (root mean square)
PROMISING = 1.1  # times the estimate of `hopper` alone
# What the transforms take beside the product: fitted to the three fastest configs each of 57 layers, of Stable
# Diffusion 1.5, ResNet-50, VGG-16 and YOLOv8s, in float16 and TF32 on one H200. Nine tenths of the estimates are within
# 9 % of what was measured.
TRANSFORMED = 3.8e6  # bytes that the transforms read and write in a microsecond
TRANSFORM_LAUNCHES = 0.6  # microseconds


def applies(w: Conv2d) -> bool:
    """Whether the filter is square, of 3 to 7 taps, applied to each pixel, and some tile is right and can be copied."""
    plain = w.groups == 1 and set(w.stride) == {1} and set(w.dilation) == {1} and w.layout == CHANNELS_LAST
    return plain and w.R == w.S and 3 <= w.R <= 7 and bool(tile_sizes(w))


def is_promising(w: Conv2d) -> bool:
    """Whether the estimate is not far above that of `hopper` alone."""
    if not can_be_copied(w):
        return False
    return min(_estimates(w).values()) <= PROMISING * preferred_estimate(w)


def matrices(m: int, r: int) -> Transforms:
    """The matrices for m outputs of a filter of r taps."""
    return transforms(m, r, POINTS.get(m + r - 2))


def expected_error(m: int, r: int, dtype: str) -> float:
    """The relative L2 error of F(m × m, r × r) on random inputs and weights.

    Rounding errors of U, V and M grow along each axis (`error_growth`); Y is rounded behind that. In TF32 products and
    outputs are not rounded. Within 5% of emulations with 64 to 1,280 channels.
    """
    alike, behind = (2, 0) if dtype == TF32.name else (3, 1)
    grown = error_growth(matrices(m, r)) ** 2
    return ROUNDED * ALL_DTYPES[dtype].rounding * math.sqrt(alike * grown + behind)


@functools.lru_cache(maxsize=256)
def tile_sizes(w: Conv2d) -> tuple[int, ...]:
    """The outputs of a tile along each axis, of those whose error is within the tolerance, and which TMA can copy."""
    return tuple(
        m
        for m in TILE_SIZES
        if expected_error(m, w.R, w.dtype) * MARGIN <= w.tolerance
        and (m + w.R - 1) ** 2 * max(w.C, w.O) * max(Grid.of(w, m).count, w.C) <= MAX_ELEMENTS
        and can_be_copied(product(w, m))
    )


def product(w: Conv2d, m: int) -> Conv2d:
    """The products of all places in a tile: 1×1 filters in as many groups, on tiles as pixels."""
    grid = Grid.of(w, m)
    places = grid.alpha**2
    sizes = {"N": 1, "C": places * w.C, "H": 1, "W": grid.count, "O": places * w.O, "R": 1, "S": 1}
    return dataclasses.replace(w, **sizes, padding=(0,) * 4, groups=places, epilogue=())


def ask(k: Knobs, w: Conv2d) -> tuple[int, int, HopperTiles]:
    """Ask for the outputs of a tile along an axis, the channels of a thread, and the product's tiles."""
    sizes = tile_sizes(w)
    vectors = [n for n in VECTORS if math.gcd(w.C, w.O) % n == 0 and n * _itemsize(w) <= VECTOR_BYTES]
    estimates = _estimates(w)
    m = k.choice("tile_m", sizes, min(estimates, key=estimates.__getitem__))
    vector = k.choice("vector", vectors, min(vectors[-1], 2))
    default = preferred(product(w, m))
    chosen = {
        name: k.choice(name, choices, getattr(default, name)) for name, choices in zip(TILES, CHOICES, strict=True)
    }
    for size in sizes:
        for text, holds in (*legal(product(w, size)), *fitting(product(w, size))):
            k.condition(text, _of_size(w, size, holds))
        for text, holds in product_choice.promising(product(w, size)):
            k.search_only(text, _of_size(w, size, holds))
    return m, vector, HopperTiles(**chosen)


def _of_size(w: Conv2d, size: int, holds: Callable[[HopperTiles], Any]) -> Callable[[Columns], Any]:
    """Of configs with tiles of a size, whether something holds; of others it does."""
    return lambda c: (c["tile_m"] != size) | holds(HopperTiles.of_columns(c, product(w, size)))


def usage(w: Conv2d, c: Columns) -> Usage:
    """What configs use of a device: what their product does, and how long the transforms take."""
    found = {m: _usage(w, m, c) for m in tile_sizes(w)}
    (first, *others) = found
    columns = found[first].columns()
    for m in others:
        own = found[m].columns()
        columns = {name: np.where(c["tile_m"] == m, own[name], column) for name, column in columns.items()}
    return Usage(**columns, tick=1e-6)


def _usage(w: Conv2d, m: int, c: Columns) -> Usage:
    found = product_choice.usage(product(w, m), c)
    assert found.estimate is not None  # which `hopper` tells
    found.estimate = found.estimate + _transforms_take(w, m)
    return found


def _estimates(w: Conv2d) -> dict[int, float]:
    """Microseconds that the best config is estimated to take, by the size of a tile."""
    return {m: preferred_estimate(product(w, m)) + _transforms_take(w, m) for m in tile_sizes(w)}


def _transforms_take(w: Conv2d, m: int) -> float:
    """Microseconds of the transforms of inputs and outputs, about."""
    of_product = product(w, m)
    shapes = (w.input_shape, of_product.input_shape, of_product.output_shape, w.output_shape)
    return sum(map(math.prod, shapes)) * _itemsize(w) / TRANSFORMED + TRANSFORM_LAUNCHES


def _itemsize(w: Conv2d) -> int:
    return numpy_dtype(w.storage).itemsize
