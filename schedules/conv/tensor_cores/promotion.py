"""Promotion of sums of 8-bit floats to float32: the knob `promotion_interval`, and its bound of the error.

The knob is the number of products that are added before the accumulators are added to float32 sums, in whole k-tiles. A
search has only the longest one whose error is bounded, which is none for sums of at most so many products. Longer ones,
and 0 for none, are for users who set them.

The knob `promotion_buffers` is the number of sets of accumulators of a warpgroup. Of two sets, one is promoted while
the wgmmas of the other run.

The knob `promotion_order` says when the warpgroups of a tile promote: all at the same time, or in turn, one while the
wgmmas of the others run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tvmconv.arithmetic import round_up
from tvmconv.workloads import Conv
from tvmconv.workloads.dtypes import DTYPES, FLOAT8_DTYPES
from tvmconv.workloads.quantization import (
    MAX_ACCUMULATION_ERROR,
    PRODUCTS_PER_INSTRUCTION,
    bound_accumulation_error,
)

from ..tile_config import Rule

KNOB, BUFFERS_KNOB, ORDER_KNOB = "promotion_interval", "promotion_buffers", "promotion_order"
PROMOTION_INTERVALS = (192, 128, 256, 512, 1024, 0)
MAX_PRODUCTS, NEVER = PROMOTION_INTERVALS[0], PROMOTION_INTERVALS[-1]
assert bound_accumulation_error(MAX_PRODUCTS) <= MAX_ACCUMULATION_ERROR
PROMOTION_BUFFERS = (1, 2)
SIMULTANEOUS, ALTERNATING = "simultaneous", "alternating"
PROMOTION_ORDERS = (SIMULTANEOUS, ALTERNATING)
# Products of each sum from which on promotions in turn are worth trying. In shorter reductions on an H200, kernels with
# them took 0.99 to 2.1 times as long as others.
MIN_ALTERNATING_PRODUCTS = 2048


def has_eight_bits(w: Conv) -> bool:
    """Return whether the operands of a convolution have 8 bits; those of other products do not."""
    return isinstance(w, Conv) and DTYPES[w.dtype].has_8_bits


def has_float8_sums(w: Conv) -> bool:
    """Return whether sums are those of products of 8-bit floats."""
    return isinstance(w, Conv) and w.dtype in FLOAT8_DTYPES


def needs_promotion(w: Conv) -> bool:
    """Return whether sums are those of more products of 8-bit floats than the bound of their error permits.

    Instructions add the channels of a tap, so that the last one of a tap may add zeros.
    """
    if not has_float8_sums(w):
        return False
    products_per_tap = round_up(w.C // w.groups, PRODUCTS_PER_INSTRUCTION)
    return math.prod(w.kernel) * products_per_tap > MAX_PRODUCTS


def list_intervals(w: Conv) -> tuple[int, ...]:
    """Return the choices of the interval for a convolution; the first one is the default, and the only one searched."""
    default = MAX_PRODUCTS if needs_promotion(w) else NEVER
    return default, *(interval for interval in PROMOTION_INTERVALS if interval != default)


def has_integer_output(w: Conv) -> bool:
    """Return whether sums are stored as integers, whose parts cannot be added in float32."""
    return isinstance(w, Conv) and w.output_dtype == "int32"


def prune_short_alternation(count_products: Callable[[Any], Any]) -> Rule:
    """Return the condition on a search that promotions in turn are for long reductions.

    Args:
        count_products: Function from configs to the products of each sum.
    """
    return (
        f"warpgroups promote in turn only if a sum has at least {MIN_ALTERNATING_PRODUCTS} products",
        lambda t: np.not_equal(t.promotion_order, ALTERNATING) | (count_products(t) >= MIN_ALTERNATING_PRODUCTS),
    )


def limit_accumulation_error(w: Conv, count_products: Callable[[Any], Any]) -> list[Rule]:
    """Return the constraints that only a user may lift, by setting the knob; none for other sums.

    Args:
        w: The convolution.
        count_products: Function from configs to the products that are added before a promotion; 0 without promotion.
    """
    if not has_float8_sums(w):
        return []
    if not needs_promotion(w):
        return [("short sums of 8-bit floats are not promoted", lambda t: np.equal(t.promotion_interval, NEVER))]
    return [
        (
            f"sums of 8-bit floats have at most {MAX_PRODUCTS} products before they are promoted",
            lambda t: (count_products(t) > 0) & (count_products(t) <= MAX_PRODUCTS),
        ),
        (
            "sums of 8-bit floats are not promoted more often than their bound requires",
            lambda t: np.equal(t.promotion_interval, MAX_PRODUCTS),
        ),
    ]
