"""Octets of channels in shared memory: widths without bank conflicts, places of pixels, and the time of copies."""

from __future__ import annotations

from typing import Any

import numpy as np

from ....tir_builder import Expr, to_uint32
from ..implicit_gemm_shape import VECTOR_BYTES

OCTET = 8  # channels of 16 bytes, which a warp multiplies
SWIZZLED_OCTETS = (2, 4, 8)  # octets of a pixel that a swizzle of their width keeps free of bank conflicts
ODD_OCTETS = (3, 5, 7, 9, 15)  # without conflicts as well
STAGE_ALIGNMENT_BYTES = 1024  # of the widest swizzle
SWIZZLE_PIXELS = 8  # pixels after which a swizzle repeats
# Of a line of a box of TMA, and of an SM's share of the memory, fitted to 362 configs of wgrads and dgrads on an H200:
LINE_CYCLES, COPY_BYTES_PER_CYCLE, MEMORY_BYTES_PER_CYCLE = 1.35, 100, 18
UNSWIZZLED_RATIO = 2.3  # of the time of lines without a swizzle, which are no power of two


def locate_octet(octets: int, octet: Expr, pixel: Expr) -> Expr:
    """Return the place of an octet of a pixel, whose chunks a swizzle may exchange."""
    chunk = octet ^ (pixel * octets // SWIZZLE_PIXELS % octets) if octets in SWIZZLED_OCTETS else octet
    return to_uint32((pixel * octets + chunk) * VECTOR_BYTES)


def get_swizzle_bytes(octets: int) -> int:
    """Return the swizzle of a tensor map, or 0."""
    return octets * VECTOR_BYTES if octets in SWIZZLED_OCTETS else 0


def count_copy_cycles(pixels: Any, octets: Any) -> Any:
    """Return the clock cycles in which TMA copies pixels, each of which is a line of a box."""
    is_slow = (octets > 1) & ~np.isin(octets, SWIZZLED_OCTETS)
    return (
        pixels * (LINE_CYCLES + octets * VECTOR_BYTES / COPY_BYTES_PER_CYCLE) * np.where(is_slow, UNSWIZZLED_RATIO, 1)
    )
