"""Knobs of `winograd_hopper`: choices, constraints, accuracy and estimated latency."""

from __future__ import annotations

import dataclasses
import functools
import math
from fractions import Fraction

from tvmconv.fitted_latency import H200_FIT
from tvmconv.space import Columns, Knobs
from tvmconv.space.search_space import ResourceUsage
from tvmconv.workloads import Conv2d
from tvmconv.workloads.dtypes import DTYPES as ALL_DTYPES
from tvmconv.workloads.dtypes import TF32, get_itemsize
from tvmconv.workloads.layout import CHANNELS_LAST
from tvmconv.workloads.text import MAX_INT32_ELEMENTS

from ...tensor_cores.hopper.constraints import isa_constraints, resource_constraints
from ...tensor_cores.hopper.knobs import pruning_constraints
from ...tensor_cores.hopper.latency import min_latency_us, select_default_config
from ...tensor_cores.hopper.product_family import ProductFamily
from ...tensor_cores.hopper.tile_config import KNOB_OPTIONS, HopperTileConfig
from ...tensor_cores.hopper.tma_requirements import can_load_by_tma
from ...tile_config import declare_choices
from ..cook_toom import WinogradMatrices, compute_error_growth, make_winograd_matrices
from ..knobs import WinogradTileGrid

DTYPES = ("float16", "bfloat16", "tf32")
OUTPUT_TILE_SIZES = (2, 4)
VECTOR_CHOICES = (1, 2, 4, 8)  # channels
MAX_VECTOR_BYTES = 16  # maximum bytes per access
# For tiles of six inputs, these have the smallest error among points with their negatives and reciprocals. The error of
# 0, ±1, 1/2 and -2, which are good in float32, is larger by half.
INTERPOLATION_POINTS = {5: (Fraction(0), Fraction(-2, 3), Fraction(2, 3), Fraction(-3, 2), Fraction(3, 2))}
ERROR_MARGIN = 1.2  # minimum ratio of the tolerance to the expected error
MEAN_ROUNDING_FRACTION = 0.42  # root mean square of the rounding error, relative to the unit roundoff
MAX_PROMISING_RATIO = 1.1  # maximum latency estimate relative to that of `hopper`


def is_supported(w: Conv2d) -> bool:
    """Whether the filter is square with 3 to 7 taps and stride 1, and some tile size is accurate and fits TMA."""
    is_plain = w.groups == 1 and set(w.stride) == {1} and set(w.dilation) == {1} and w.layout == CHANNELS_LAST
    return is_plain and w.R == w.S and 3 <= w.R <= 7 and bool(list_output_tile_sizes(w))


def is_promising(w: Conv2d) -> bool:
    """Return whether the latency estimate is not far above that of `hopper`."""
    if not can_load_by_tma(w):
        return False
    return min(_estimate_latencies_us(w).values()) <= MAX_PROMISING_RATIO * min_latency_us(w)


def get_winograd_matrices(m: int, r: int) -> WinogradMatrices:
    """Return the matrices for m outputs of a filter of r taps."""
    return make_winograd_matrices(m, r, INTERPOLATION_POINTS.get(m + r - 2))


def estimate_relative_error(m: int, r: int, dtype: str) -> float:
    """Return the expected relative L2 error of F(m × m, r × r) on random inputs and weights.

    Rounding errors of U, V and M grow along each axis (`compute_error_growth`); Y is rounded after that. In TF32,
    products and outputs are not rounded. The result is within 5 % of emulations with 64 to 1,280 channels.
    """
    num_transform_roundings, num_output_roundings = (2, 0) if dtype == TF32.name else (3, 1)
    error_growth_squared = compute_error_growth(get_winograd_matrices(m, r)) ** 2
    return (
        MEAN_ROUNDING_FRACTION
        * ALL_DTYPES[dtype].unit_roundoff
        * math.sqrt(num_transform_roundings * error_growth_squared + num_output_roundings)
    )


@functools.lru_cache(maxsize=256)
def list_output_tile_sizes(w: Conv2d) -> tuple[int, ...]:
    """Return the options for outputs per tile and axis whose error is within the tolerance and which TMA can copy."""
    return tuple(
        m
        for m in OUTPUT_TILE_SIZES
        if estimate_relative_error(m, w.R, w.dtype) * ERROR_MARGIN <= w.tolerance
        and count_largest_elements(w, m) <= MAX_INT32_ELEMENTS
        and can_load_by_tma(make_product_workload(w, m))
    )


def count_largest_elements(w: Conv2d, m: int) -> int:
    """Return the elements of the largest transformed tensor."""
    return (m + w.R - 1) ** 2 * max(w.C, w.O) * max(WinogradTileGrid.from_workload(w, m).count, w.C)


def make_product_workload(w: Conv2d, m: int) -> Conv2d:
    """Return the product as a workload: 1×1 filters with one group per point, and tiles as pixels."""
    grid = WinogradTileGrid.from_workload(w, m)
    num_points = grid.alpha**2
    sizes = {"N": 1, "C": num_points * w.C, "H": 1, "W": grid.count, "O": num_points * w.O, "R": 1, "S": 1}
    return dataclasses.replace(w, **sizes, padding=(0,) * 4, groups=num_points, epilogue=())


def declare_knobs(k: Knobs, w: Conv2d) -> tuple[int, int, HopperTileConfig]:
    """Declare the knobs; return the outputs per tile and axis, the channels per thread, and the product's config."""
    family = make_family(w)
    vector_choices = [
        n for n in VECTOR_CHOICES if math.gcd(w.C, w.O) % n == 0 and n * get_itemsize(w.storage) <= MAX_VECTOR_BYTES
    ]
    latencies_us = _estimate_latencies_us(w)
    m = k.choice("output_tile", list(family.products), min(latencies_us, key=latencies_us.__getitem__))
    vector = k.choice("vector", vector_choices, min(vector_choices[-1], 2))
    values = declare_choices(k, KNOB_OPTIONS, select_default_config(family.products[m]))
    family.add_rules(
        k,
        lambda size: [*isa_constraints(family.products[size]), *resource_constraints(family.products[size])],
        lambda size: pruning_constraints(family.products[size]),
    )
    return m, vector, HopperTileConfig(**values)


@functools.lru_cache(maxsize=256)
def make_family(w: Conv2d) -> ProductFamily:
    """Return the products of all tile sizes, with the latency of the input and output transforms."""
    products = {m: make_product_workload(w, m) for m in list_output_tile_sizes(w)}
    return ProductFamily("output_tile", products, {m: _estimate_transforms_us(w, m) for m in products})


def compute_usage(w: Conv2d, columns: Columns) -> ResourceUsage:
    """Return the resources that the product uses, with the latency of the transforms in the estimate."""
    return make_family(w).compute_usage(columns)


def _estimate_latencies_us(w: Conv2d) -> dict[int, float]:
    """Return the lowest latency estimate in microseconds by tile size."""
    family = make_family(w)
    return {m: min_latency_us(product) + family.other_us[m] for m, product in family.products.items()}


def _estimate_transforms_us(w: Conv2d, m: int) -> float:
    """Return the estimated latency of the input and output transforms in microseconds."""
    product_workload = make_product_workload(w, m)
    shapes = (w.input_shape, product_workload.input_shape, product_workload.output_shape, w.output_shape)
    fit = H200_FIT.winograd_transforms
    return sum(map(math.prod, shapes)) * get_itemsize(w.storage) / fit.bytes_per_us + fit.launch_us
