"""The product of a wgrad for `hopper`: parts of the reduction as groups, and the constraints on its tiles and parts."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from tvmconv.arithmetic import ceil_div, round_up
from tvmconv.workloads import Conv
from tvmconv.workloads.conv_gradient import WeightGradient
from tvmconv.workloads.dtypes import ACCUMULATOR

from ...tile_config import Rule
from ..implicit_gemm_shape import ACCUMULATOR_BYTES, ImplicitGemmShape
from .constraints import isa_constraints, require_whole_slices, resource_constraints
from .knobs import can_compute_several_tiles
from .product_family import ProductFamily
from .tile_config import (
    K_SLICES_CHOICES,
    KERNEL_SCHEDULES,
    KNOB_OPTIONS,
    RASTER_ORDERS,
    REALLOCATED_WGMMA_M_TILES_CHOICES,
    SUM_DECOMPOSITIONS,
)

PART_PIXELS = 128  # parts are whole K tiles of any size
PARTS_CHOICES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 14, 16, 20, 22, 24, 28, 30, 32, 40, 44, 48, 66, 88, 132)
CLUSTER_CHOICES, MAX_CLUSTER_SIZE = (1, 2, 4, 8), 8  # CTAs along an axis, and in all, of a cluster
COLUMN_UNITS = (64, 32, 16)  # channels per box
MAX_PADDING = 1 / 8  # of columns, for wider boxes
MAX_PADDING_OF_NARROW_BOXES = 1 / 3  # of columns, for boxes of 64 bytes instead of 32, which TMA copies slowly
REDUCTION_LAUNCH_US, WORKSPACE_BYTES_PER_US = 1.2, 5.0e6  # fitted to 240 configs of six layers on an H200


@dataclass(frozen=True)
class PartialProduct:
    """The product of a wgrad in parts, with the attributes of a convolution that `hopper` reads.

    It is a convolution of one line of filters as pixels, and each part of the reduction of each group is a group.
    """

    output_size: tuple[int]  # number of filters of a group
    # Columns of all parts and groups.
    O: int  # noqa: E741  the field's own letter
    C: int  # pixels of all parts, once for each group
    groups: int  # number of parts × groups
    storage: str  # storage dtype of the operands
    min_bytes: int  # minimum number of bytes moved from and to memory
    N: int = 1
    spatial_ndim: int = 1
    kernel: tuple[int] = (1,)
    stride: tuple[int] = (1,)
    dilation: tuple[int] = (1,)
    epilogue: tuple[str, ...] = ()
    argument_dtypes: tuple[str, ...] = (ACCUMULATOR,)


def make_product(w: WeightGradient, num_parts: int) -> Conv:
    """Return the product in parts of whole K tiles; there are fewer if some would have no pixels."""
    forward = w.forward
    pixels, columns = forward.N * math.prod(forward.output_size), choose_columns_per_tap(forward)
    part = round_up(ceil_div(pixels, num_parts), PART_PIXELS)
    parts = ceil_div(pixels, part)
    n = math.prod(forward.kernel) * columns
    filters, groups = forward.O // forward.groups, forward.groups * parts
    product = PartialProduct((filters,), n * groups, part * groups, groups, forward.storage, w.min_bytes)
    if stores_result(w, parts):
        product = replace(product, epilogue=w.epilogue, argument_dtypes=w.argument_dtypes[-1:])
    return cast("Conv", product)


def stores_result(w: WeightGradient, num_parts: int) -> bool:
    """Return whether the kernel stores dK itself: the reduction is whole, and columns are those of dK."""
    return num_parts * w.groups == 1 and choose_columns_per_tap(w.forward) == w.C


def choose_columns_per_tap(w: Conv) -> int:
    """Return the channels of X of a group, padded to whole boxes: wide boxes unless much would be padding.

    If channels do not fill the narrowest boxes either, more padding is permitted for boxes of twice their width.
    """
    channels, (_, medium, narrow) = w.C // w.groups, COLUMN_UNITS
    padded = {unit: round_up(channels, unit) for unit in COLUMN_UNITS}
    if channels % narrow and padded[medium] <= (1 + MAX_PADDING_OF_NARROW_BOXES) * channels:
        padded.pop(narrow)
        return min(padded.values())
    wide = [columns for columns in padded.values() if columns <= (1 + MAX_PADDING) * channels]
    return wide[0] if wide else min(padded.values())


@functools.lru_cache(maxsize=64)
def make_family(w: WeightGradient) -> ProductFamily:
    """Return the products for all numbers of parts that differ."""
    products = {product.groups // w.groups: product for product in (make_product(w, parts) for parts in PARTS_CHOICES)}
    shapes = {parts: ImplicitGemmShape.from_workload(product) for parts, product in sorted(products.items())}
    other_us = {
        parts: 0.0
        if stores_result(w, parts)
        else REDUCTION_LAUNCH_US + 2 * shape.groups * shape.m * shape.n * ACCUMULATOR_BYTES / WORKSPACE_BYTES_PER_US
        for parts, shape in shapes.items()
    }
    return ProductFamily("parts", {parts: products[parts] for parts in shapes}, other_us)


def has_kernel_schedules(w: WeightGradient) -> bool:
    """Return whether dK is so large that a CTA may compute several tiles of useful size of a whole reduction."""
    return can_compute_several_tiles(make_family(w).products[1])


def list_options(w: WeightGradient) -> dict[str, Sequence[Any]]:
    """Return the options of all knobs but the parts."""
    options = KNOB_OPTIONS | {"k_slices": K_SLICES_CHOICES, "cluster_m": CLUSTER_CHOICES, "cluster_n": CLUSTER_CHOICES}
    if not has_kernel_schedules(w):
        return options
    return options | {
        "wgmma_m_tiles": REALLOCATED_WGMMA_M_TILES_CHOICES,
        "kernel_schedule": KERNEL_SCHEDULES,
        "raster_order": RASTER_ORDERS,
        "decomposition": SUM_DECOMPOSITIONS,
    }


def constraints(w: WeightGradient, num_parts: int) -> list[Rule]:
    """Return the constraints on tile configs for a number of parts."""
    product = make_family(w).products[num_parts]
    box = math.gcd(choose_columns_per_tap(w.forward), COLUMN_UNITS[0])
    return [
        *isa_constraints(product),
        *resource_constraints(product),
        require_whole_slices(product.storage, a_is_mn_major=True),
        (f"a cluster has at most {MAX_CLUSTER_SIZE} CTAs", lambda t: t.cluster_size <= MAX_CLUSTER_SIZE),
        ("boxes are at least a narrow swizzle wide", lambda t: np.gcd(t.block_n, box) >= COLUMN_UNITS[-1]),
    ]
