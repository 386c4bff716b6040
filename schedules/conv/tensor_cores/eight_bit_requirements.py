"""Requirements of tensor-core schedules on workloads with 8-bit operands or outputs."""

from __future__ import annotations

from tvmconv.requirements import Requirement
from tvmconv.workloads import Conv
from tvmconv.workloads.dtypes import DTYPES, get_itemsize
from tvmconv.workloads.layout import CHANNELS_LAST


def _has_pairs(w: Conv) -> bool:
    """Return whether channels of 8 bits come in pairs, which are the smallest accesses of threads."""
    output_is_paired = get_itemsize(w.argument_dtypes[-1]) > 1 or w.O // w.groups % 2 == 0
    return not DTYPES[w.dtype].has_8_bits or (w.C // w.groups % 2 == 0 and output_is_paired)


CHANNELS_LAST_EIGHT_BITS = Requirement(
    f"layout {CHANNELS_LAST} for operands of 8 bits",
    lambda w: not DTYPES[w.dtype].has_8_bits or w.layout == CHANNELS_LAST,
    lambda w: f"layout {w.layout}",
)
"""Transposes of channels-first arrays have elements of 16 or 32 bits."""

PAIRED_EIGHT_BITS = Requirement(
    "an even number of channels of 8 bits in each group",
    _has_pairs,
    lambda w: f"{w.C // w.groups} input and {w.O // w.groups} output channels in each group",
)
"""Threads access at least 2 bytes of neighbouring channels."""
