"""Sums of products of 8-bit operands as tensor cores compute them.

Integers are added in int32. The sums of 8-bit floats on sm_89 and sm_90 keep few bits: the products of an instruction
and the accumulator are aligned to the largest exponent among them, truncated, and then added. Sources: see
`tvmconv.workloads.quantization`, which also derives the error.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvmconv.workloads.quantization import MANTISSA_BITS


def add_float8_products(
    a: NDArray[np.float32], b: NDArray[np.float32], accumulators: NDArray[np.float32] | None
) -> NDArray[np.float32]:
    """Return A times the transpose of B plus the accumulators, with few bits of each addend.

    Args:
        a: Elements of A, of shape (products, m, k).
        b: Elements of B, of shape (products, n, k).
        accumulators: Accumulators of shape (products, m, n); None for zeros.

    Returns:
        The new accumulators.
    """
    largest = np.zeros((*a.shape[:2], b.shape[1]), np.float32) if accumulators is None else np.abs(accumulators)
    sizes_a, sizes_b = np.abs(a), np.abs(b)
    for k in range(a.shape[2]):
        np.maximum(largest, sizes_a[:, :, None, k] * sizes_b[:, None, :, k], out=largest)
    _, exponents = np.frexp(largest)  # largest < 2 ** exponent, so its leading bit has the value 2 ** (exponent - 1)
    unit = np.ldexp(np.float32(1), exponents - 1 - MANTISSA_BITS)
    sums = np.zeros_like(largest) if accumulators is None else np.trunc(accumulators / unit)
    for k in range(a.shape[2]):
        sums += np.trunc(a[:, :, None, k] * b[:, None, :, k] / unit)
    return (sums * unit).astype(np.float32)


def add_integer_products(
    a: NDArray[Any], b: NDArray[Any], accumulators: NDArray[np.uint32] | None
) -> NDArray[np.uint32]:
    """Return A times the transpose of B plus the accumulators, which are the bits of int32, in the same bits."""
    products = np.matmul(a.astype(np.float64), b.astype(np.float64).transpose(0, 2, 1)).astype(np.int32)
    return products.view(np.uint32) if accumulators is None else products.view(np.uint32) + accumulators
